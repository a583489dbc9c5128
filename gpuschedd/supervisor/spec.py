"""The spec: what to run, as the daemon wrote it. Read strictly, and only if nobody else could."""

from __future__ import annotations

import os
import stat

from gpuschedd.supervisor.errors import EXIT_NO_SPEC, EXIT_SPEC_REFUSED, Refused
from gpuschedd.supervisor.records import SPEC, bytes_of, read_record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

UID_INVALID = 2**32 - 1


class Fields:
    """Strict reading of a JSON object: every field present, of its type, in its range."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._left = dict(record)

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise ValueError(f"{name} is missing")
        return self._left.pop(name)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.take(name)
        if type(value) not in (int, float) or not value >= 0:
            raise ValueError(f"{name} must be a number >= 0, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        if self._left.get(name, 0) is None:
            self.take(name)
            return None
        return self.number(name)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if type(value) is not bool:
            raise ValueError(f"{name} must be true or false, not {value!r}")
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if type(value) is not str:
            raise ValueError(f"{name} must be text")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        return value

    def raw(self, name: str) -> bytes:
        return bytes_of(self.text(name + "_b"))

    def optional_raw(self, name: str) -> bytes | None:
        if self._left.get(name + "_b", "") is None:
            self.take(name + "_b")
            return None
        return self.raw(name)

    def rows(self, name: str) -> list[Any]:
        value = self.take(name)
        if type(value) is not list:
            raise ValueError(f"{name} must be a list")
        return value

    def end(self) -> None:
        if self._left:
            raise ValueError(f"unknown field {sorted(self._left)[0]}")


def _limit_row(row: Any) -> tuple[str, int, int]:
    name, soft, hard = row
    if type(name) is not str or type(soft) is not int or type(hard) is not int:
        raise ValueError("rlimits must be rows of name, soft and hard limit")
    return name, soft, hard


def _cpu(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**16:
        raise ValueError(f"cpu_set must hold CPU numbers, not {number!r}")
    return number


def _pattern(row: Any) -> str:
    if type(row) is not str or not row:
        raise ValueError(f"oom_patterns must hold regular expressions, not {row!r}")
    return row


class Spec:
    """What to run, as the daemon wrote it. No field has a default: what is unclear is refused."""

    def __init__(self, record: dict[str, Any]) -> None:
        fields = Fields(record)
        self.job_id = fields.integer("job_id", 1, 2**63 - 1)
        self.attempt = fields.integer("attempt", 0, 2**31 - 1)
        self.instance = fields.text("instance")
        self.mode = fields.choice("mode", ("user", "system"))
        self.launch = fields.choice("launch", ("direct", "pid1"))
        self.user = fields.text("user")
        self.uid = fields.integer("uid", 0, UID_INVALID - 1)
        self.name = fields.text("name")
        self.argv = tuple(bytes_of(word) for word in fields.rows("argv_b"))
        self.script = fields.optional_raw("script")
        self.cwd = fields.raw("cwd")
        self.environment = tuple(
            (bytes_of(key), bytes_of(value)) for key, value in fields.rows("environment_b")
        )
        self.umask = fields.integer("umask", 0, 0o777)
        self.rlimits = tuple(_limit_row(row) for row in fields.rows("rlimits"))
        self.output = fields.raw("output")
        self.error = fields.optional_raw("error")
        self.time_limit_s = fields.optional_number("time_limit_s")
        self.kill_grace_s = fields.number("kill_grace_s")
        self.hint_socket = fields.text("hint_socket")
        self.scripts_dir = fields.text("scripts_dir")
        self.allow_system_uid = fields.flag("allow_system_uid")
        self.no_exec = fields.flag("no_exec")
        self.cpu_set = tuple(_cpu(number) for number in fields.rows("cpu_set"))
        self.oom_patterns = tuple(_pattern(row) for row in fields.rows("oom_patterns"))
        self.probe = fields.flag("probe")
        self.checked = fields.flag("checked")
        self.niceness = fields.integer("niceness", 0, 19)
        fields.end()
        if not (self.argv or self.script is not None or self.no_exec):
            raise ValueError("argv_b is empty and there is no script")

    @property
    def system(self) -> bool:
        return self.mode == "system"

    @property
    def label(self) -> str:
        return f"{self.job_id}.{self.attempt}"


def _require_private(what: str, found: os.stat_result, kind: int, mode: int) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise Refused(EXIT_SPEC_REFUSED, f"{what} is not of the right kind")
    if found.st_uid != os.geteuid():
        reason = f"{what} belongs to uid {found.st_uid}, not to {os.geteuid()}"
        raise Refused(EXIT_SPEC_REFUSED, reason)
    if stat.S_IMODE(found.st_mode) != mode:
        reason = f"{what} has mode {stat.S_IMODE(found.st_mode):o}, not {mode:o}"
        raise Refused(EXIT_SPEC_REFUSED, reason)


def load_spec(dir_fd: int) -> Spec:
    """The spec, if it is whole and nobody but this uid can have written it; else Refused."""
    _require_private("the job directory", os.fstat(dir_fd), stat.S_IFDIR, 0o700)
    try:
        found = os.stat(SPEC, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        raise Refused(EXIT_NO_SPEC, "there is no spec") from None
    _require_private("the spec", found, stat.S_IFREG, 0o600)
    try:
        record = read_record(dir_fd, SPEC)
        spec = Spec(record if record is not None else {})
    except (ValueError, TypeError) as error:
        raise Refused(EXIT_SPEC_REFUSED, f"the spec is refused: {error}") from error
    if not spec.system and spec.uid != os.geteuid():
        reason = f"the spec is for uid {spec.uid} and this process is {os.geteuid()}"
        raise Refused(EXIT_SPEC_REFUSED, reason)
    if spec.system and os.geteuid() != 0:
        raise Refused(EXIT_SPEC_REFUSED, "a spec of system mode needs root")
    return spec


RECORD_VERSION = 1
