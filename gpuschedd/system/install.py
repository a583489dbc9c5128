"""`gpuschedd install`: puts units, PAM stack and commands of the venv it runs from in place.

Says what it did, line by line. It starts nothing and touches no job, database or existing
configuration. It refuses a venv that the service could not read or that others could change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from gpusched_client import paths

COMMANDS = ("gsub", "gq", "gcancel", "gctl", "gpuschedd", "gpusched-simjob")
UNITS = ("gpuschedd.socket", "gpuschedd.service", "gpusched-nvidia.service", "gpusched.slice")
UNIT_DIR, PAM_FILE = Path("/etc/systemd/system"), Path("/etc/pam.d/gpusched")
BIN_DIR = Path("/usr/local/bin")
_CONFIG = Path(paths.SYSTEM_CONFIG)
_HIDDEN = ("/home", "/root", "/run/user")  # by ProtectHome
_PRIVATE = ("/tmp", "/var/tmp")  # by PrivateTmp


class Refused(click.ClickException):
    """Nothing was changed."""

    exit_code = 78

    def show(self, file: IO[Any] | None = None) -> None:
        """As all the daemon's errors begin."""
        click.echo(f"gpuschedd: {self.format_message()}", file=file, err=file is None)


@dataclass(frozen=True, slots=True)
class Step:
    """One change: what is said of it, and what does it. `act` None: nothing to do."""

    text: str
    act: Callable[[], object] | None


def share_dir() -> Path:
    """The folder `systemd/` of the checkout or of the installed distribution."""
    checkout = Path(__file__).resolve().parents[2] / "systemd"
    if checkout.is_dir():
        return checkout
    installed = Path(sysconfig.get_path("data")) / "share" / "gpuschedd" / "systemd"
    if installed.is_dir():
        return installed
    raise Refused(f"the unit files are missing: neither {checkout} nor {installed} is there")


# --- Is the venv fit? -------------------------------------------------------------------------


def check_venv() -> None:
    """Refuse where the service or users cannot read what runs, or others could replace it."""
    places = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[1]}
    places |= set(_links(Path(sys.executable)))
    for place in sorted(places):
        problem = problem_with(place)
        if problem is not None:
            raise Refused(
                f"{problem}. Make a venv elsewhere with a Python of the system's, and install from "
                "there: /usr/bin/python3 -m venv /opt/gpuschedd"
            )


def _links(path: Path) -> Iterator[Path]:
    """The path and all that it points to, link by link."""
    for _ in range(40):
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent / os.readlink(path)))


def problem_with(place: Path, trusted_uid: int = 0) -> str | None:
    """Why this place cannot serve root and all users; None where it can."""
    for hidden in _HIDDEN:
        if place.is_relative_to(hidden):
            return f"{place} lies below {hidden}, which the service cannot see (ProtectHome)"
    for private in _PRIVATE:
        if place.is_relative_to(private):
            return f"{place} lies below {private}, where the service has a folder of its own"
    for part in (place, *place.parents):
        found = part.stat()
        if found.st_uid not in (0, trusted_uid) or found.st_mode & 0o022:
            return f"{part} can be changed by others than root, and root would run what is in it"
        wanted = 0o005 if stat.S_ISDIR(found.st_mode) else 0o004
        if found.st_mode & wanted != wanted:
            return f"{part} cannot be read by everybody (mode {stat.S_IMODE(found.st_mode):o})"
    return None


# --- The steps --------------------------------------------------------------------------------


def install_steps(root: Path, share: Path, bin_dir: Path) -> Iterator[Step]:
    """Everything that has to be in place, in order; what is there already is left."""
    for name in UNITS:
        yield _write(root, UNIT_DIR / name, _rendered(share / name, share))
    yield _write(root, PAM_FILE, (share / "pam.d" / "gpusched").read_bytes())
    example = (share / "config.example.toml").read_bytes()
    config = _below(root, _CONFIG)
    if config.exists():
        yield Step(f"keep {paths.SYSTEM_CONFIG}", None)
    else:
        yield Step(f"write {config}", lambda: _write_file(config, example))
    for command in COMMANDS:
        target = _scripts() / command
        if target.exists():
            yield _link(root, bin_dir / command, target)


def foreign_commands(root: Path, bin_dir: Path) -> list[str]:
    """Of our commands' names there, those that are another program's: gflow has some of them too.

    A link into another venv of ours is ours: it has the daemon beside the command. One to nothing
    is nobody's.
    """
    found = []
    for command in COMMANDS:
        link = _below(root, bin_dir / command)
        if not link.is_symlink():
            found += [str(link)] if link.exists() else []
        elif link.exists() and not link.resolve().with_name("gpuschedd").exists():
            target = os.readlink(link)
            found.append(f"{link} -> {target}")
    return found


def shadowed_commands(bin_dir: Path, search: str) -> list[str]:
    """Which of our names a shell with that PATH takes from elsewhere."""
    found = ((command, shutil.which(command, path=search)) for command in COMMANDS)
    return [
        f"{command} is {place}, not ours"
        for command, place in found
        if place is not None and Path(place) != bin_dir / command
    ]


def uninstall_steps(root: Path, share: Path, bin_dir: Path) -> Iterator[Step]:
    """What install put in place, if it is still as install made it. Books and jobs stay."""
    shipped = {UNIT_DIR / name: _rendered(share / name, share) for name in UNITS}
    shipped[PAM_FILE] = (share / "pam.d" / "gpusched").read_bytes()
    for path, content in shipped.items():
        if _is_edited(_below(root, path), content):
            yield Step(f"keep {_below(root, path)}: it was edited", None)
        else:
            yield _remove(root, path)
    if _is_same(_below(root, _CONFIG), (share / "config.example.toml").read_bytes()):
        yield _remove(root, _CONFIG)
    else:
        yield Step(f"keep {paths.SYSTEM_CONFIG}: it was edited", None)
    for command in COMMANDS:
        link = _below(root, bin_dir / command)
        if link.is_symlink() and Path(os.readlink(link)).parent == _scripts():
            yield _remove(root, bin_dir / command)
    yield Step(f"keep {paths.SYSTEM_STATE_DIR}: queue, accounting database and running jobs", None)


def _scripts() -> Path:
    return Path(sysconfig.get_path("scripts"))


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _rendered(source: Path, share: Path) -> bytes:
    """A unit with the places of this venv. A `%` or `$` in them would be PID 1's."""
    words = {"@PYTHON@": sys.executable, "@SHARE@": str(share)}
    text = source.read_text(encoding="utf-8")
    for mark, value in words.items():
        if any(char in value for char in " \t\"'\\%$"):
            raise Refused(f"{value!r} has a character that units cannot hold; use another place")
        text = text.replace(mark, value)
    return text.encode()


def _is_same(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False


_STAMP = b"# Written by `gpuschedd install`; of what is above, unedited, sha256: "


def _stamped(content: bytes) -> bytes:
    """With a last line by which a later install knows that nobody edited it."""
    return content + _STAMP + hashlib.sha256(content).hexdigest().encode() + b"\n"


def _is_edited(target: Path, shipped: bytes) -> bool:
    """Whether it is not as an install wrote it; one from before there were stamps is as shipped."""
    if target.is_symlink():
        return True
    try:
        found = target.read_bytes()
    except FileNotFoundError:
        return False
    content, stamp, _digest = found.rpartition(_STAMP)
    return _stamped(content) != found if stamp else found != shipped


def _write(root: Path, path: Path, content: bytes) -> Step:
    """What an administrator edited stays in force, and the new one is put beside it."""
    target, new = _below(root, path), _stamped(content)
    if _is_same(target, new):
        return Step(f"same {target}", None)
    if _is_edited(target, content):
        beside = target.with_name(f"{target.name}.new")
        text = f"keep {target}: it was edited; the new one is {beside}: compare them"
        return Step(text, lambda: _write_file(beside, new))
    word = "replace" if target.exists() else "write"
    return Step(f"{word} {target}", lambda: _write_file(target, new))


def _write_file(target: Path, content: bytes) -> None:
    """Whole or not at all, readable by everybody."""
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o644), "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    os.replace(temporary, target)


def _link(root: Path, path: Path, target: Path) -> Step:
    link = _below(root, path)
    if link.is_symlink() and Path(os.readlink(link)) == target:
        return Step(f"same {link}", None)

    def act() -> None:
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    return Step(f"link {link} -> {target}", act)


def _remove(root: Path, path: Path) -> Step:
    target = _below(root, path)
    if not target.exists() and not target.is_symlink():
        return Step(f"gone {target}", None)
    return Step(f"remove {target}", lambda: target.unlink())


# --- The command ------------------------------------------------------------------------------


@click.command()
@click.option(
    "--prefix",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/"),
    help="Put everything below this folder instead of / (for images and packages).",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@click.option("--uninstall", is_flag=True, help="Take away what an install put in place.")
@click.option(
    "--bindir",
    type=click.Path(path_type=Path, file_okay=False),
    default=BIN_DIR,
    show_default=True,
    help="Where the links to the commands go.",
)
@click.option("--force-links", is_flag=True, help="Replace other programs' commands there.")
def cli(prefix: Path, dry_run: bool, uninstall: bool, bindir: Path, force_links: bool) -> None:
    """Put the system service of this venv in place (root): units, PAM stack, commands."""
    is_live = prefix == Path("/")
    if is_live and os.geteuid() != 0 and not dry_run:
        raise Refused("this needs root; --prefix or --dry-run do not")
    share = share_dir()
    bindir = bindir.absolute()
    if not uninstall:
        check_venv()
        foreign = foreign_commands(prefix, bindir)
        if foreign and not force_links:
            raise Refused(
                f"{', '.join(foreign)}: {'is' if len(foreign) == 1 else 'are'} another program's. "
                "--force-links replaces, --bindir puts our commands elsewhere"
            )
    was_active = is_live and _is_active()
    if uninstall and is_live and not dry_run:
        _systemctl("disable", "--now", *UNITS[:2])
    steps = uninstall_steps if uninstall else install_steps
    for step in steps(prefix, share, bindir):
        if step.act is not None and not dry_run:
            step.act()
        click.echo(step.text)
    if is_live and not dry_run:
        _systemctl("daemon-reload")
    if not uninstall:
        how = "enable --now" if is_live else f"--root={prefix} enable"
        units = "gpuschedd.socket gpuschedd.service"
        if was_active:  # it still runs the code of before
            how, units = "restart", "gpuschedd.service"
        click.echo(f"next: systemctl {how} {units}")
    if not uninstall and is_live:
        for text in shadowed_commands(bindir, os.environ.get("PATH", os.defpath)):
            click.echo(f"warning: by your PATH {text}", err=True)


def _is_active() -> bool:
    """Whether the service runs now."""
    if not Path("/run/systemd/system").is_dir():
        return False
    words = ["systemctl", "--quiet", "is-active", UNITS[1]]
    return subprocess.run(words, check=False, env={"PATH": "/usr/bin:/bin"}).returncode == 0


def _systemctl(*words: str) -> None:
    """Ask PID 1, where it is systemd."""
    if not Path("/run/systemd/system").is_dir():
        click.echo("systemd is not running here: units are in place, not loaded")
        return
    subprocess.run(["systemctl", "--quiet", *words], check=False, env={"PATH": "/usr/bin:/bin"})
    click.echo("systemctl " + " ".join(words))
