"""The keys of the configuration file: types, defaults, ranges, and what each means.

Written for systemd/config.example.toml as well, which a test compares with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from gpusched_client.units import MIB
from gpuschedd.config.values import (
    UNBOUNDED,
    ProcessRule,
    choice,
    flag,
    gpu_list,
    horizon,
    host,
    integer,
    key,
    number,
    or_unbounded,
    or_unlimited,
    process_rules,
    seconds,
    size,
    span,
    text,
    texts,
    time_limit,
    xids,
)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who runs next."""

    backfill: str = key(
        "easy", choice("easy", "before-reservation", "off"), "how jobs pass a blocked one"
    )
    promise_within_s: float = key(86_400.0, horizon, "reservations this near become promises")
    promise_slack_s: float = key(
        86_400.0, seconds, "early ends make a promise no earlier than this from now; 0: all the way"
    )
    learn_lengths: bool = key(True, flag, "expect what a user's last two runs of a command took")
    guess_length_s: float = key(
        86_400.0, span(1.0), "expected of a job without limit when nothing is known"
    )
    head_patience_s: float = key(
        2 * 86_400.0, seconds, "beyond the start first expected; then GPUs are closed for it"
    )
    w_fair: float = key(1000.0, number(0, 1e6), "weight of the fair-share factor")
    w_age_per_h: float = key(10.0, number(1e-6, 1e6), "weight of an hour of waiting")
    half_life_s: float = key(7 * 86_400.0, span(1.0), "usage halves in this time")
    age_jobs_per_user: int = key(1, integer(0, 100_000), "jobs per user that age; 0 = all")
    default_time_limit_s: float | None = key(None, time_limit, "for jobs without --time")
    max_time_limit_s: float | None = key(None, time_limit, "the longest limit a user may ask")
    kill_grace_s: float = key(10.0, seconds, "from TERM to KILL, of jobs that start from now on")
    max_cpu_jobs: int = key(
        os.cpu_count() or 1, integer(0, 100_000), "jobs without a GPU that run at once"
    )

    @property
    def usual_time_limit_s(self) -> float | None:
        """Of jobs without --time: the default, where that is no longer than the longest."""
        known = [s for s in (self.default_time_limit_s, self.max_time_limit_s) if s is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How jobs share a GPU."""

    across_users: bool = key(True, flag, "jobs of different users may share a GPU")
    max_jobs_per_gpu: int = key(4, integer(1, 1_000), "shared jobs on one GPU")
    margin_bytes: int = key(512 * MIB, size, "VRAM held with each declaration")
    min_share: float = key(0.25, number(0, 1), "least part of a GPU a shared job is charged")
    spike_buffer: float = key(0.1, number(0, 10), "added to observed peaks of foreign use")
    idle_threshold_bytes: int = key(200 * MIB, size, "foreign use that still counts as idle")
    ignore_processes: tuple[ProcessRule, ...] = key(
        (), process_rules, 'idle in spite of these, as "name=ollama,uid=1000,below=700M"'
    )
    tolerance: float = key(0.1, number(0, 1), "declared VRAM is right within this part of it")


# The table of Xids: what NVIDIA's catalog and device plugin say, and the driver's recovery action.
XID_QUARANTINE = (46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158)
XID_REBOOT = (79,)


@dataclass(frozen=True, slots=True)
class Nvml:
    """The driver: what it is asked, how long it may take, and what makes a GPU sick."""

    accounting: bool = key(True, flag, "use the driver's own peaks; root switches them on")
    sweep_deadline_s: float = key(5.0, span(0.1), "for one GPU in a look at all")
    open_deadline_s: float = key(60.0, span(0.1), "for the start of the driver")
    health_interval_s: float = key(30.0, seconds, "between two health checks")
    skip_calls: tuple[str, ...] = key((), texts, "NVML functions that are never called")
    integrated_models: tuple[str, ...] = key(
        ("GB10", "Orin", "Thor", "Xavier", "Tegra"), texts, "GPUs that share the host's memory"
    )
    quarantine_xids: tuple[int, ...] = key(
        XID_QUARANTINE, xids, "out of service until the driver no longer asks for anything"
    )
    reboot_xids: tuple[int, ...] = key(XID_REBOOT, xids, "out of service until a reboot")


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What one user, or each member of a group, may have; None: what `[limits]` says."""

    max_gpus: int | None = key(None, or_unbounded(integer(0, 1_000_000)), "GPUs of running jobs")
    max_jobs: int | None = key(None, or_unbounded(integer(0, 1_000_000)), "jobs that run at once")
    queued_jobs: int | None = key(None, integer(1, 1_000_000), "jobs that are not final")


def _narrowed(own: int | None, general: int | None) -> int | None:
    if own is None:
        return general
    return None if own == UNBOUNDED else own


@dataclass(frozen=True, slots=True)
class Limits:
    """What one user may have. Tables in it, named as a user or @group, say otherwise for them."""

    max_gpus: int | None = key(
        None, or_unlimited(integer(0, 1_000_000)), "GPUs that one user's running jobs hold together"
    )
    max_jobs: int | None = key(
        None, or_unlimited(integer(0, 1_000_000)), "jobs of one user that run at once"
    )
    queued_jobs: int = key(10_000, integer(1, 1_000_000), "jobs that are not final, per user")
    queued_jobs_all: int = key(100_000, integer(1, 10_000_000), "the same over all users")
    connections: int = key(256, integer(1, 100_000), "connections per user")
    connections_all: int = key(4_096, integer(8, 1_000_000), "connections in all")
    requests_per_second: float = key(
        500.0, number(1, 1e6), "requests of one user that are taken, on the average"
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

    users: tuple[str, ...] = key((), texts, "only these may submit, by name or @group; [] = all")
    system_users: bool = key(False, flag, "root and other accounts below UID_MIN may submit")
    default_memory_bytes: int | None = key(
        None, or_unlimited(size), "host memory of jobs without --mem"
    )
    max_memory_bytes: int | None = key(None, or_unlimited(size), "the largest --mem")
    default_cpus: int | None = key(
        None, or_unlimited(integer(1, 65_536)), "CPUs of jobs without --cpus"
    )
    max_cpus: int | None = key(None, or_unlimited(integer(1, 65_536)), "the largest --cpus")
    max_processes: int | None = key(
        None, or_unlimited(integer(16, 4_000_000)), "processes and threads of one job"
    )
    environment_patience_s: float = key(
        3600.0, seconds, "a directory, command or account may be away before its jobs fail"
    )


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what is past is kept. The rows of the jobs themselves stay."""

    requests_s: float = key(
        7 * 86_400.0, seconds, "command, script and options of jobs that have ended"
    )
    events_s: float = key(90 * 86_400.0, span(3_600.0), "events, audit rows, promises")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set. TOML names are the field names without their unit."""

    simulate: str = key("", host, 'simulated GPUs, such as "4x24G" or "2x80G+2x24G"')
    gpus: tuple[int | str, ...] = key((), gpu_list, "only these GPUs, by index or UUID; [] = all")
    exec_jobs: bool = key(True, flag, "false: jobs hold their GPUs and run nothing")
    admin_group: str = key("", text, "members administer the scheduler, as root does")
    private: bool = key(False, flag, "hide other users' job names, commands and directories")
    gpu_sample_interval_s: float = key(0.5, span(0.05), "between two looks at the GPUs")
    visible_devices: str = key(
        "auto", choice("auto", "index", "uuid"), "how CUDA_VISIBLE_DEVICES names a job's GPUs"
    )
    bind_cpus: bool = key(False, flag, "run jobs on the CPUs near their GPUs")
    shares: tuple[tuple[str, float], ...] = ()
    billing: tuple[tuple[str, float], ...] = ()
    scheduling: Scheduling = Scheduling()
    sharing: Sharing = Sharing()
    nvml: Nvml = Nvml()
    limits: Limits = Limits()
    jobs: Jobs = Jobs()
    retention: Retention = Retention()

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
