"""Opening, checking, migrating and copying the database; what SQLite's errors mean to a caller."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gpuschedd.store.census import read_census
from gpuschedd.store.in_use import MARK_NAME, Mark, read_mark, sync_directory
from gpuschedd.store.migrations import MIGRATIONS, NEWEST, Migration
from gpuschedd.store.rows import meta, write_meta
from gpuschedd.store.schema import mend, missing_from
from gpuschedd.store.wal import has_lost_frames
from gpuschedd.supervisor.errors import SHORT_ERRNOS, STORAGE_ERRNOS

log = logging.getLogger(__name__)

DATABASE_NAME = "gpuschedd.sqlite3"
MARKER_NAME = "gpuschedd.instance"  # says that a database existed: an empty one is never made twice
DESCRIPTORS_NEEDED = 4
BUSY_TIMEOUT_S = 10.0
WAL_PAGES = 250  # 1 MiB: on a small disk it must not take the room that the database grows into
CHECKED_AT_START_BYTES_MAX = 128 * 2**20  # a larger one is checked beside the service (`checks`)
_HEADER_BYTES = 100  # of every SQLite file
_PASSING_ERRNOS = STORAGE_ERRNOS | SHORT_ERRNOS | {errno.EROFS}
_WRONG_CONTENT = frozenset({sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class StoreUnusable(Exception):
    """The database is corrupt, newer or gone; the text says what to do. The daemon exits 78."""


class StoreFull(Exception):
    """No room on the disk: nothing of the batch was written, and trying again later is right."""


class StoreBusy(StoreFull):
    """Somebody else holds the database's lock for long: nothing was written, as without room."""


class StoreBroken(Exception):
    """An I/O error: later commits cannot be trusted, the daemon must end and read again."""


class StoreVanished(StoreBroken):
    """Somebody removed or replaced the file in use: what is written to it, nobody ever reads."""


class StoreDamaged(StoreBroken):
    """What is read is not what was written: a restart finds the same. The daemon exits 78."""


def open_database(state_dir: Path) -> tuple[Path, sqlite3.Connection, str, Mark]:
    """Open or create the database in state_dir, checked and at the newest schema.

    Its path, the connection, the instance's id and the mark that it is in use. Raises StoreUnusable
    (corrupt, newer, vanished) or StoreFull.
    """
    path = state_dir / DATABASE_NAME
    with typed_opening(path):
        return _opened(state_dir, path)


def _opened(state_dir: Path, path: Path) -> tuple[Path, sqlite3.Connection, str, Mark]:
    marker = state_dir / MARKER_NAME
    existed = path.exists()
    if marker.exists() and not existed:
        raise StoreUnusable(
            f"{path} is gone, but {marker} says that it existed. Restore a backup, or remove "
            f"{marker} to begin with an empty queue and an empty database."
        )
    reached = read_mark(state_dir)
    if existed:
        _require_whole_log(path)
    connection = connect(path, is_new=not existed)
    try:
        os.chmod(path, 0o600)
        _prepare(connection, path, check=existed, has_content=marker.exists())
        _migrate(connection, path)
        mend_schema(connection)
        commits = read_census(connection).commits
        if reached is not None and reached > commits:
            raise StoreUnusable(_lost_text(path, reached - commits))
        instance = _instance(connection, has_content=marker.exists())
        mark = Mark(state_dir, commits)
        empty_wal(connection)  # what a killed daemon left there; a full disk leaves it
        write_marker(marker, instance)
    except BaseException:
        connection.close()
        raise
    return path, connection, instance, mark


@contextmanager
def typed_opening(path: Path) -> Iterator[None]:
    """Whatever goes wrong with the database at a start, as StoreUnusable or StoreFull.

    All of it: damage shows itself in places that nobody thought of, and a start that ends with a
    traceback would be repeated for ever.
    """
    try:
        yield
    except (StoreUnusable, StoreFull, StoreBroken):
        raise
    except sqlite3.Error as error:
        if (passing := _passing(error, path)) is not None:
            raise type(passing)(f"{path}: {passing}") from error
        if _is_of_disk(error):
            raise StoreFull(
                f"{path}: {error}. Its disk failed, or takes no larger file (ulimit -f, "
                "LimitFSIZE); where a later start says it again, look at the disk, then restore a "
                "backup"
            ) from error
        raise StoreUnusable(unusable_text(path, error)) from error
    except MemoryError as error:
        raise StoreFull(f"{path}: there is not enough memory to read it") from error
    except OSError as error:
        if error.errno in _PASSING_ERRNOS:
            raise StoreFull(f"{path}: {error}") from error
        raise StoreUnusable(unusable_text(path, error)) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise StoreUnusable(unusable_text(path, what)) from error


def _require_whole_log(path: Path) -> None:
    """Before SQLite opens it: that would throw away what lies behind a damaged frame."""
    log = path.with_name(f"{path.name}-wal")
    if has_lost_frames(log):
        raise StoreUnusable(
            f"{log} is damaged: committed changes lie behind a page that cannot be read. Restore a "
            f"backup; or move {log} away and remove {path.with_name(MARK_NAME)} to go on without "
            "them: jobs may then be forgotten, or run again."
        )


def _lost_text(path: Path, lost: int) -> str:
    return (
        f"{path} lacks the last {lost} changes that it had: its -wal file was removed, cut or "
        "damaged, or an older copy is in its place. Put the -wal file back or restore a backup; "
        f"then, or to go on with what is there (jobs may be forgotten, or run again), remove "
        f"{path.with_name(MARK_NAME)}."
    )


def connect(path: Path, *, is_new: bool = False) -> sqlite3.Connection:
    """A connection; only with `is_new` a file is made where there is none.

    Readers come later, and the directory may have been moved away since.
    """
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'rwc' if is_new else 'rw'}",
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    connection.row_factory = sqlite3.Row
    return connection


def _sqlite_code(error: sqlite3.Error) -> int:
    """SQLite's extended result code, 0 where the binding gives none."""
    return getattr(error, "sqlite_errorcode", 0) or 0


def _is_of_disk(error: sqlite3.Error) -> bool:
    """Whether the system failed to read or write, which says nothing of what is there."""
    code = _sqlite_code(error)
    return code & 0xFF == sqlite3.SQLITE_IOERR and code not in _WRONG_CONTENT


def _passing(error: sqlite3.Error, path: Path | None = None) -> StoreFull | None:
    """The error as one that passes: no room (also for the shared-memory file), or a long lock.

    So is a file system that is read-only, or files that cannot be opened for now.
    """
    code = _sqlite_code(error)
    kind = code & 0xFF
    if kind == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return StoreFull(f"{error}; free some space")
    if kind == sqlite3.SQLITE_BUSY:
        return StoreBusy(f"{error} by another program; end its transaction")
    if kind == sqlite3.SQLITE_CANTOPEN and not _descriptors_left():
        return StoreFull(f"{error}, since this process may open no more files for now")
    if kind == sqlite3.SQLITE_READONLY or (kind == sqlite3.SQLITE_CANTOPEN and _is_shut(path)):
        return StoreFull(f"{error}; make its file system and its file writable")
    if kind == sqlite3.SQLITE_NOMEM:
        return StoreFull(f"{error}; free some memory")
    if kind == sqlite3.SQLITE_CANTOPEN and path is not None and _opens(path):
        return StoreFull(f"{error}, but it can be opened again")
    return None


def _opens(path: Path) -> bool:
    """Whether what could not be opened a moment ago can be now: a want that has passed."""
    try:
        with closing(connect(path)) as database:
            database.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.Error:
        return False
    return True


def _descriptors_left() -> bool:
    """Whether a database, its log and its shared memory can be opened: SQLite does not say why."""
    held: list[int] = []
    try:
        for _ in range(DESCRIPTORS_NEEDED):
            held.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
        return True
    except OSError:
        return False
    finally:
        for descriptor in held:
            os.close(descriptor)


def _is_shut(path: Path | None) -> bool:
    """Whether a file that cannot be opened is the file system's fault; None: it was open before."""
    try:
        return path is None or bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def empty_wal(db: sqlite3.Connection) -> bool:
    """Copy all of the WAL to the database, so that the next writer starts it over. False: not yet.

    It waits for nobody: neither for readers of the WAL nor for room where the database must grow.
    """
    try:
        is_busy, in_wal, copied = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error:
        return False
    return not is_busy and in_wal == copied


@contextmanager
def typed_errors() -> Iterator[None]:
    """What SQLite raises at a write, by what the caller can do."""
    try:
        yield
    except sqlite3.Error as error:
        if (passing := _passing(error)) is not None:
            raise passing from error
        if is_damage(error):
            raise StoreDamaged(str(error)) from error
        if _sqlite_code(error) & 0xFF == sqlite3.SQLITE_IOERR:
            raise StoreBroken(str(error)) from error
        raise


def is_damage(error: Exception) -> bool:
    """Whether what is there is wrong: found by SQLite, or by a checksum of ours."""
    if type(error) is sqlite3.DatabaseError and not _sqlite_code(error):
        return True
    if isinstance(error, sqlite3.OperationalError) and "no such " in str(error):
        return True  # a table or column that the migrations made has gone (`schema`)
    return isinstance(error, sqlite3.Error) and _sqlite_code(error) & 0xFF in _DAMAGED


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """The one transaction idiom: all of it, durable, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def unusable_text(path: Path, error: object) -> str:
    return (
        f"{path} cannot be used: {error}. Restore a backup (the file with .backup- beside it, or "
        f"`gctl backup`'s), or move it away together with its marker {MARKER_NAME} to begin afresh."
    )


def files_of(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """Device and inode of the database and of its log, None for one that is not there."""
    found: list[tuple[int, int] | None] = []
    for name in (path, f"{path}-wal"):
        try:
            status = os.stat(name)
            found.append((status.st_dev, status.st_ino))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


def _prepare(db: sqlite3.Connection, path: Path, *, check: bool, has_content: bool) -> None:
    """Pragmas, and a check of an existing file before anything is written to it.

    To SQLite a file that was cut to nothing, or to less than a header, is a new database.
    """
    if check:
        size = path.stat().st_size
        if 0 < size < _HEADER_BYTES:
            raise sqlite3.DatabaseError(f"{size} bytes are not a database")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > NEWEST:
            raise StoreUnusable(
                f"{path} has schema {version}; this version knows up to {NEWEST}. Install the "
                "newer gpuschedd again, or restore a backup made before the upgrade."
            )
        if size <= CHECKED_AT_START_BYTES_MAX:
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"quick_check: {verdict}")
        _require_all_pages(db, size, path)
        if version == 0 and has_content:
            raise sqlite3.DatabaseError("it is empty, but was not")
        if version == 0 and size > 0 and not _is_fresh(db):
            raise sqlite3.DatabaseError("it is not one of ours")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")  # environments do not stay in free pages
    _require_writable(db)


def _require_writable(db: sqlite3.Connection) -> None:
    """Before the first commit would say it. Who holds the lock just now can write as well."""
    db.execute("PRAGMA busy_timeout = 0")
    try:
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if _sqlite_code(error) & 0xFF != sqlite3.SQLITE_BUSY:
            raise
    finally:
        db.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")


def _require_all_pages(db: sqlite3.Connection, size: int, path: Path) -> None:
    """A file that was cut lacks pages; those in the log are not in it yet."""
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
    log = path.with_name(f"{path.name}-wal")
    in_log = log.stat().st_size if log.exists() else 0
    if size + in_log < pages * page_bytes:
        raise sqlite3.DatabaseError(f"{size} bytes are there of {pages * page_bytes}")


def _is_fresh(db: sqlite3.Connection) -> bool:
    """True for a file that was created and not yet migrated."""
    return not db.execute("SELECT 1 FROM sqlite_master WHERE name NOT LIKE 'migration'").fetchall()


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    """Apply what is missing, each step recorded in its own transaction, after a backup."""
    # The version is in the file's header too, where nobody drops it.
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > 0 and not db.execute("PRAGMA table_info(migration)").fetchall():
        log.warning("database_mended made_anew=migration lost='when each schema was applied'")
    db.execute(
        "CREATE TABLE IF NOT EXISTS migration"
        " (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at TEXT NOT NULL)"
    )
    noted = db.execute("SELECT coalesce(max(version), 0) FROM migration").fetchone()[0]
    done = max(version, noted)
    missing = [step for step in MIGRATIONS if step.version > done]
    if missing and done > 0:
        backup_to(db, path.with_name(f"{path.name}.backup-schema-{done}"))
    for step in missing:
        _apply(db, step)


def _apply(db: sqlite3.Connection, step: Migration) -> None:
    with transaction(db):
        for statement in step.statements:
            db.execute(statement)
        if step.then is not None:
            step.then(db)
        db.execute(
            "INSERT INTO migration VALUES (?, ?, datetime('now'))", (step.version, step.name)
        )
        db.execute(f"PRAGMA user_version = {step.version}")


def mend_schema(db: sqlite3.Connection) -> bool:
    """Make what has gone and decides nothing; True if there was any. Raises as `mend` does."""
    if not missing_from(db):
        return False
    with transaction(db):
        return mend(db)


def _instance(db: sqlite3.Connection, *, has_content: bool) -> str:
    """The random id of this state directory; it marks our jobs' processes."""
    found = meta(db, "instance")
    if found is None:
        if has_content:  # another id would disown the processes of its jobs
            raise sqlite3.DatabaseError("the id of its instance is missing")
        found = uuid.uuid4().hex
        with transaction(db):
            census = read_census(db)
            census.add("meta", write_meta(db, "instance", found))
            census.write(db)
    return str(found)


def write_marker(marker: Path, instance: str) -> None:
    """Where it is not there."""
    if marker.exists():
        return
    descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, instance.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(marker.parent)


def copy_database(source: Path, target: Path) -> None:
    """A consistent copy over a connection of its own: the writer is not held up. Blocks."""
    try:
        with closing(connect(source)) as db:
            db.execute("PRAGMA query_only = ON")
            backup_to(db, target)
    except sqlite3.Error as error:
        raise _passing(error, source) or StoreFull(f"{error}; free some space there") from error


def backup_to(db: sqlite3.Connection, target: Path) -> None:
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    copy = connect(temporary, is_new=True)
    try:
        db.backup(copy)
    finally:
        copy.close()
    os.chmod(temporary, 0o600)
    os.replace(temporary, target)
