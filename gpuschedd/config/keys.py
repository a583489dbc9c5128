"""The configuration file: typed TOML, every key known, every refusal with its line and cure.

Reads one file and `--set` overrides; decides nothing.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gpusched_client.errors import Invalid
from gpusched_client.units import parse_bytes, parse_duration
from gpuschedd.gpu.simulated.source import parse_host

CONFIG_BYTES_MAX = 256 * 1024
SECONDS_MAX = 10 * 365 * 86_400  # of a duration
_MIB = 2**20


class ConfigError(Exception):
    """A file or a value that cannot be used; the text names line, value and cure."""


Parse = Callable[[Any], Any]


def _key(default: Any, parse: Parse, doc: str) -> Any:
    """A dataclass field that knows how its TOML value is read and what it means."""
    return field(default=default, metadata={"parse": parse, "doc": doc})


def _integer(low: int, high: int) -> Parse:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def _number(low: float, high: float) -> Parse:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        if not low <= float(value) <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return float(value)

    return parse


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _choice(*words: str) -> Parse:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError("must be one of " + ", ".join(f'"{word}"' for word in words))
        return str(value)

    return parse


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1_000 or "\0" in value:
        raise ValueError("must be a text of at most 1,000 characters")
    return value


def _host(value: Any) -> str:
    text = _text(value)
    if text:
        try:
            parse_host(text)
        except Invalid as error:
            raise ValueError(str(error)) from error
    return text


def _bytes(value: Any) -> int:
    """ "512M", "18G"; a bare number is MiB."""
    try:
        return parse_bytes(str(value))
    except Invalid as error:
        raise ValueError(str(error)) from error


def _seconds(value: Any) -> float:
    """ "10s", "2h", "7d"; a bare number is seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= SECONDS_MAX:
            raise ValueError(f"must be from 0 to {SECONDS_MAX} seconds")
        return float(value)
    text = str(value)
    if text.isdecimal():
        raise ValueError(
            f"write {text} without quotes for seconds, or with a unit: {text}s, {text}m"
        )
    try:
        seconds = parse_duration(text)
    except Invalid as error:
        raise ValueError(str(error)) from error
    if seconds is None:
        raise ValueError("must be a duration such as 10s, 2h or 7d")
    return float(seconds)


def _span(least_s: float) -> Parse:
    """A duration that is not too short for what it is for."""

    def parse(value: Any) -> float:
        seconds = _seconds(value)
        if seconds < least_s:
            raise ValueError(f"must be at least {least_s:g}s")
        return seconds

    return parse


def _limit(value: Any) -> float | None:
    """A duration, or "unlimited"."""
    return None if value == "unlimited" else _span(1.0)(value)


def _horizon(value: Any) -> float:
    """A duration, or "inf"."""
    return float("inf") if value in ("inf", float("inf")) else _seconds(value)


def _gpu_list(value: Any) -> tuple[int | str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, int | str) and not isinstance(item, bool) for item in value
    ):
        raise ValueError('must be a list of GPU indices or UUIDs, such as [0, "GPU-..."]')
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ProcessRule:
    """Which foreign processes do not keep a GPU from being idle: all that is given must hold."""

    name: str | None = None  # the command, as in /proc/PID/comm
    uid: int | None = None
    below_bytes: int | None = None


def _process_rules(value: Any) -> tuple[ProcessRule, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError('must be a list such as ["name=ollama", "uid=1000,below=700M"]')
    return tuple(_process_rule(item) for item in value)


def _process_rule(text: str) -> ProcessRule:
    """ "name=COMMAND", "uid=NUMBER" and "below=SIZE", joined by commas."""
    found: dict[str, Any] = {}
    for word in text.split(","):
        key, _, given = word.strip().partition("=")
        if key == "name" and given:
            found["name"] = given
        elif key == "uid" and given.isdecimal():
            found["uid"] = int(given)
        elif key == "below":
            found["below_bytes"] = _bytes(given)
        else:
            raise ValueError(f"{word!r} is not name=COMMAND, uid=NUMBER or below=SIZE")
    return ProcessRule(**found)


def _xids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item > 0 for item in value):
        raise ValueError("must be a list of Xid numbers, such as [48, 79]")
    return tuple(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a list of texts")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who runs next."""

    backfill: str = _key(
        "easy", _choice("easy", "before-reservation", "off"), "how jobs pass a blocked one"
    )
    promise_within_s: float = _key(86_400.0, _horizon, "reservations this near become promises")
    w_fair: float = _key(1000.0, _number(0, 1e6), "weight of the fair-share factor")
    w_age_per_h: float = _key(10.0, _number(1e-6, 1e6), "weight of an hour of waiting")
    half_life_s: float = _key(7 * 86_400.0, _span(1.0), "usage halves in this time")
    age_jobs_per_user: int = _key(1, _integer(0, 100_000), "jobs per user that age; 0 = all")
    default_time_limit_s: float | None = _key(None, _limit, "for jobs without --time")
    max_time_limit_s: float | None = _key(None, _limit, "the longest limit a user may ask")
    kill_grace_s: float = _key(10.0, _seconds, "between TERM and KILL")
    max_cpu_jobs: int = _key(
        os.cpu_count() or 1, _integer(0, 100_000), "jobs without a GPU that run at once"
    )

    @property
    def usual_time_limit_s(self) -> float | None:
        """Of jobs without --time: the default, where that is no longer than the longest."""
        known = [s for s in (self.default_time_limit_s, self.max_time_limit_s) if s is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How jobs share a GPU."""

    across_users: bool = _key(True, _flag, "jobs of different users may share a GPU")
    max_jobs_per_gpu: int = _key(4, _integer(1, 1_000), "shared jobs on one GPU")
    margin_bytes: int = _key(512 * _MIB, _bytes, "VRAM held with each declaration")
    min_share: float = _key(0.25, _number(0, 1), "least part of a GPU a shared job is charged")
    spike_buffer: float = _key(0.1, _number(0, 10), "added to observed peaks of foreign use")
    idle_threshold_bytes: int = _key(200 * _MIB, _bytes, "foreign use that still counts as idle")
    ignore_processes: tuple[ProcessRule, ...] = _key(
        (), _process_rules, 'idle in spite of these, as "name=ollama,uid=1000,below=700M"'
    )
    tolerance: float = _key(0.1, _number(0, 1), "declared VRAM is right within this part of it")


# The table of Xids: what NVIDIA's catalog and device plugin say, and the driver's recovery action.
XID_QUARANTINE = (46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158)
XID_REBOOT = (79,)


@dataclass(frozen=True, slots=True)
class Nvml:
    """The driver: what it is asked, how long it may take, and what makes a GPU sick."""

    accounting: bool = _key(True, _flag, "use the driver's own peaks; root switches them on")
    sweep_deadline_s: float = _key(5.0, _span(0.1), "for one GPU in a look at all")
    open_deadline_s: float = _key(60.0, _span(0.1), "for the start of the driver")
    health_interval_s: float = _key(30.0, _seconds, "between two health checks")
    skip_calls: tuple[str, ...] = _key((), _texts, "NVML functions that are never called")
    integrated_models: tuple[str, ...] = _key(
        ("GB10", "Orin", "Thor", "Xavier", "Tegra"), _texts, "GPUs that share the host's memory"
    )
    quarantine_xids: tuple[int, ...] = _key(
        XID_QUARANTINE, _xids, "out of service until the driver asks for nothing any more"
    )
    reboot_xids: tuple[int, ...] = _key(XID_REBOOT, _xids, "out of service until a reboot")


def _maybe(parse: Parse) -> Parse:
    """The same, or "unlimited"."""
    return lambda value: None if value == "unlimited" else parse(value)


NO_LIMIT = -1  # where None is taken by "as in the table around"


def _own(parse: Parse) -> Parse:
    """The same, or "unlimited" as NO_LIMIT."""
    return lambda value: NO_LIMIT if value == "unlimited" else parse(value)


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What one user, or each member of a group, may have; None: what `[limits]` says."""

    max_gpus: int | None = _key(None, _own(_integer(0, 1_000_000)), "GPUs of running jobs")
    max_jobs: int | None = _key(None, _own(_integer(0, 1_000_000)), "jobs that run at once")
    queued_jobs: int | None = _key(None, _integer(1, 1_000_000), "jobs that are not final")


def _narrowed(own: int | None, general: int | None) -> int | None:
    if own is None:
        return general
    return None if own == NO_LIMIT else own


@dataclass(frozen=True, slots=True)
class Limits:
    """What one user may have. Tables in it, named as a user or @group, say otherwise for them."""

    max_gpus: int | None = _key(
        None, _maybe(_integer(0, 1_000_000)), "GPUs that one user's running jobs hold together"
    )
    max_jobs: int | None = _key(
        None, _maybe(_integer(0, 1_000_000)), "jobs of one user that run at once"
    )
    queued_jobs: int = _key(10_000, _integer(1, 1_000_000), "jobs that are not final, per user")
    queued_jobs_all: int = _key(100_000, _integer(1, 10_000_000), "the same over all users")
    connections: int = _key(256, _integer(1, 100_000), "connections per user")
    connections_all: int = _key(4_096, _integer(8, 1_000_000), "connections in all")
    requests_per_second: float = _key(
        500.0, _number(1, 1e6), "requests of one user that are taken, on the average"
    )
    users: tuple[tuple[str, UserLimits], ...] = ()

    def of(self, user: str, groups: Iterable[str]) -> UserLimits:
        """One user's limits, None now for unlimited: own name, else the first @group, else ours."""
        found = next((own for name, own in self.users if name == user), None)
        if found is None:
            names = {f"@{group}" for group in groups}
            found = next((own for name, own in self.users if name in names), UserLimits())
        return UserLimits(
            max_gpus=_narrowed(found.max_gpus, self.max_gpus),
            max_jobs=_narrowed(found.max_jobs, self.max_jobs),
            queued_jobs=found.queued_jobs or self.queued_jobs,
        )


@dataclass(frozen=True, slots=True)
class Jobs:
    """What each job is held to, and whose jobs are taken."""

    users: tuple[str, ...] = _key((), _texts, "only these may submit, by name or @group; [] = all")
    system_users: bool = _key(False, _flag, "root and other accounts below UID_MIN may submit")
    default_memory_bytes: int | None = _key(
        None, _maybe(_bytes), "host memory of jobs without --mem"
    )
    max_memory_bytes: int | None = _key(None, _maybe(_bytes), "the most that --mem may ask")
    default_cpus: int | None = _key(
        None, _maybe(_integer(1, 65_536)), "CPUs of jobs without --cpus"
    )
    max_cpus: int | None = _key(None, _maybe(_integer(1, 65_536)), "the most that --cpus may ask")
    max_processes: int | None = _key(
        None, _maybe(_integer(16, 4_000_000)), "processes and threads of one job"
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set. TOML names are the field names without their unit."""

    simulate: str = _key("", _host, 'simulated GPUs, such as "4x24G" or "2x80G+2x24G"')
    gpus: tuple[int | str, ...] = _key((), _gpu_list, "only these GPUs, by index or UUID; [] = all")
    exec_jobs: bool = _key(True, _flag, "false: jobs hold their GPUs and run nothing")
    admin_group: str = _key("", _text, "members administer the scheduler, as root does")
    private: bool = _key(False, _flag, "hide other users' job names, commands and directories")
    gpu_sample_interval_s: float = _key(0.5, _span(0.05), "between two looks at the GPUs")
    visible_devices: str = _key(
        "auto", _choice("auto", "index", "uuid"), "how CUDA_VISIBLE_DEVICES names a job's GPUs"
    )
    bind_cpus: bool = _key(False, _flag, "run jobs on the CPUs near their GPUs")
    shares: tuple[tuple[str, float], ...] = ()
    billing: tuple[tuple[str, float], ...] = ()
    scheduling: Scheduling = Scheduling()
    sharing: Sharing = Sharing()
    nvml: Nvml = Nvml()
    limits: Limits = Limits()
    jobs: Jobs = Jobs()

    @property
    def names(self) -> tuple[str, ...]:
        """All users and @groups for whom a line says something of their jobs."""
        return (
            *(name for name, _ in self.shares),
            *(name for name, _ in self.limits.users),
            *self.jobs.users,
        )

    @property
    def names_groups(self) -> bool:
        """Whether any line asks which groups a user is in."""
        return any(name.startswith("@") for name in self.names)


READ_AT_START = frozenset({"simulate", "exec_jobs"})

_UNIT_ENDINGS = ("_per_h", "_bytes", "_s")


def toml_name(field_name: str) -> str:
    """The key in the file: the field's name without its unit."""
    for ending in _UNIT_ENDINGS:
        if field_name.endswith(ending):
            return field_name.removesuffix(ending)
    return field_name


def load(
    path: Path,
    overrides: Iterable[str] = (),
    base: Config | None = None,
    *,
    others_may: int = 0o777,
) -> Config:
    """The configuration in path (a missing file is an empty one) with KEY=VALUE overrides on top.

    `others_may`: the mode bits that its group and all others may have; with any limit on them the
    owner must be root or this user. Raises ConfigError.
    """
    text = _read(path, others_may)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    config: Config = _merge(base or Config(), table, _Where(str(path), text))
    for override in overrides:
        config = _override(config, override)
    return config


def _read(path: Path, others_may: int) -> str:
    try:
        # A FIFO in its place would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_file(path, os.fstat(file.fileno()), others_may)
            return file.read(CONFIG_BYTES_MAX + 1).decode("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _check_file(path: Path, found: os.stat_result, others_may: int) -> None:
    """Refuse what is too large, and what others could have written: it decides for root."""
    if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path}: is no file; put a file in its place")
    if found.st_size > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path}: {found.st_size} bytes; the limit is {CONFIG_BYTES_MAX}")
    if others_may == 0o777:
        return
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: belongs to uid {found.st_uid}, who could change it; chown it to "
            f"{'root' if os.geteuid() == 0 else 'yourself'}"
        )
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077 & ~others_may:
        raise ConfigError(
            f"{path}: others may write it (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w {path}"
        )


def place_warning(path: Path) -> str | None:
    """Who may write the directory may put another file in the place of this one."""
    try:
        mode = path.parent.stat().st_mode
    except OSError:
        return None
    if not mode & 0o022 or mode & stat.S_ISVTX:
        return None
    return (
        f"others may write {path.parent} (mode {stat.S_IMODE(mode):o}), and so replace the "
        f"configuration; chmod go-w {path.parent}"
    )


_Path = tuple[str, ...]  # the tables around a key, and the key
_LINE = re.compile(r"""\s*(?P<open>\[*)\s*(?P<key>("[^"]*"|'[^']*'|[\w.\s-])+?)\s*[=\]]""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


@dataclass(frozen=True, slots=True)
class _Where:
    """Finds the line of a key, for messages."""

    source: str
    text: str

    def line_of(self, path: _Path) -> str:
        table: _Path = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            found = _LINE.match(line)
            if found is None:
                continue
            here = tuple(one or two or bare for one, two, bare in _PART.findall(found["key"]))
            if found["open"]:
                table, here = here, ()
            if (*table, *here)[: len(path)] == path:
                return f"{self.source}:{number}"
        return self.source


def _dotted(path: _Path) -> str:
    return ".".join(path)


def _merge(section: Any, table: Mapping[str, Any], where: _Where, above: _Path = ()) -> Any:
    """section with the table's values; unknown keys and bad values raise ConfigError."""
    known = _known(section)
    changes: dict[str, Any] = {}
    for key, value in table.items():
        item = known.get(key)
        if item is None and isinstance(section, Limits) and isinstance(value, dict):
            own = _merge(UserLimits(), value, where, (*above, key))
            changes["users"] = (*changes.get("users", section.users), (str(key), own))
            continue
        if item is None:
            path = (*above, key)
            raise ConfigError(
                f"{where.line_of(path)}: unknown key {_dotted(path)}; {_meant(key, known)}"
            )
        changes[item.name] = _value(getattr(section, item.name), item, value, where, (*above, key))
    return replace(section, **changes)


def _meant(key: str, known: Iterable[str]) -> str:
    """The cure of an unknown key: the section it belongs to, or what is known here."""
    default = Config()
    for name in (item.name for item in fields(default)):
        section = getattr(default, name)
        if is_dataclass(section) and key in _known(section):
            return f"it is written {name}.{key}"
    return f"known here: {', '.join(sorted(known))}"


def _known(section: Any) -> dict[str, Any]:
    """The fields of a section by their TOML names."""
    hidden = {"users"} if isinstance(section, Limits) else set()
    return {toml_name(item.name): item for item in fields(section) if item.name not in hidden}


def _value(current: Any, item: Any, value: Any, where: _Where, path: _Path) -> Any:
    """One value, parsed by its field; nested tables recurse."""
    try:
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise ValueError("must be a table")
            return _merge(current, value, where, path)
        if item.name in ("shares", "billing"):
            return _weights(value, where, path)
        return item.metadata["parse"](value)
    except ValueError as error:
        raise _bad_value(where, path, value, error) from error


def _bad_value(where: _Where, path: _Path, value: Any, error: ValueError) -> ConfigError:
    return ConfigError(f"{where.line_of(path)}: {_dotted(path)} = {value!r}: {error}")


def _weights(value: Any, where: _Where, path: _Path) -> tuple[tuple[str, float], ...]:
    """An ordered table of name = number >= 0; the first match wins."""
    if not isinstance(value, dict):
        raise ValueError("must be a table of name = number")
    number = _number(0, 1e9)
    weights: list[tuple[str, float]] = []
    for name, weight in value.items():
        try:
            weights.append((name, number(weight)))
        except ValueError as error:
            raise _bad_value(where, (*path, name), weight, error) from error
    return tuple(weights)


def _override(config: Config, text: str) -> Config:
    """One --set KEY=VALUE; VALUE is TOML, or a bare text."""
    key, separator, raw = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text}: must be KEY=VALUE, such as scheduling.backfill=off")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    table: Any = value
    for part in reversed(key.strip().split(".")):
        table = {part: table}
    merged: Config = _merge(config, table, _Where(f"--set {key}", ""))
    return merged


def with_limits(config: Config, default_s: float, most_s: float) -> Config:
    """The configuration with other time limits for jobs: what system mode begins from."""
    scheduling = replace(config.scheduling, default_time_limit_s=default_s, max_time_limit_s=most_s)
    return replace(config, scheduling=scheduling)


def changed_keys(before: Any, after: Any, prefix: str = "") -> tuple[str, ...]:
    """The TOML names of the keys whose values differ."""
    changed: list[str] = []
    for item in fields(before):
        old, new = getattr(before, item.name), getattr(after, item.name)
        name = prefix + toml_name(item.name)
        if is_dataclass(old):
            changed += changed_keys(old, new, f"{name}.")
        elif old != new:
            changed.append(name)
    return tuple(changed)
