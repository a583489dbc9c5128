"""The limits of the wire: what a message and its parts may have, each number with its one name."""

from __future__ import annotations

PROTOCOL_VERSION = 1

REQUEST_BYTES_MAX = 2**20  # one request
PAYLOAD_BYTES_MAX = 768 * 1024  # argv, environment and script of one job
SUBMIT_PAYLOAD_BYTES_MAX = 64 * 2**20  # the same over all jobs, `common` counted for each of them
NESTING_MAX = 64  # levels of arrays and maps, the outermost counted
CONTAINERS_MAX = 30_000  # arrays and maps in one request
RESPONSE_JOBS_MAX = 1_000  # jobs in one response; ask for the next page
BACKUP_PIECE_BYTES = 512 * 1024  # of the copy in one response of `backup`
SUBMIT_JOBS_MAX = 10_000  # all or none of them; a client sends more in parts
IDS_MAX = 1_000  # jobs that one request may name
USERS_MAX = 100  # users that one request may name

STRING_BYTES_MAX = 128 * 1024 - 1  # one argument or KEY=VALUE; the kernel's MAX_ARG_STRLEN less NUL
ARGV_ITEMS_MAX = 65_536
ENVIRONMENT_ITEMS_MAX = 8_192
PATH_BYTES_MAX = 4_096
REASON_BYTES_MAX = 256
GPUS_MAX = 1_024
VRAM_BYTES_MAX = 2**50
MEMORY_BYTES_MIN, MEMORY_BYTES_MAX = 2**20, 2**50
CPUS_MAX = 65_536
TIME_LIMIT_S_MAX = 10 * 366 * 86_400
NICE_MIN, NICE_MAX = -1_000, 1_000
RETRIES_MAX = 100
UMASK_MAX = 0o777
NICENESS_MAX = 19  # of the kernel's, not the queue's
CPU_NUMBERS_MAX = 4_096  # in one set
SIGNAL_MAX = 64
JOB_NAME_BYTES_MAX = 256
RLIMIT_NAMES = frozenset(
    {"as", "core", "cpu", "data", "fsize", "memlock", "msgqueue", "nice", "nofile", "nproc"}
    | {"rss", "rtprio", "rttime", "sigpending", "stack"}
)
RLIMIT_INFINITY = -1  # a resource limit that is no limit

UNLIMITED_S = -1  # a time limit that is no limit; inside, None says it


def limit_to_wire(limit_s: float | None) -> int:
    """A time limit in seconds as it travels; None is no limit."""
    return UNLIMITED_S if limit_s is None else round(limit_s)


def limit_from_wire(limit_s: int) -> int | None:
    """A time limit that has travelled, in seconds; None is no limit."""
    return None if limit_s == UNLIMITED_S else limit_s
