"""A real systemd as PID 1, in namespaces over an overlay of /: units, users and power cuts.

Nothing inside touches the machine's files: all mounts live in a mount namespace that is held by a
process which ends with the tests. Needs root, util-linux, iproute2, dbus and systemd. Where the
machine binds the memory, pids and cpu controllers to cgroup v1, units accept their limits and do
not enforce them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.daemon import until

INIT = Path(__file__).with_name("box_init.sh")
REPOSITORY = Path(__file__).parents[2]
TOOLS = ("unshare", "nsenter", "ip", "dbus-daemon", "setpriv", "useradd", "mount")
SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = "gpuschedd-box-"
SYSTEM_PYTHON = "/usr/bin/python3"
VENV = Path("/opt/gpuschedd")
BIN = VENV / "bin"

#: Units of the machine that only make noise in a box, or reach for its hardware.
MASKED = (
    *("systemd-udevd.service", "systemd-udev-trigger.service", "systemd-udevd-kernel.socket"),
    *("systemd-udevd-control.socket", "systemd-modules-load.service", "systemd-sysctl.service"),
    *("systemd-networkd.service", "systemd-resolved.service", "systemd-timesyncd.service"),
    *("networking.service", "ssh.service", "cron.service", "getty.target"),
    *("console-getty.service", "systemd-remount-fs.service", "systemd-random-seed.service"),
    *("systemd-hwdb-update.service", "systemd-binfmt.service", "sys-kernel-debug.mount"),
    *(
        "sys-kernel-tracing.mount",
        "sys-kernel-config.mount",
        "systemd-networkd-wait-online.service",
    ),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer"),
    *("fstrim.timer", "e2scrub_reap.service", "proc-sys-fs-binfmt_misc.automount"),
)
KEPT = ("dbus", "systemd", "user@", "gpusched")


def why_not() -> str | None:
    """Why no box can be booted here; None where one can."""
    if os.geteuid() != 0:
        return "needs root to boot a systemd of its own"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not SYSTEMD.exists():
        return f"needs systemd and {', '.join(missing) or 'nothing else'}"
    if not Path(SYSTEM_PYTHON).exists():
        return f"needs {SYSTEM_PYTHON}"
    return None


class Box:
    """One disk, and the systemd that runs on it now and then."""

    def __init__(self, place: Path, size: str = "2g") -> None:
        self.place = place
        self.root = place / "root"
        self._init: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self.cgroup = self._make_cgroup()
        self._holder = self._hold(size)
        self._prepare_disk()

    # --- life ---------------------------------------------------------------------------------

    def _hold(self, size: str) -> subprocess.Popen[bytes]:
        """A process that keeps the disk mounted in a namespace of its own until its stdin ends."""
        script = (
            f"mount -t tmpfs -o size={size},mode=755 tmpfs {self.place} && "
            f"cd {self.place} && mkdir up wk root && "
            f"mount -t overlay overlay -o lowerdir=/,upperdir=up,workdir=wk root && "
            f"mount -t tmpfs -o mode=700 tmpfs root/root && "
            "echo ready && read line"
        )
        holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != b"ready\n":
            raise AssertionError("the box's disk cannot be mounted")
        return holder

    def _make_cgroup(self) -> Path:
        """A group of the unified hierarchy, to be the box's root. Empty ones of old runs go."""
        unified = _unified_hierarchy()
        for old in unified.glob(f"{CGROUPS}*"):
            _remove_cgroup(old)
        group = unified / f"{CGROUPS}{os.getpid()}-{self.place.name}"
        group.mkdir()
        return group

    def _prepare_disk(self) -> None:
        units = self.disk("/etc/systemd/system")
        wanted = units / "multi-user.target.wants"
        found = {entry.name for entry in wanted.iterdir()} if wanted.exists() else set()
        found |= {f"{name}.service" for name in os.listdir(self.disk("/etc/init.d"))}
        for name in {*MASKED, *found}:
            if name in MASKED or not name.startswith(KEPT):
                with contextlib.suppress(FileExistsError):
                    (units / name).symlink_to("/dev/null")
        self.disk("/etc/fstab").write_text("")
        self.disk("/etc/hostname").write_text("box\n")
        machine_id = self.disk("/etc/machine-id")
        if not machine_id.exists() or not machine_id.read_text().strip():
            machine_id.write_text("0123456789abcdef0123456789abcdef\n")

    def boot(self) -> Box:
        """Start its systemd and wait until it has started what it starts."""
        script = (
            f"echo $$ > {self.cgroup}/cgroup.procs && exec nsenter --target {self._holder.pid} "
            "--mount -- unshare --mount --pid --fork --uts --ipc --cgroup --net "
            f"--kill-child=KILL sh {INIT} {self.root}"
        )
        self._init = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # unshare's regret that its child was killed
        )
        self._pid = until(self._find_pid, "the box's PID 1 is systemd")
        until(self._is_up, "the box has booted")
        return self

    def _find_pid(self) -> int | None:
        assert self._init is not None
        if self._init.poll() is not None:
            raise AssertionError(f"the box ended with status {self._init.returncode}")
        pid = self._init.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            comm = Path(f"/proc/{children[0]}/comm").read_text() if children else ""
        except OSError:
            return None
        return int(children[0]) if comm.startswith("systemd") else None

    def _is_up(self) -> bool:
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() in (
            "running",
            "degraded",
        )

    @property
    def pid(self) -> int:
        """Its PID 1 as this machine numbers it."""
        assert self._pid is not None
        return self._pid

    def power_cut(self) -> None:
        """End everything inside at once; the disk stays as the kernel's cache has it."""
        if self._pid is not None and self._init is not None:
            os.kill(self._pid, signal.SIGKILL)
            self._init.wait(30)
        self._pid = self._init = None

    def close(self) -> None:
        """End it, its disk and its cgroup."""
        self.power_cut()
        self._holder.kill()
        self._holder.communicate(timeout=30)
        until(lambda: _remove_cgroup(self.cgroup), "the box's cgroup is empty")

    # --- inside -------------------------------------------------------------------------------

    def disk(self, path: str | Path) -> Path:
        """A path of its disk, as this machine reaches it; not below /run, /tmp, /dev or /root."""
        return Path(f"/proc/{self._holder.pid}/root{self.root}{path}")

    def inside(self, path: str | Path) -> Path:
        """A path as its processes see it, mounts included."""
        return Path(f"/proc/{self.pid}/root{path}")

    def command(self, *words: str | Path, user: str | None = None) -> list[str]:
        """A command line that runs `words` inside, as root or as a user with a login's groups."""
        script = f'echo $$ > {self.cgroup}/init.scope/cgroup.procs; exec "$@"'
        spaces = [f"--{name}" for name in ("mount", "pid", "uts", "ipc", "cgroup", "net")]
        line = ["sh", "-c", script, "sh", "nsenter", "--target", str(self.pid), *spaces]
        home = "/root" if user is None else f"/home/{user}"
        environment = [
            *("env", "-i", "LANG=C.UTF-8", f"HOME={home}", f"USER={user or 'root'}"),
            "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        line += ["--root", f"--wdns={home if user else '/'}", *environment]
        if user is not None:
            line += ["runuser", "-u", user, "--"]
        return [*line, *map(str, words)]

    def run(
        self,
        *words: str | Path,
        user: str | None = None,
        check: bool = True,
        timeout_s: float = 60.0,
        text: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end; `text` is its stdin."""
        done = subprocess.run(
            self.command(*words, user=user),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            input=text or "",
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{words}: status {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def popen(self, *words: str | Path, user: str | None = None) -> subprocess.Popen[str]:
        """Start a command inside."""
        return subprocess.Popen(
            self.command(*words, user=user),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def sh(self, line: str, user: str | None = None, check: bool = True) -> str:
        """stdout of a shell line."""
        return self.run("sh", "-c", line, user=user, check=check).stdout


def _unified_hierarchy() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise AssertionError("no cgroup2 is mounted here")


def _remove_cgroup(group: Path) -> bool:
    """Whether it is gone; a group with processes stays."""
    for directory, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    return not group.exists()


# --- the package ----------------------------------------------------------------------------------


def build_wheels(target: Path) -> None:
    """The project and what it needs, for the system's Python."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    version = _system_version()
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        _checked([*pip, "wheel", "-w", str(target), str(REPOSITORY)])
        return
    _checked([*pip, "wheel", "--no-deps", "-w", str(target), str(REPOSITORY)])
    (wheel,) = target.glob("gpuschedd-*.whl")
    only = ["--only-binary=:all:", f"--python-version={version}"]
    _checked([*pip, "download", *only, "-d", str(target), str(wheel)])


def _system_version() -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [SYSTEM_PYTHON, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.stdout}{done.stderr}")


def install_package(box: Box, wheels: Path, venv: Path = VENV) -> None:
    """A venv of the system's Python inside, with the project in it; no network, no ensurepip.

    The pip is the one that runs here: distributions part ensurepip from its wheels.
    """
    import pip as own_pip

    there = Path("/var/wheels")
    box.disk(there).mkdir(exist_ok=True)
    for wheel in wheels.glob("*.whl"):
        shutil.copy(wheel, box.disk(there))
    package = Path(own_pip.__file__).parent
    shutil.copytree(package, box.disk(there / "lib" / "pip"), dirs_exist_ok=True)
    box.run(SYSTEM_PYTHON, "-m", "venv", "--without-pip", venv)
    pip = f"PYTHONPATH={there / 'lib'} {venv}/bin/python -m pip"
    box.sh(f"{pip} install --quiet --no-index --find-links {there} --no-compile gpuschedd")


@contextlib.contextmanager
def booted_box(size: str = "2g") -> Iterator[Box]:
    """A box that has booted, and is gone afterwards whatever happens."""
    place = Path(tempfile.mkdtemp(prefix="gpuschedd-box-"))
    try:
        box = Box(place, size)
        try:
            yield box.boot()
        finally:
            box.close()
    finally:
        place.rmdir()
