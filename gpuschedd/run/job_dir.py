"""The job directory as the daemon sees it: write a spec and orders, take the claim, read the rest.

It owns the directories `jobs/ID.ATTEMPT` and the typed form of their records; the format itself is
in supervisor/records.py. It starts and signals no process, and knows nothing of SQLite.
All calls block (most of them in fsync): they belong in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import (
    Any,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from gpuschedd.core.attempt import (
    Cancel,
    Claim,
    EndedRecord,
    ExitRecord,
    Observation,
    Orders,
    StartedRecord,
)
from gpuschedd.supervisor import procfs, records
from gpuschedd.supervisor.spec import Spec as SupervisorSpec

Record = TypeVar("Record")

FILES_MAX = 64  # of one directory; more is not ours


class JobDirError(Exception):
    """A job directory is not as it must be."""


class JobDirExists(JobDirError):
    """An attempt of this number is there already, claimed or with another spec."""


class JobDirCorrupt(JobDirError):
    """A record is there and cannot be understood. It is kept for a person to look at."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One attempt, as it is handed to the supervisor.

    `argv` is the command; where `script` is given, the arguments after the script. `environment` is
    final. Paths may be relative to `cwd`. `error` None: the same as output. Times None: no limit.
    """

    job_id: int
    attempt: int
    instance: str
    mode: str  # terms.Mode
    launch: str  # terms.Launch
    user: str
    uid: int
    name: str
    argv: tuple[bytes, ...]
    script: bytes | None
    cwd: bytes
    environment: tuple[tuple[bytes, bytes], ...]
    umask: int
    rlimits: tuple[tuple[str, int, int], ...]
    output: bytes
    error: bytes | None
    time_limit_s: float | None
    kill_grace_s: float
    hint_socket: str
    scripts_dir: str
    allow_system_uid: bool = False
    no_exec: bool = False
    cpu_set: tuple[int, ...] = ()  # the CPUs that it runs on; () leaves them alone
    oom_patterns: tuple[str, ...] = ()  # for what programs print when VRAM is exhausted
    probe: bool = False  # set up and end: whether the job would find what it needs
    checked: bool = False  # its command was there when it was submitted
    niceness: int = 0  # the kernel's

    @property
    def label(self) -> str:
        return label_of(self.job_id, self.attempt)

    def to_record(self) -> dict[str, Any]:
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        text = records.text_of
        for name in ("script", "cwd", "output", "error"):
            raw = record.pop(name)
            record[name + "_b"] = None if raw is None else text(raw)
        record["argv_b"] = [text(word) for word in record.pop("argv")]
        pairs = record.pop("environment")
        record["environment_b"] = [[text(key), text(value)] for key, value in pairs]
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """As strict as the supervisor's own reading, since it is that."""
        found = SupervisorSpec(record)
        return cls(**{field.name: getattr(found, field.name) for field in fields(cls)})


def label_of(job_id: int, attempt: int) -> str:
    return f"{job_id}.{attempt}"


def is_claim_alive(claim: Claim) -> bool:
    """Whether the process that took the claim still runs: same boot, pid and start, no zombie.

    Raises PermissionError where /proc hides it: what cannot be seen is not dead.
    """
    if claim.boot_id != procfs.boot_id():
        return False
    if procfs.is_running(claim.pid, claim.start_ticks):
        return True
    if procfs.process_stat(claim.pid) is None and _takes_signals(claim.pid):
        raise PermissionError(errno.EACCES, "/proc hides it (hidepid)", f"/proc/{claim.pid}")
    return False


def _takes_signals(pid: int) -> bool:
    """Whether there is such a process, and it may be ours."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _own_claim() -> dict[str, Any]:
    own = procfs.process_stat(os.getpid())
    assert own is not None, "a process sees itself"
    claim = Claim("daemon", procfs.boot_id(), os.getpid(), own.start_ticks)
    return asdict(claim)


class JobDir:
    """One directory `ID.ATTEMPT`. Holds no descriptor between calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        job_id, _, attempt = path.name.partition(".")
        self.job_id, self.attempt = int(job_id), int(attempt)

    def __repr__(self) -> str:
        return f"JobDir({str(self.path)!r})"

    @classmethod
    def open(cls, jobs_root: Path, job_id: int, attempt: int) -> Self:
        """The directory of that name, whether it exists or not."""
        return cls(jobs_root / label_of(job_id, attempt))

    @classmethod
    def all_in(cls, jobs_root: Path) -> list[Self]:
        """All directories, in no order: what start-up compares with the database."""
        found = []
        for entry in jobs_root.iterdir():
            job_id, dot, attempt = entry.name.partition(".")
            if dot and job_id.isdecimal() and attempt.isdecimal():
                found.append(cls(entry))
        return found

    @classmethod
    def create(cls, jobs_root: Path, spec: Spec) -> Self:
        """The directory with its spec. May be repeated with the same spec until claimed.

        It need not outlive a power cut, after which nothing starts from it; the supervisor makes it
        durable before anything of the user's runs. Raises JobDirExists, or OSError where the disk
        does not take it.
        """
        job_dir = cls(jobs_root / spec.label)
        dir_fd = job_dir._made()
        try:
            job_dir._write_spec(dir_fd, spec)
        finally:
            os.close(dir_fd)
        return job_dir

    def _write_spec(self, dir_fd: int, spec: Spec) -> None:
        if records.read_file(dir_fd, records.CLAIM) is not None:
            raise JobDirExists(f"{self.path} is claimed already")
        data = records.encode(spec.to_record())
        if len(data) > records.SPEC_BYTES_MAX:
            limit = records.SPEC_BYTES_MAX
            raise JobDirError(f"{self.path}: a spec of {len(data)} bytes; the limit is {limit}")
        found = records.read_file(dir_fd, records.SPEC, records.SPEC_BYTES_MAX)
        if found is None:
            records.place(dir_fd, records.SPEC, data)
        elif found != data:
            raise JobDirExists(f"{self.path} has another spec")

    def spec(self) -> Spec | None:
        with self._read_fd() as dir_fd:
            record = self._read(dir_fd, records.SPEC)
        if record is None:
            return None
        try:
            return Spec.from_record(record)
        except (TypeError, ValueError) as error:
            raise self._corrupt(records.SPEC, error) from error

    def claim(self) -> Claim | None:
        with self._read_fd() as dir_fd:
            return self._typed(dir_fd, records.CLAIM, Claim)

    def started(self) -> StartedRecord | None:
        with self._read_fd() as dir_fd:
            return self._typed(dir_fd, records.STARTED, StartedRecord)

    def ended(self) -> EndedRecord | None:
        with self._read_fd() as dir_fd:
            return self._typed(dir_fd, records.ENDED, EndedRecord)

    def exit(self) -> ExitRecord | None:
        with self._read_fd() as dir_fd:
            return self._typed(dir_fd, records.EXIT, ExitRecord)

    def observe(self) -> Observation:
        """Aliveness first: a supervisor seen dead writes nothing after it.

        Then what it writes last: while it is read more may be written, but where a record is there
        those before it are. `exit` says what `ended` does, so that is not read beside it.
        """
        with self._read_fd() as dir_fd:
            claim = self._typed(dir_fd, records.CLAIM, Claim)
            alive = claim is not None and claim.by == "supervisor" and is_claim_alive(claim)
            exit_ = self._typed(dir_fd, records.EXIT, ExitRecord)
            ended = exit_ or self._typed(dir_fd, records.ENDED, EndedRecord)
            started = self._typed(dir_fd, records.STARTED, StartedRecord)
        return Observation(claim, alive, started, ended, exit_)

    def has_supervisor(self) -> bool:
        """Whether a supervisor holds the claim and lives; True where that cannot be said."""
        try:
            claim = self.claim()
            return claim is not None and claim.by == "supervisor" and is_claim_alive(claim)
        except JobDirCorrupt:
            return False
        except OSError:
            return True

    def fence(self) -> Claim:
        """Take the claim for the daemon, so that no supervisor can start this attempt.

        Returns the claim that stands: the daemon's, or that of the supervisor that was first. A
        directory that is missing is made: the supervisor that finds it has no spec. Only a claim
        that is free takes room on the disk.
        """
        if (taken := self.claim()) is not None:
            return taken
        dir_fd = self._made()
        try:
            records.Draft(dir_fd, records.CLAIM).link(records.encode(_own_claim()))
        finally:
            os.close(dir_fd)
        _sync_directory(self.path.parent)
        claim = self.claim()
        assert claim is not None, "a claim that was linked or was in the way"
        return claim

    def orders(self) -> Orders | None:
        with self._read_fd() as dir_fd:
            record = self._read(dir_fd, records.ORDERS)
        if record is None:
            return None
        try:
            cancel = record.pop("cancel")
            signals = tuple((int(number), int(signum)) for number, signum in record.pop("signals"))
            return Orders(
                cancel=None if cancel is None else Cancel(**cancel), signals=signals, **record
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._corrupt(records.ORDERS, error) from error

    def write_orders(self, orders: Orders) -> None:
        """Replace the orders, atomically. The supervisor is woken by the launcher.

        A power cut ends the supervisor, too; a restarted daemon writes them again.
        """
        dir_fd = self._open_fd()
        try:
            records.place(dir_fd, records.ORDERS, records.encode(asdict(orders)))
        finally:
            os.close(dir_fd)

    def remove(self) -> None:
        """Remove the directory and the script. Only after the final state is durable elsewhere."""
        with contextlib.suppress(FileNotFoundError):
            os.close(self._open_own_fd())
        with contextlib.suppress(JobDirCorrupt):
            self._remove_script()
        # The spec first: a directory without it starts nothing.
        with contextlib.suppress(FileNotFoundError):
            (self.path / records.SPEC).unlink(missing_ok=True)
            for entry in self._entries():
                _remove_entry(entry)
            self.path.rmdir()

    def _remove_script(self) -> None:
        spec = self.spec()
        if spec is not None and spec.script is not None:
            (Path(spec.scripts_dir) / spec.label).unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        found = list(self.path.iterdir())
        if len(found) > FILES_MAX:
            raise JobDirError(f"{self.path} holds {len(found)} files; at most {FILES_MAX} are ours")
        return found

    def _made(self) -> int:
        """Its descriptor, whether it was there or not. Raises JobDirError or OSError."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        dir_fd = self._open_own_fd()
        try:
            os.fchmod(dir_fd, 0o700)  # whatever the umask made of it
        except OSError:
            os.close(dir_fd)
            raise
        return dir_fd

    def _open_fd(self) -> int:
        return records.open_directory(self.path.as_posix())

    def _open_own_fd(self) -> int:
        """For what is written or removed. Raises JobDirError where something else has the name."""
        try:
            return self._open_fd()
        except NotADirectoryError as error:
            raise JobDirError(f"{self.path} is not a directory; it is left alone") from error

    @contextlib.contextmanager
    def _read_fd(self) -> Iterator[int | None]:
        """To read from; None where it was removed, or something else put in its place."""
        try:
            dir_fd = self._open_fd()
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        try:
            yield dir_fd
        finally:
            os.close(dir_fd)

    def _read(self, dir_fd: int | None, name: str) -> dict[str, Any] | None:
        if dir_fd is None:
            return None
        try:
            return records.read_record(dir_fd, name)
        except ValueError as error:
            raise self._corrupt(name, error) from error

    def _typed(self, dir_fd: int | None, name: str, kind: type[Record]) -> Record | None:
        record = self._read(dir_fd, name)
        if record is None:
            return None
        try:
            return kind(**_checked_types(kind, record))
        except (TypeError, ValueError) as error:
            raise self._corrupt(name, error) from error

    def _corrupt(self, name: str, error: Exception) -> JobDirCorrupt:
        return JobDirCorrupt(f"{self.path / name} cannot be understood: {error}")


def abandoned_in(jobs_root: Path, kept: Collection[tuple[int, int]]) -> list[JobDir]:
    """The directories of attempts that are not `kept` and whose supervisor does not live."""
    return [
        job_dir
        for job_dir in JobDir.all_in(jobs_root)
        if (job_dir.job_id, job_dir.attempt) not in kept and not job_dir.has_supervisor()
    ]


def _checked_types(kind: type[Any], record: dict[str, Any]) -> dict[str, Any]:
    """Each field by the types its declaration names; a missing or unknown one fails at the call."""
    for name, allowed, values in _FIELDS[kind]:
        value = record.get(name)
        if type(value) not in allowed and not (float in allowed and type(value) is int):
            raise ValueError(f"{name} is {value!r}")
        if values and value not in values:
            raise ValueError(f"{name} is {value!r}")
    return record


def _runtime_types(hint: Any) -> Iterator[type]:
    if get_origin(hint) is Literal:
        yield str
    elif isinstance(hint, type):
        yield hint
    else:
        for part in get_args(hint):
            yield from _runtime_types(part)


#: Of each class of records: names, types and, where only some are allowed, values of its fields.
_FIELDS: dict[type[Any], list[tuple[str, tuple[type, ...], tuple[Any, ...]]]] = {
    kind: [
        (name, tuple(_runtime_types(hint)), get_args(hint) if get_origin(hint) is Literal else ())
        for name, hint in get_type_hints(kind).items()
    ]
    for kind in (Claim, StartedRecord, EndedRecord, ExitRecord)
}


def _remove_entry(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        path.rmdir()


def _sync_directory(path: Path) -> None:
    fd = records.open_directory(path.as_posix())
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
