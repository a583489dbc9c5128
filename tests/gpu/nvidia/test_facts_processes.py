"""Processes: facts 34 to 41; utilisation: facts 42 to 45. The fact's number ends each name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid, JobId
from gpuschedd.gpu.attribution import Attribution, ForeignProcess, Supervisor
from gpuschedd.gpu.foreign import is_quiet
from gpuschedd.gpu.metering import Seen, UseMeter
from gpuschedd.gpu.nvidia import driver as nvml_driver
from gpuschedd.gpu.nvidia.replies import LIST_FAILURES_MAX
from gpuschedd.gpu.source import GpuProcess
from gpuschedd.supervisor.procfs import start_ticks_of
from tests.support.daemon import until
from tests.support.fake_nvml.driver import GIB, MIB, UNKNOWN, FakeDriver, uuid_of
from tests.support.gpus import Judge, Source, held, key

Open = Callable[..., Source]
UUID = uuid_of(0)
SELF = os.getpid()


def ticks(pid: int = SELF) -> int:
    """Start of a live process."""
    found = start_ticks_of(pid)
    assert found is not None
    return found


@pytest.mark.usefixtures("judge")
def test_a_process_that_computes_and_draws_is_counted_once_34(
    driver: FakeDriver,
    gpus: Open,
) -> None:
    """It is in both lists, with one memory."""
    driver.process(0, SELF, 3 * GIB, "C")
    driver.process(0, SELF, 2 * GIB, "G")
    driver.process(0, 1, 100 * MIB, "G")
    source = gpus()
    processes = source.reading().processes
    assert processes is not None
    assert {p.pid: (p.used_bytes, p.graphics_only) for p in processes} == {
        SELF: (3 * GIB, False),
        1: (100 * MIB, True),
    }


@pytest.mark.parametrize(("times", "count"), [(2, 1), (99, None)])
def test_a_list_that_grows_while_it_is_read_is_read_again_35(
    driver: FakeDriver, gpus: Open, times: int, count: int | None
) -> None:
    """Three tries; then it is unknown, not empty."""
    driver.process(0, SELF, GIB)
    driver.add(f"grow nvmlDeviceGetComputeRunningProcesses_v3 0 0 {times}")
    processes = gpus().reading().processes
    assert (None if processes is None else len(processes)) == count


def test_host_pids_lead_to_jobs_inside_containers_36() -> None:
    """The driver knows no PID namespace; neither does a walk over the host's /proc."""
    command = ["unshare", "--fork", "--pid", "--mount-proc", "sleep", "60"]
    if os.getuid() != 0:
        command.insert(1, "--map-root-user")
    with subprocess.Popen(command) as outer:
        try:
            inner = _child_of(outer.pid)
            supervisors = {outer.pid: Supervisor(JobId(5), ticks(outer.pid), 2)}
            attribution = Attribution(lambda: supervisors)
            process = GpuProcess(inner, ticks(inner), GIB)
            attribution.learn([process])
            assert attribution.owner_of(process) == (5, 2)
        finally:
            outer.kill()


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return int(until(lambda: children.read_text().split(), "unshare forks")[0])


def test_in_a_pid_namespace_an_empty_list_is_said_to_be_none_37(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """SUCCESS without a process, and memory in use: nobody's, in use, and the cause is named."""
    driver.gpu(0, ownerless=30 * GIB)
    source = gpus()
    source.reading()
    gpu = judge.gpu(source.sample())
    assert gpu.foreign_bytes == 30 * GIB
    assert "that no process owns" in gpu.foreign_text
    program = "import os; from gpuschedd.gpu.nvidia.driver import Driver; "
    program += "print(Driver(None)._in_pid_namespace())"
    prefix = ["unshare", "--fork", "--pid"]
    if os.getuid() != 0:
        prefix.append("--map-root-user")
    outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    inside = subprocess.run(
        [*prefix, sys.executable, "-c", program], capture_output=True, text=True
    )
    assert inside.stdout.strip() == "True"
    assert outside.stdout.strip() in ("False", "True")  # True where the tests run in a container


def test_a_reused_pid_is_another_process_38() -> None:
    """Known by pid and start; /proc that hides or has lost a process costs its name only."""
    supervisors = {SELF: Supervisor(JobId(5), ticks())}
    attribution = Attribution(lambda: supervisors)
    mine = GpuProcess(SELF, ticks(), GIB)
    reused = GpuProcess(SELF, ticks() - 1, GIB)
    gone = GpuProcess(4_000_001, 77, GIB)
    attribution.learn([mine, reused, gone])
    assert attribution.owner_of(mine) == (5, 1)
    assert attribution.owner_of(reused) is None
    assert attribution.describe(gone).text == "pid 4000001, which is gone"
    supervisors.clear()
    attribution.learn([mine])
    assert attribution.owner_of(mine) == (5, 1)  # what was mapped stays mapped


def test_a_process_with_a_scrubbed_environment_is_its_units_39(tmp_path: Path) -> None:
    """By the cgroup that PID 1 made; a user's own manager cannot make one there."""
    proc = tmp_path / "proc"
    stat = Path(f"/proc/{SELF}/stat").read_text()
    cgroups = {
        1: "0::/gpusched.slice/gpusched-job-12-3.service\n",
        2: "1:name=systemd:/gpusched.slice/gpusched-job-13-1.service/deep\n",
        3: "0::/user.slice/user-1000.slice/gpusched.slice/gpusched-job-14-1.service\n",
        4: "0::/gpusched.slice/gpusched-job-15-1.services\n",
    }
    for pid, text in cgroups.items():
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "cgroup").write_text(text)
        (proc / str(pid) / "stat").write_text(stat)
        (proc / str(pid) / "comm").write_text("python\n")
    attribution = Attribution(dict, by_unit=True, proc=proc)
    processes = [GpuProcess(pid, ticks(), GIB) for pid in cgroups]
    attribution.learn(processes)
    owners = [attribution.owner_of(process) for process in processes]
    assert owners == [(12, 3), (13, 1), None, None]


def test_the_marks_of_a_job_count_for_its_own_user_only_39(tmp_path: Path) -> None:
    """A hint: without cgroups, for a process that left its supervisor."""
    proc = tmp_path / "proc" / "9"
    proc.mkdir(parents=True)
    (proc / "stat").write_text(Path("/proc/1/stat").read_text())
    words = ["GPUSCHED_INSTANCE=abc", "GPUSCHED_JOB_ID=4", "GPUSCHED_ATTEMPT=2", "PATH=/bin"]
    (proc / "environ").write_bytes("\0".join(words).encode() + b"\0")
    process = GpuProcess(9, ticks(1), GIB)

    def owner(uid: int, instance: str = "abc") -> object:
        holders = {key(4, 2): uid}
        made = Attribution(dict, lambda: holders, instance=instance, proc=tmp_path / "proc")
        made.learn([process])
        return made.owner_of(process)

    assert owner(os.getuid()) == (4, 2)
    assert owner(os.getuid() + 1) is None
    assert owner(os.getuid(), "other") is None


@pytest.mark.parametrize(
    "words",
    [
        ["GPUSCHED_"],
        ["GPUSCHED_JOB_ID", "GPUSCHED_INSTANCE=abc"],
        ["GPUSCHED_INSTANCE=abc", "GPUSCHED_JOB_ID=" + 5_000 * "9", "GPUSCHED_ATTEMPT=1"],
        ["GPUSCHED_INSTANCE=abc", "GPUSCHED_JOB_ID=1", "GPUSCHED_ATTEMPT=" + 5_000 * "9"],
    ],
)
def test_no_environment_keeps_the_others_from_being_known_39(
    tmp_path: Path, words: list[str]
) -> None:
    """Any process may hold whatever it likes in its environment."""
    proc = tmp_path / "9"
    proc.mkdir()
    (proc / "stat").write_text(Path("/proc/1/stat").read_text())
    (proc / "environ").write_bytes("\0".join(words).encode() + b"\0")
    process = GpuProcess(9, ticks(1), GIB)
    attribution = Attribution(dict, instance="abc", proc=tmp_path)
    attribution.learn([process])
    assert attribution.owner_of(process) is None


def test_a_foreign_process_drives_no_terminal_by_its_name(tmp_path: Path) -> None:
    """Its name is its own to choose, and people read it in reasons."""
    proc = tmp_path / "9"
    proc.mkdir()
    (proc / "stat").write_text(Path("/proc/1/stat").read_text())
    (proc / "comm").write_bytes(b"a\x1b]0;b\x07c\n")
    process = GpuProcess(9, ticks(1), GIB)
    attribution = Attribution(dict, proc=tmp_path)
    attribution.learn([process])
    assert attribution.describe(process).command == r"a\x1b]0;b\x07c"


def test_clients_of_the_mps_server_are_listed_and_it_is_infrastructure_40(
    driver: FakeDriver, gpus: Open, judge: Judge, tmp_path: Path
) -> None:
    """The server is a process of its own user; it does not make a GPU busy."""
    server = tmp_path / "nvidia-cuda-mps-server"
    server.symlink_to("/bin/sleep")
    with subprocess.Popen([str(server), "60"]) as process:
        try:
            driver.process(0, process.pid, 300 * MIB)
            driver.process(0, SELF, 4 * GIB, "M")
            source = gpus()
            found = source.reading().processes
            assert found is not None
            assert {p.pid: p.infrastructure for p in found} == {process.pid: True, SELF: False}
            judge.owners[SELF] = key(7)
            gpu = judge.gpu(source.sample(), holdings={UUID: [held(7, 5 * GIB)]})
            assert gpu.whole_idle
        finally:
            process.kill()


def test_no_event_tells_of_processes_so_lists_follow_memory_41(
    driver: FakeDriver, gpus: Open
) -> None:
    """A list is asked again when memory moved, or a job ended; else it waits its turn."""
    source = gpus()
    assert source.sample().readings[0].processes == ()
    driver.process(0, SELF, GIB)
    moved = source.run(_sweeps_until_listed(source, 30))
    assert moved
    driver.remove("proc")
    fresh = source.sample(fresh_uuids=frozenset({UUID}))
    assert fresh.readings[0].processes == ()


async def _sweeps_until_listed(source: Source, most: int) -> bool:
    import asyncio

    from gpuschedd.gpu.source import SampleRequest

    for _ in range(most):
        sample = await source.source.sample(SampleRequest())
        if sample.readings[0].processes:
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.usefixtures("judge")
def test_utilization_is_averaged_over_the_jobs_time_42() -> None:
    """One reading is a sixth of a second; only the average says something."""
    from gpuschedd.gpu.source import GpuReading

    meter = UseMeter()
    seen = Seen(GIB, False, (SELF,), 1, False)
    for percent, at_s in ((100.0, 1.0), (0.0, 2.0), (50.0, 4.0)):
        step_s = meter.step(at_s)
        reading = GpuReading(UUID, GIB, GIB, utilization=percent, power_w=200.0)
        meter.add(key(1), reading, seen, step_s)
    (use,) = meter.uses(key(1))
    assert use.utilization == pytest.approx((0 * 1 + 50 * 2) / 3, abs=0.1)
    assert use.energy_j == pytest.approx(200.0 * 3)


def test_bus_busy_time_never_becomes_bytes_43(driver: FakeDriver, gpus: Open) -> None:
    """`memory` of the utilisation rates is not memory."""
    driver.gpu(0, util=30, memutil=95)
    reading = gpus().reading()
    assert (reading.utilization, reading.used_bytes) == (30, 0)


def test_absurd_old_and_strange_samples_are_dropped_44(driver: FakeDriver, gpus: Open) -> None:
    """Over 100 %, seconds old, or of a pid that is not on the GPU."""
    driver.process(0, SELF, GIB)
    driver.process(0, 1, GIB)
    now_us = time.time_ns() // 1000
    driver.add(
        f"sample 0 {SELF} {now_us} 40",
        f"sample 0 1 {now_us} 200",
        f"sample 0 4242 {now_us} 50",
        f"sample 0 1 {now_us - 60_000_000} 60",
    )
    source = gpus()
    reading = source.sample(busy_uuids=frozenset({UUID})).readings[0]
    assert reading.process_utilization == {SELF: 40.0}


def test_utilization_of_processes_is_asked_every_two_seconds_at_most_45(
    driver: FakeDriver, gpus: Open
) -> None:
    """The driver samples six times a second; faster polling adds nothing."""
    driver.process(0, SELF, GIB)
    driver.add(f"sample 0 {SELF} {time.time_ns() // 1000} 40")
    source = gpus()
    busy = frozenset({UUID})
    first = source.sample(busy_uuids=busy)
    assert first.readings[0].process_utilization

    def soon_again() -> bool:
        began_s = time.monotonic()
        source.sample(busy_uuids=busy)
        again = source.sample(busy_uuids=busy)
        if time.monotonic() - began_s >= nvml_driver.UTILIZATION_EVERY_S:
            return False  # the host was too slow for it to be soon
        assert not again.readings[0].process_utilization
        assert again.calls < first.calls
        return True

    until(soon_again, "two sweeps within two seconds")


def test_displays_and_ignored_processes_leave_a_gpu_idle(judge: Judge) -> None:
    """Their memory counts all the same; a stranger of 642 MiB does block a whole card."""
    from gpuschedd.config.keys import Sharing
    from gpuschedd.config.values import ProcessRule

    rules = (ProcessRule(name="ollama", uid=1001), ProcessRule(below_bytes=64 * MIB))
    picky = Judge(Sharing(ignore_processes=rules))
    of = {
        10: ForeignProcess(10, 0, "root", "Xorg"),
        11: ForeignProcess(11, 1000, "eve", "gnome-shell"),
        12: ForeignProcess(12, 1001, "bob", "ollama"),
        13: ForeignProcess(13, 1002, "eve", "ollama"),
        14: ForeignProcess(14, 1002, "eve", "tiny"),
    }

    def quiet(
        by: Judge, pid: int, size: int, graphics: bool = False, desktop_uid: int | None = None
    ) -> bool:
        process = GpuProcess(pid, 1, size, graphics_only=graphics)
        return is_quiet(process, of[pid], size, by.ledger.sharing, desktop_uid)

    assert quiet(judge, 10, 400 * MIB, True)
    assert quiet(judge, 11, 400 * MIB, True)
    assert not quiet(judge, 12, 642 * MIB)
    assert quiet(picky, 12, 642 * MIB)
    assert not quiet(picky, 13, 642 * MIB)
    assert quiet(picky, 14, 60 * MIB)
    assert not quiet(judge, 14, 230 * MIB, True)
    assert not quiet(judge, 14, 230 * MIB, True, desktop_uid=1000)
    assert quiet(judge, 14, 230 * MIB, True, desktop_uid=1002)  # its own desktop, in user mode
    assert not quiet(judge, 14, 230 * MIB, desktop_uid=1002)


def test_a_list_that_fails_now_and_then_is_the_last_one(driver: FakeDriver, gpus: Open) -> None:
    """Who was there is there; only a driver that lists nobody any more says nothing."""
    driver.process(0, os.getpid(), GIB)
    source = gpus()
    assert [process.pid for process in source.reading().processes or ()] == [os.getpid()]
    driver.add(f"error nvmlDeviceGetComputeRunningProcesses_v3 0 {UNKNOWN}")
    listed_s = source.sample().readings[0].listed_boottime_s
    for _ in range(LIST_FAILURES_MAX):
        reading = source.reading()
        assert [process.pid for process in reading.processes or ()] == [os.getpid()]
        assert reading.listed_boottime_s == listed_s
    assert source.reading().processes is None
    driver.remove("error")
    assert [process.pid for process in source.reading().processes or ()] == [os.getpid()]


def test_a_peak_above_the_card_is_no_account(driver: FakeDriver, gpus: Open) -> None:
    """Managed memory aside, nobody held more than there is: the figure is left out, not shown."""
    now_us = time.time_ns() // 1000
    driver.add(f"account 0 {SELF} {2**63 + 5} {now_us} 0 50 1000")
    driver.add(f"account 0 7 {GIB} {now_us} 0 50 1000")
    driver.gpu(0, accounting=1)
    source = gpus()
    source.sample()
    found = source.accounts({GpuUuid(UUID): [SELF, 7]})[GpuUuid(UUID)]
    assert {pid: peak.peak_bytes for pid, peak in found.items()} == {7: GIB}
