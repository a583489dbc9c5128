"""Time that steps: no mass time-out, nothing negative, nothing inflated."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from gpusched_client import Client
from gpusched_client.terms import JobState
from gpuschedd.system.clock import BOOT_GAP_MAX_S, ClockMark, SchedulerClock
from tests.support.daemon import DaemonProcess, clean_up, until

YEAR_S = 365 * 86_400


class FakeClock:
    def __init__(self, boottime_s: float, wall_s: float, boot: str) -> None:
        self.boottime, self.wall, self.boot = boottime_s, wall_s, boot

    def boottime_s(self) -> float:
        return self.boottime

    def wall_s(self) -> float:
        return self.wall

    def boot_id(self) -> str:
        return self.boot


def _is_running(client: Client, job_id: int) -> bool:
    return client.job(job_id).state is JobState.RUNNING


def test_scheduler_time_ignores_steps_of_the_wall_clock() -> None:
    """Ten years forward, back to 1970: not a second passes."""
    host = FakeClock(100.0, 1.7e9, "a")
    clock = SchedulerClock(host, None)
    before_s = clock.now_s()
    for wall_s in (1.7e9 + 10 * YEAR_S, 0.0):
        host.wall = wall_s
        assert clock.now_s() == before_s


def test_a_host_went_down_between_its_last_reading_and_its_next_boot() -> None:
    """Nobody was there to look at a clock."""
    host = FakeClock(60.0, 1.7e9, "new")
    mark = ClockMark("old", 0.0, 5_000.0, 1.7e9 - 3_600.0)
    clock = SchedulerClock(host, mark)
    assert clock.went_down_s("new") is None
    assert clock.went_down_s("old") == (1.7e9 - 3_600.0, 1.7e9 - 60.0)
    assert clock.went_down_s("much older") == (1.7e9 - 60.0, 1.7e9 - 60.0)
    stepped = SchedulerClock(host, ClockMark("old", 0.0, 5_000.0, 1.8e9))
    assert stepped.went_down_s("old") == (1.7e9 - 60.0, 1.7e9 - 60.0)


def test_scheduler_time_goes_on_over_a_restart_in_the_same_boot() -> None:
    """The offset is kept, so the daemon's absence counts as what it was."""
    host = FakeClock(100.0, 1.7e9, "a")
    mark = SchedulerClock(host, ClockMark("x", 0.0, 5_000.0, 1.7e9)).mark()
    host.boottime = 160.0
    assert SchedulerClock(host, mark).now_s() == pytest.approx(mark.scheduler_s + 60.0)


@pytest.mark.parametrize(
    ("wall_step_s", "passed_s"),
    [(3_600.0, 3_600.0), (-3_600.0, 0.0), (10.0 * YEAR_S, BOOT_GAP_MAX_S), (-1.7e9, 0.0)],
)
def test_after_a_reboot_the_gap_is_the_wall_difference_within_bounds(
    wall_step_s: float, passed_s: float
) -> None:
    """Clamped to 0..7 days: an unbelievable clock does not age the queue."""
    host = FakeClock(1_000.0, 1.7e9, "a")
    mark = SchedulerClock(host, None).mark()
    rebooted = FakeClock(5.0, 1.7e9 + wall_step_s, "b")
    assert SchedulerClock(rebooted, mark).now_s() == pytest.approx(mark.scheduler_s + passed_s)


def test_a_reading_of_an_earlier_boot_is_clamped_to_the_past() -> None:
    """An end recorded before the reboot is never in the future."""
    rebooted = FakeClock(5.0, 1.7e9, "b")
    clock = SchedulerClock(rebooted, ClockMark("a", 0.0, 900.0, 1.7e9 - 50.0))
    assert clock.from_boottime_s(9e9, "a", 1.7e9 + 500.0) <= clock.now_s()
    assert clock.from_boottime_s(1.0, "a", 1.7e9 - 20.0) == pytest.approx(clock.now_s() - 20.0)


@pytest.mark.tool("faketime")
@pytest.mark.parametrize("step", ["+1h", "-1h", "+10y", "@1970-01-02 00:00:00"])
def test_a_stepped_wall_clock_times_nothing_out(tmp_path: Path, step: str) -> None:
    """A job runs over a restart under another time; usage and age stay finite and >= 0."""
    daemon = DaemonProcess(tmp_path, "1x24G", "--set", "scheduling.kill_grace=1.0").start()
    go = tmp_path / "go"
    try:
        with daemon.client() as client:
            job = client.submit(
                shell=f"until [ -e {go} ]; do sleep 0.05; done",
                time_limit=600,
                cwd="/tmp",
                output="/dev/null",
            )
            queued = client.submit(["true"], time_limit=600, output="/dev/null")
            until(lambda: client.job(job.id).state is JobState.RUNNING, "it runs")
        daemon.stop()
        daemon.environment = _faketime(step)
        daemon.start()
        with daemon.client() as client:
            assert client.job(job.id).state is JobState.RUNNING
            assert client.job(queued.id).state is JobState.PENDING
            (account,) = client.usage()
            assert 0 <= account.usage_gpu_s < 600
            parts = client.job(queued.id).priority_parts
            assert parts is not None
            assert 0 <= parts["age"] < 1
            go.touch()
            for ended in client.wait([job.id, queued.id], timeout_s=30):
                assert ended.state is JobState.COMPLETED
    finally:
        daemon.environment = {}
        clean_up(daemon)


def _faketime(step: str) -> dict[str, str]:
    """Only the wall clock is faked: boot time is the kernel's own, as on a host that steps."""
    found = subprocess.run(
        ["faketime", "-f", "+0", "printenv", "LD_PRELOAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "LD_PRELOAD": found.stdout.strip(),
        "FAKETIME": step,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.root
def test_after_a_reboot_ends_are_true_and_the_unknown_is_node_fail(tmp_path: Path) -> None:
    """Another boot id: a job with an exit record has its code, one without is NODE_FAIL."""
    daemon = DaemonProcess(tmp_path, "3x24G", "--set", "scheduling.kill_grace=1.0").start()
    go = tmp_path / "go"
    try:
        with daemon.client() as client:
            ended = client.submit(
                shell=f"until [ -e {go} ]; do sleep 0.05; done; exit 6",
                time_limit=600,
                output="/dev/null",
            )
            lost = client.submit(["sleep", "600"], time_limit=900, output="/dev/null")
            queued = client.submit(["true"], gpus=3, time_limit=600, output="/dev/null")
            for job in (ended, lost):
                until(partial(_is_running, client, job.id), "both run")
        daemon.stop()
        go.touch()
        until(lambda: list((daemon.state_dir / "jobs").glob("*/exit")), "one ends meanwhile")
        fake = tmp_path / "boot_id"
        fake.write_text("11111111-2222-3333-4444-555555555555\n")
        mount = f'mount --bind {fake} /proc/sys/kernel/random/boot_id && exec "$@"'
        daemon.wrapper = ["unshare", "--mount", "sh", "-c", mount, "sh"]
        daemon.start()
        with daemon.client() as client:
            first, second = client.wait([ended.id, lost.id], timeout_s=30)
            assert (first.state, first.exit_code) == (JobState.FAILED, 6)
            assert (second.state, second.exit_code) == (JobState.NODE_FAIL, None)
            assert client.wait(queued.id, timeout_s=30).state is JobState.COMPLETED
            (account,) = client.usage()
            assert 0 <= account.usage_gpu_s < 3_000
    finally:
        daemon.wrapper = []
        clean_up(daemon)
