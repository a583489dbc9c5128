"""The daemon over the stand-in driver, with real processes: what people see and what jobs get."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpusched_client import Client, SubmittedJob
from gpusched_client.errors import NotFound
from gpusched_client.terms import JobState
from gpusched_client.wire.job_messages import JobView
from gpuschedd.gpu.monitor import SAY_AGAIN_S
from tests.support.daemon import DaemonProcess, clean_up, until
from tests.support.fake_nvml.driver import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    LIB_RM_MISMATCH,
    MIB,
    UNKNOWN,
    XID,
    FakeDriver,
    uuid_of,
)

CLAIM = str(Path(__file__).parents[1] / "support/fake_nvml/claim.py")
Start = Callable[..., DaemonProcess]
ALONE = ("--set", "sharing.margin=0", "--set", "sharing.max_jobs_per_gpu=1000")
QUICK_TO_LOOK = """
import sys
from gpuschedd.gpu.nvidia import source
source.ABSENT_RETRY_S = source.INIT_EVERY_S = 0.2
sys.argv = sys.argv[3:]  # what was asked: python -m gpuschedd.main ..
from gpuschedd.cli import cli
cli()
"""
#: The same, with a clock of the looks that is ahead by what a file beside the driver says, in s.
QUICK_AND_AHEAD = (
    """
import os, pathlib
from gpuschedd.gpu import monitor
from gpuschedd.system.clock import boottime_s
ahead = pathlib.Path(os.environ["FAKE_NVML_DIR"], "ahead")
monitor.boottime_s = lambda: boottime_s() + float(ahead.read_text())
monitor.RETRY_S = 0.1
"""
    + QUICK_TO_LOOK
)
OFTEN = ("--set", "gpu_sample_interval=0.2")
QUICK = ("--set", "nvml.health_interval=0.2")
QUICK_TO_GIVE_UP = ("--set", "nvml.sweep_deadline=1.0", "--set", "nvml.open_deadline=4.0")


def claim(*options: str) -> list[str]:
    """A job that holds GPU memory."""
    return [sys.executable, CLAIM, *options]


@contextmanager
def stranger(gpu: int, mib: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process outside the scheduler on a GPU."""
    words = claim("--vram", str(mib), "--hold", "120", "--uuids", uuid_of(gpu))
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def whose(process: subprocess.Popen[bytes]) -> str:
    """As a reason names it: pid, user and command."""
    command = Path(f"/proc/{process.pid}/comm").read_text().strip()
    return f"pid {process.pid} of {pwd.getpwuid(os.getuid()).pw_name} ({command})"


def is_running(client: Client, job_id: int) -> bool:
    return client.job(job_id).state is JobState.RUNNING


def reason(client: Client, job_id: int) -> str:
    """Why it waits; empty while nobody has looked."""
    found = client.job(job_id).reason
    return "" if found is None or found.code == "None" else f"{found.code}: {found.text}"


def until_reason(client: Client, job_id: int, *words: str) -> str:
    """Why it waits, once that is what the words say."""

    def look() -> str:
        text = reason(client, job_id)
        return text if all(word in text for word in words) else ""

    return until(look, f"job {job_id} waits, with the words {words}")


def gpus_by_index(client: Client) -> dict[int | None, str]:
    return {gpu.index: gpu.state for gpu in client.gpus()}


def another(driver: FakeDriver, index: int = 1) -> None:
    """One more GPU."""
    pci = f"00000000:{0x10 + index:02X}:00.0"
    driver.gpu(index, **{**driver.gpus[0], "uuid": uuid_of(index), "pci": pci, "minor": index})


def cut(driver: FakeDriver, index: int, *uuids: str) -> None:
    """The GPU is in MIG mode, with these slices."""
    driver.remove(f"mig {index} ")
    driver.gpu(index, mig=1)
    for slot, uuid in enumerate(uuids):
        driver.add(f"mig {index} {slot} {uuid} {slot + 3} 0 {10 * GIB} NVIDIA Fake MIG 1g.10gb")


def reopen(daemon: DaemonProcess, restarts: bool = False) -> None:
    """The driver is opened anew, by the same daemon or by the next one."""
    if restarts:
        assert daemon.stop() == 0
        daemon.start()
        return
    assert daemon.run("gctl", "gpus", "release").returncode == 0
    assert daemon.run("gctl", "gpus", "resume").returncode == 0


def move_clock(driver: FakeDriver, ahead_s: float) -> None:
    """Of a daemon that is QUICK_AND_AHEAD: its looks are so much later than they are."""
    temporary = driver.place / "ahead.tmp"
    temporary.write_text(str(ahead_s))
    temporary.replace(driver.place / "ahead")


def until_asked_again(driver: FakeDriver) -> None:
    """A few times more."""
    before = driver.calls()
    until(lambda: driver.calls() > before + 10, "it was asked a few times more")


def times_said(daemon: DaemonProcess, words: str) -> int:
    return daemon.log_text().count(words)


def kinds(job: JobView) -> list[str]:
    return [event.kind for event in job.events or ()]


# --- sharing ------------------------------------------------------------------------------------


def test_a_job_waits_for_foreign_memory_and_is_told_whose(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """21 GiB of foreign use and a 40 GiB job on a 48 GiB card."""
    daemon = daemon_over(driver)
    with stranger(0, 21 * 1024) as other, daemon.client() as client:
        until(lambda: (client.gpus()[0].foreign_bytes or 0) > 21 * GIB, "it is seen")
        said = daemon.run("gsub", "-m", "40G", "-o", "/dev/null", "true")
        assert said.returncode == 0
        assert "it can start only when others leave" in said.stderr
        job_id = int(said.stdout.split()[2].rstrip(":"))
        words = ("needs 1 GPU with 40.5 GiB", f"{whose(other)} with 21 GiB")
        until_reason(client, job_id, *words)
        small = client.submit(["true"], vram="20G", time_limit="1m", output="/dev/null")
        assert client.wait(small.id, timeout_s=30).state is JobState.COMPLETED
        whole = client.submit(["true"], output="/dev/null")
        until_reason(client, whole.id, f"{whose(other)} with 21 GiB")
        other.kill()
        assert client.wait(job_id, timeout_s=30).state is JobState.COMPLETED
        assert client.wait(whole.id, timeout_s=30).state is JobState.COMPLETED


def test_twenty_three_of_twenty_four_jobs_fit(driver: FakeDriver, daemon_over: Start) -> None:
    """2000 MiB each on 46068 MiB, no reserve, no margin, no cap."""
    driver.gpu(0, total=46068 * MIB)
    daemon = daemon_over(driver, *ALONE)
    words = claim("--vram", "2000", "--hold", "60")
    with daemon.client() as client:
        ids = [
            client.submit(words, vram=2000 * MIB, output="/dev/null", time_limit="5m").id
            for _ in range(24)
        ]

        def settled() -> bool:
            found = [client.job(job_id).state for job_id in ids]
            used = client.gpus()[0].used_bytes
            return found.count(JobState.RUNNING) == 23 and used == 23 * 2000 * MIB

        until(settled, "23 run and hold their memory")
        states = [client.job(job_id).state for job_id in ids]
        assert states.count(JobState.PENDING) == 1
        assert client.gpus()[0].foreign_bytes == 0


def test_as_many_jobs_fit_where_no_process_can_be_matched(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Four of 5 GiB on 24: what they use counts once, and how to have them matched is told."""
    driver.gpu(0, total=24 * GIB)
    driver.set(hidden=1)
    daemon = daemon_over(driver)
    words = claim("--vram", "5000", "--hold", "60")
    with daemon.client() as client:
        ids = [client.submit(words, vram="5G", output="/dev/null").id for _ in range(4)]

        def all_hold() -> bool:
            running = all(is_running(client, job_id) for job_id in ids)
            return running and client.gpus()[0].used_bytes == 4 * 5000 * MIB

        until(all_hold, "all four run and hold their memory")
        words = ["processes cannot be matched with jobs on GPU 0", "--pid=host"]
        until(
            lambda: all(word in daemon.run("gctl", "status").stdout for word in words),
            "a list of processes is in, and names none of them",
        )
        assert client.gpus()[0].foreign_bytes == 0


def test_a_job_s_own_container_takes_no_room_from_the_next_job(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Its processes are no children of the job; they are counted within what it holds."""
    driver.gpu(0, total=24 * GIB)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        first = client.submit(["sleep", "60"], vram="10G", output="/dev/null")
        until(lambda: is_running(client, first.id), "it runs")
        with stranger(0, 10 * 1024):
            until(lambda: client.gpus()[0].used_bytes == 10 * GIB, "its container has memory")
            second = client.submit(["sleep", "60"], vram="10G", output="/dev/null")
            until(lambda: is_running(client, second.id), "there is room for it")


def test_fifty_jobs_that_allocate_late_never_pass_the_card(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """What was promised is held before it is used: nobody runs out of memory."""
    daemon = daemon_over(driver, *ALONE)
    words = claim("--vram", "4096", "--ramp", "0.4", "--hold", "0.1")
    with daemon.client() as client:
        ids = [client.submit(words, vram="4G", output="/dev/null").id for _ in range(50)]
        most = 0

        def done() -> bool:
            nonlocal most
            gpu = client.gpus()[0]
            most = max(most, gpu.used_bytes or 0)
            assert (gpu.promised_bytes or 0) <= 48 * GIB
            return not client.jobs(ids=ids, states=["PENDING", "CONFIGURING", "RUNNING"]).total

        until(done, "all have run", deadline_s=200.0)
        ended = client.wait(ids, timeout_s=60)
    assert {job.state for job in ended} == {JobState.COMPLETED}
    assert most <= 48 * GIB


def test_a_job_above_its_declaration_is_warned_about_and_holds_its_peak(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """While it runs; the verdict comes at the end."""
    daemon = daemon_over(driver)
    with daemon.client() as client:
        words = claim("--vram", "6000", "--hold", "0", "--until", str(tmp_path / "go"))
        job = client.submit(words, vram="2G", output="/dev/null")
        until(lambda: "job_over_declaration" in kinds(client.job(job.id)), "a warning")
        assert (client.gpus()[0].promised_bytes or 0) >= 6600 * MIB
        (tmp_path / "go").touch()
        client.wait(job.id, timeout_s=30)
        shown = daemon.run("gq", str(job.id)).stdout
    assert "under-declared: raise --vram to 6.2 GiB" in shown


FAR_APART = ("--set", "gpu_sample_interval=3600.0", "--set", "nvml.health_interval=3600.0")


def test_a_last_look_keeps_a_job_from_a_gpu_that_was_just_taken(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """With sweeps far apart, foreign use is seen that came just before; who it is, is told."""
    daemon = daemon_over(driver, *FAR_APART)
    with daemon.client() as client:
        client.hello()  # a daemon at rest looks for whoever comes, and not again within an hour
        with stranger(0, 40 * 1024) as other:
            job = client.submit(["true"], output="/dev/null")
            text = until_reason(client, job.id, f"GPU 0 is in use: {whose(other)} with 40 GiB")
            assert text.startswith("LaunchBackoff: GPU 0 is in use")
            assert "next try in" in text
            assert client.job(job.id).state is JobState.PENDING


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"compute_mode": 2}, "its compute mode is prohibited"),
        ({"drained": 1}, "the driver drains it"),
    ],
)
def test_a_last_look_asks_whom_the_driver_lets_onto_the_gpu(
    driver: FakeDriver, daemon_over: Start, values: dict[str, int], words: str
) -> None:
    """Between two health checks a job would be placed, and fail."""
    daemon = daemon_over(driver, *FAR_APART)
    with daemon.client() as client:
        client.hello()  # a daemon at rest looks for whoever comes, and not again within an hour
        driver.gpu(0, **values)
        job = client.submit(["true"], output="/dev/null")
        until_reason(client, job.id, words)
        driver.gpu(0, **dict.fromkeys(values, 0))
        daemon.run("gctl", "gpus", "release", "--reason", "to have it looked at anew")
        daemon.run("gctl", "gpus", "resume")
        assert client.wait(job.id, timeout_s=60).state is JobState.COMPLETED


def test_where_one_process_is_allowed_a_stranger_s_keeps_all_jobs_waiting(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """However small: shared jobs and whole ones would fail at once, the whole queue of them."""
    driver.gpu(0, compute_mode=3)
    daemon = daemon_over(driver)
    with daemon.client() as client, stranger(0, 100) as other:
        until(lambda: (client.gpus()[0].foreign_bytes or 0) > 0, "it is seen")
        whole = client.submit(["true"], output="/dev/null")
        shared = client.submit(["true"], vram="1G", output="/dev/null")
        for job in (whole, shared):
            until_reason(client, job.id, whose(other), "allows one process only")
        shown = client.gpus()[0].reason or ""
        assert (whose(other) in shown, shown.count("one process only")) == (True, 1)
        other.kill()
        for job in (whole, shared):
            assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED


# --- declared against actual --------------------------------------------------------------------


def test_gq_shows_what_a_job_used_and_how_it_ended(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """Peak and its source, verdict, utilisation, energy, cause of death."""
    driver.gpu(0, util=80, power_mw=300_000)
    daemon = daemon_over(driver)

    def run(client: Client, mib: int, *options: str) -> SubmittedJob:
        """A job that declares 4 GiB, ends once its figures are in, and has ended."""
        go = tmp_path / f"go-{mib}"
        words = claim("--vram", str(mib), "--hold", "0", "--until", str(go), *options)
        job = client.submit(words, vram="4G", output="/dev/null")

        def is_metered() -> bool:
            seen = client.job(job.id)
            has_figures = bool(seen.gpu_utilization and seen.energy_j)
            return has_figures and seen.vram_peak_bytes == mib * MIB

        until(is_metered, "what it uses is known")
        go.touch()
        client.wait(job.id, timeout_s=30)
        return job

    with daemon.client() as client:
        right = run(client, 4000)
        shown = daemon.run("gq", str(right.id)).stdout
        assert "Peak VRAM:    3.9 GiB (sampled)" in shown
        assert "Verdict:      the declaration was right" in shown
        busy = re.search(r"GPU busy: +(\d+) % on average", shown)
        assert busy is not None
        assert 0 < int(busy[1]) <= 80  # nothing before its process was there
        assert re.search(r"Energy: +\d+\.", shown)
        assert "Cause:        exit" in shown
        killed = run(client, 9000, "--signal", "6")
        shown = daemon.run("gq", str(killed.id)).stdout
        assert "under-declared: raise --vram" in shown
        assert "Cause:        signal" in shown
        (facts,) = json.loads(daemon.run("gq", "--json", str(killed.id)).stdout)["jobs"]
        assert (facts["vram_verdict"], facts["cause"]) == ("under-declared", "signal")
        assert facts["vram_peak_bytes"] == 9000 * MIB
        assert facts["energy_j"] > 0
        idle = client.submit(["sleep", "0.1"], vram="1G", output="/dev/null")
        client.wait(idle.id, timeout_s=30)
        assert client.job(idle.id).vram_verdict == "unattributed"
        assert client.job(idle.id).vram_peak_bytes is None


def test_a_leak_that_came_just_before_a_job_is_not_its_peak(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """No regular look has seen it; the one before the launch does."""
    go = tmp_path / "go"
    daemon = daemon_over(driver, "--set", "gpu_sample_interval=2.0")
    with daemon.client() as client:
        driver.gpu(0, ownerless=150 * MIB)
        words = claim("--vram", "1000", "--hold", "0", "--until", str(go))
        job = client.submit(words, output="/dev/null")
        peak = until(lambda: client.job(job.id).vram_peak_bytes, "it is seen")
        go.touch()
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
    assert peak == 1000 * MIB


def test_a_spike_of_a_tenth_of_a_second_shows_where_the_driver_keeps_accounts(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Sampling would miss it; an older process with the same pid does not count."""
    driver.gpu(0, accounting=1)
    daemon = daemon_over(driver, "--set", "gpu_sample_interval=2.0")
    words = claim("--vram", "1000", "--hold", "2.5", "--spike", "30000")
    with daemon.client() as client:
        job = client.submit(words, vram="32G", output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs")
        client.wait(job.id, timeout_s=30)
        ended = client.job(job.id)
    assert (ended.vram_peak_bytes, ended.vram_peak_source) == (30000 * MIB, "driver")


def test_a_job_that_no_sweep_saw_has_its_peak_from_the_driver(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Its main process is asked for by its pid."""
    driver.gpu(0, accounting=1)
    daemon = daemon_over(driver, "--set", "gpu_sample_interval=30.0")
    with daemon.client() as client:
        job = client.submit(claim("--vram", "5000", "--hold", "0"), vram="6G", output="/dev/null")
        client.wait(job.id, timeout_s=30)
        ended = client.job(job.id)
    assert (ended.vram_peak_bytes, ended.vram_peak_source) == (5000 * MIB, "driver")


def test_figures_survive_a_restart_of_the_daemon(driver: FakeDriver, daemon_over: Start) -> None:
    """What was seen before counts after."""
    daemon = daemon_over(driver)
    with daemon.client() as client:
        words = claim("--vram", "8000", "--hold", "60")
        job = client.submit(words, vram="10G", output="/dev/null")
        until(lambda: client.job(job.id).vram_peak_bytes == 8000 * MIB, "its peak is seen")
        # Shown as soon as it is seen. What is acknowledged after it is in the books after it.
        client.submit(["true"], hold=True)
    daemon.kill()
    driver.add("error nvmlDeviceGetComputeRunningProcesses_v3 * 999")
    daemon.start()
    with daemon.client() as client:
        client.cancel([job.id])
        ended = client.wait(job.id, timeout_s=30)
        assert ended.state is JobState.CANCELLED
        assert client.job(job.id).vram_peak_bytes == 8000 * MIB


def test_whole_gpus_asleep_are_told_as_such(driver: FakeDriver, daemon_over: Start) -> None:
    """Nothing of the job is on them: 0 %, and what they draw all the same."""
    another(driver)
    for index in range(2):
        driver.gpu(index, util=0, power_mw=60_000)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        job = client.submit(["sleep", "60"], gpus=2, output="/dev/null")
        until(lambda: (client.job(job.id).energy_j or 0) > 60, "half a second of two GPUs")
        client.cancel([job.id])
        client.wait(job.id, timeout_s=30)
        ended = client.job(job.id)
        assert (ended.gpu_utilization, ended.vram_peak_bytes) == (0.0, None)
        assert [use.utilization for use in ended.gpu_uses or ()] == [0.0, 0.0]
        assert "GPU busy:     0 % on average" in daemon.run("gq", str(job.id)).stdout


def test_energy_of_before_a_stop_counts_after_it(driver: FakeDriver, daemon_over: Start) -> None:
    """Saved at the stop, long before it would be by itself; what nobody saw is not counted."""
    driver.gpu(0, power_mw=60_000)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        job = client.submit(["sleep", "60"], output="/dev/null")
        first = until(lambda: client.job(job.id).energy_j, "it has drawn something")
        before = until(
            lambda: (e := client.job(job.id).energy_j or 0) > first + 100 and e,
            "it draws on, and nothing is saved for a minute",
        )
    assert daemon.stop() == 0
    driver.gpu(0, power_mw=0)  # from now on the driver does not tell
    daemon.start()
    with daemon.client() as client:
        assert (client.job(job.id).energy_j or 0) >= before
        client.cancel([job.id])
        client.wait(job.id, timeout_s=30)
        ended = client.job(job.id)
    assert (ended.energy_j or 0) >= before
    assert ended.started_at_s is not None
    assert ended.ended_at_s is not None
    assert 0 < (ended.gpu_observed_s or 0) < ended.ended_at_s - ended.started_at_s


def test_out_of_memory_by_a_stranger_is_told_as_such_and_not_answered_with_more(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """On a whole GPU: the cause names pid, user and amount; the retry asks for the same."""
    daemon = daemon_over(driver)
    go = tmp_path / "go"
    wait_then = f"until [ -e {go} ]; do sleep 0.05; done; "
    line = wait_then + " ".join(claim("--vram", "30000", "--hold", "0"))
    with daemon.client() as client:
        job = client.submit(shell=line, retries=1, output="r.out", cwd=daemon.work_dir)
        until(lambda: is_running(client, job.id), "it runs")
        with stranger(0, 30 * 1024) as other:
            until(lambda: str(other.pid) in (client.gpus()[0].reason or ""), "it is seen")
            go.touch()
            until(lambda: "job_retried" in kinds(client.job(job.id)), "it is tried again")
            until_reason(client, job.id, f"{whose(other)} with 30 GiB")
            text = " ".join(event.text for event in client.job(job.id).events or ())
            assert f"GPU 0 was in use by {whose(other)} with 30 GiB as well" in text
            assert client.job(job.id).vram_bytes is None
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
        go.unlink()
        last = client.submit(shell=line, output="l.out", cwd=daemon.work_dir)
        until(lambda: is_running(client, last.id), "it runs")
        with stranger(0, 30 * 1024) as other:
            until(lambda: str(other.pid) in (client.gpus()[0].reason or ""), "it is seen")
            go.touch()
            ended = client.wait(last.id, timeout_s=30)
            assert (ended.state, ended.cause) == (JobState.OUT_OF_MEMORY, "cuda_oom")
            detail = client.job(last.id).cause_detail or ""
            assert f"GPU 0 was in use by {whose(other)} with 30 GiB as well" in detail


def test_out_of_vram_is_tried_again_with_a_quarter_more(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """Other failures burn none, also behind an OOM that was got over; with none left it ends."""
    daemon = daemon_over(driver)
    words = claim("--vram", "3000", "--hold", "1.2", "--oom-once", str(tmp_path / "once"))
    with daemon.client() as client:
        said = daemon.run("gsub", "--retries", "2", "-m", "2000M", "-o", "r.out", *words)
        job_id = int(said.stdout.split()[2].rstrip(":"))
        ended = client.wait(job_id, timeout_s=30)
        assert (ended.state, ended.attempt) == (JobState.COMPLETED, 2)
        declared = ended.vram_bytes or 0
        assert declared in (2500 * MIB, 3750 * MIB)  # the peak was seen, or was too short to be
        job = client.job(job_id)
        assert "job_retried" in kinds(job)
        plain = client.submit(["false"], vram="2G", retries=3, output="/dev/null")
        client.wait(plain.id, timeout_s=30)
        assert client.job(plain.id).attempt == 1
        got_over = "CUDA out of memory, batch 32 instead\nstep 2\nKeyError: 'loss'"
        line = f'echo "{got_over}"; exit 1'
        later = client.submit(shell=line, vram="2G", retries=2, output=daemon.work_dir / "later")
        ended = client.wait(later.id, timeout_s=30)
        assert (ended.state, ended.cause, ended.attempt) == (JobState.FAILED, "exit", 1)
        shown = "its output shows a CUDA OOM, and another error later"
        assert client.job(later.id).cause_detail == shown
        once = claim("--vram", "99999", "--hold", "0")
        last = client.submit(once, vram="40G", retries=1, output="last.out", cwd=daemon.work_dir)
        ended = client.wait(last.id, timeout_s=30)
        assert (ended.state, ended.cause) == (JobState.OUT_OF_MEMORY, "cuda_oom")
        assert (ended.attempt, ended.vram_bytes) == (2, None)  # the second took the whole card


@pytest.mark.root
def test_host_oom_is_a_cause_of_its_own(driver: FakeDriver, daemon_over: Start) -> None:
    """By a made-up memory.events, in a mount namespace of the test's own."""
    made_up = "mount -t tmpfs none /sys/fs/cgroup && "
    made_up += "echo oom_kill 0 > /sys/fs/cgroup/memory.events && "
    made_up += 'chmod 666 /sys/fs/cgroup/memory.events && exec "$@"'
    daemon = daemon_over(driver, wrapper=["unshare", "-m", "sh", "-c", made_up, "sh"])
    line = "echo oom_kill 1 > /sys/fs/cgroup/memory.events; kill -9 $$"
    with daemon.client() as client:
        job = client.submit(shell=line, vram="1G", output="/dev/null")
        client.wait(job.id, timeout_s=30)
        shown = daemon.run("gq", str(job.id)).stdout
    assert "State:        OUT_OF_MEMORY" in shown
    assert "Cause:        host oom" in shown


# --- attribution --------------------------------------------------------------------------------


def test_a_job_on_a_gpu_that_it_was_not_granted_is_on_record(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """The user overrode CUDA_VISIBLE_DEVICES: job, pid and GPU, and the memory counts there."""
    another(driver)
    daemon = daemon_over(driver, *QUICK)
    with daemon.client() as client:
        words = claim("--vram", "5000", "--hold", "60", "--uuids", uuid_of(1))
        job = client.submit(words, vram="6G", output="/dev/null")
        until(lambda: "gpu_not_granted" in kinds(client.job(job.id)), "it is noticed")
        assert client.job(job.id).gpu_indices == (0,)
        gpu = client.gpus()[1]
        assert (gpu.foreign_bytes or 0) >= 5000 * MIB
        assert f"of job {job.id}, not granted to it" in (gpu.reason or "")
        driver.add(f"error nvmlDeviceGetComputeRunningProcesses_v3 1 {UNKNOWN}")
        until(lambda: "not granted" not in (client.gpus()[1].reason or ""), "no list tells it")
        driver.remove("error")
        until(lambda: "not granted" in (client.gpus()[1].reason or ""), "the list is back")
        assert kinds(client.job(job.id)).count("gpu_not_granted") == 1


def test_jobs_get_their_gpus_by_every_name(driver: FakeDriver, daemon_over: Start) -> None:
    """CUDA's, NVIDIA's and ours, and the CPUs near them."""
    another(driver)
    driver.gpu(1, cpus="1")
    driver.gpu(0, cpus="1")
    daemon = daemon_over(driver, "--set", "bind_cpus=true")
    line = "env | grep -E 'CUDA|NVIDIA|GPUSCHED'; grep Cpus_allowed_list /proc/self/status"
    with daemon.client() as client:
        job = client.submit(shell=line, gpus=2, output="env.out", cwd=daemon.work_dir)
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
    said = (daemon.work_dir / "env.out").read_text().splitlines()
    both = f"{uuid_of(0)},{uuid_of(1)}"
    for line in (
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        f"NVIDIA_VISIBLE_DEVICES={both}",
        f"GPUSCHED_GPU_UUIDS={both}",
        "GPUSCHED_GPU_INDICES=0,1",
        "GPUSCHED_CPU_AFFINITY=0",
        "Cpus_allowed_list:\t0",
    ):
        assert line in said


# --- a driver in trouble ------------------------------------------------------------------------


def test_without_a_driver_library_the_daemon_ends_and_says_what_helps(tmp_path: Path) -> None:
    """With status 78: no restart helps. It never had a GPU."""
    nowhere = {"LD_LIBRARY_PATH": "/nonexistent"}
    daemon = DaemonProcess(tmp_path, environment=nowhere)
    daemon.options = []
    assert daemon.spawn().wait(60) == 78
    assert "gpuschedd --simulate 4x24G" in daemon.log.read_text()
    assert not daemon.socket.exists()


def test_a_driver_library_that_is_away_for_a_while_ends_no_daemon_that_had_gpus(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """An upgrade of the driver: jobs wait, and are told; the GPUs of before are shown."""
    daemon = daemon_over(driver)
    daemon.stop()
    daemon.environment |= {"LD_LIBRARY_PATH": "/nonexistent"}
    daemon.start()
    with daemon.client() as client:
        job = client.submit(["true"], output="/dev/null")
        until_reason(client, job.id, "--simulate")
        assert gpus_by_index(client) == {0: "unread"}
        cpu_only = client.submit(["true"], gpus=0, output="/dev/null")
        assert client.wait(cpu_only.id, timeout_s=30).state is JobState.COMPLETED


def test_a_driver_that_finds_no_gpu_is_asked_again_and_again(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Jobs without GPUs run meanwhile; in a container /proc has nothing to go by. Said hourly."""
    kept = driver.gpus.pop(0)
    driver.write()
    move_clock(driver, 0)
    daemon = daemon_over(driver, *OFTEN, wrapper=[sys.executable, "-c", QUICK_AND_AHEAD])
    with daemon.client() as client:
        job = client.submit(["true"], output="/dev/null")
        until_reason(client, job.id, "finds no GPU here")
        cpu_only = client.submit(["true"], gpus=0, output="/dev/null")
        assert client.wait(cpu_only.id, timeout_s=30).state is JobState.COMPLETED
        move_clock(driver, SAY_AGAIN_S - 300)
        until_asked_again(driver)
        assert times_said(daemon, "finds no GPU here") == 1
        move_clock(driver, SAY_AGAIN_S + 1)
        until(lambda: times_said(daemon, "finds no GPU here") > 1, "it is said again")
        until_asked_again(driver)
        assert times_said(daemon, "finds no GPU here") == 2
        move_clock(driver, 0)
        driver.gpus[0] = kept
        driver.write()
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED


def test_a_driver_that_is_down_is_told_of_hourly(driver: FakeDriver, daemon_over: Start) -> None:
    """Also where nothing of what it says changes; not at each of the looks in between."""
    driver.set(init=DRIVER_NOT_LOADED)
    move_clock(driver, 0)
    daemon = daemon_over(driver, *OFTEN, wrapper=[sys.executable, "-c", QUICK_AND_AHEAD])
    until(lambda: times_said(daemon, "gpus_down"), "it is told")
    move_clock(driver, SAY_AGAIN_S - 300)
    until_asked_again(driver)
    assert times_said(daemon, "gpus_down") == 1
    move_clock(driver, SAY_AGAIN_S + 1)
    until(lambda: times_said(daemon, "gpus_down") > 1, "it is told again")
    until_asked_again(driver)
    assert times_said(daemon, "gpus_down") == 2


def test_a_mismatch_after_a_restart_loses_no_job(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """The driver was upgraded under us: jobs go on, new ones wait for a reboot."""
    daemon = daemon_over(driver)
    with daemon.client() as client:
        line = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 7"
        job = client.submit(shell=line, output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs")
    daemon.kill()
    driver.set(init=LIB_RM_MISMATCH)
    daemon.start()
    with daemon.client() as client:
        assert is_running(client, job.id)
        other = client.submit(["true"], output="/dev/null")
        until_reason(client, other.id, "after a reboot")
        (gpu,) = client.gpus()
        assert (gpu.state, gpu.jobs) == ("unread", (job.id,))
        (tmp_path / "go").touch()
        ended = client.wait(job.id, timeout_s=30)
        assert (ended.state, ended.exit_code) == (JobState.FAILED, 7)
        assert client.job(other.id).state is JobState.PENDING


def test_a_hang_on_one_gpu_costs_neither_answers_nor_the_other_gpus(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Questions are answered while a sweep hangs, and jobs start on the others."""
    another(driver)
    daemon = daemon_over(driver, "--set", "nvml.sweep_deadline=3.0")
    with daemon.client() as client:
        job = client.submit(["sleep", "60"], output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs on GPU 0")
        driver.add("hang nvmlDeviceGetMemoryInfo_v2 0")
        before = driver.calls()
        until(lambda: driver.calls() > before, "a sweep is under way, and hangs")
        for _ in range(10):
            client.gpus()
        assert "driver_failed" not in daemon.log.read_text(), "the answers waited for the sweep"
        until(lambda: gpus_by_index(client) == {0: "unread", 1: "ok"}, "GPU 0 is left out")
        other = client.submit(["true"], output="/dev/null")
        assert client.wait(other.id, timeout_s=30).gpu_indices == (1,)
        assert is_running(client, job.id)
        client.cancel([job.id])
        assert client.wait(job.id, timeout_s=30).state is JobState.CANCELLED


def test_a_dear_driver_is_asked_less_often(driver: FakeDriver, daemon_over: Start) -> None:
    """Above 5 % of the time the interval doubles; cheap again, it comes back."""
    daemon = daemon_over(driver, "--set", "gpu_sample_interval=0.2")
    driver.add("delay nvmlDeviceGetMemoryInfo_v2 0 60")
    until(lambda: "gpu_sweeps_slowed interval=0.8" in daemon.log.read_text(), "it slows down")


def test_a_daemon_at_rest_looks_anew_for_whoever_comes(driver: FakeDriver, tmp_path: Path) -> None:
    """Its next look of its own accord is half an hour away."""
    daemon = DaemonProcess(tmp_path / "daemon", environment=driver.environment)
    daemon.options = ["--set", "gpu_sample_interval=100"]
    daemon.spawn()
    try:
        until(lambda: "ready version" in daemon.log_text(), "it is up, and nobody has come")
        before = driver.calls()
        with daemon.client() as client:
            client.hello()
            until(lambda: driver.calls() > before, "it looks")
    finally:
        clean_up(daemon)


def test_a_hang_blocks_no_restart(driver: FakeDriver, daemon_over: Start) -> None:
    """Stop and start while the driver hangs."""
    daemon = daemon_over(driver, "--set", "nvml.sweep_deadline=3600.0")
    driver.add("hang nvmlDeviceGetMemoryInfo_v2 *")
    before = driver.calls()
    until(lambda: driver.calls() > before, "a sweep is under way, and hangs")
    assert daemon.stop() == 0
    driver.remove("hang")
    daemon.start()


def test_a_start_that_hangs_in_the_driver_can_be_stopped(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Who is told to stop does not wait for a driver that never finishes its start."""
    daemon = daemon_over(driver, "--set", "nvml.open_deadline=3600.0")
    daemon.stop()
    driver.add("hang nvmlInit_v2 *", "hang nvmlInitWithFlags *")
    before = driver.calls()
    daemon.spawn()
    until(lambda: driver.calls() > before, "the start hangs")
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    driver.remove("hang")
    daemon.start()


def test_a_stop_leaves_nothing_half_done(driver: FakeDriver, daemon_over: Start) -> None:
    """In the middle of a sweep that hangs, with jobs that end just then: no error in the log."""
    daemon = daemon_over(driver, "--set", "nvml.sweep_deadline=1.0")
    with daemon.client() as client:
        words = ["sleep", "0.7"]
        ids = [client.submit(words, vram="2G", output="/dev/null").id for _ in range(4)]
        until(lambda: not client.jobs(ids=ids, states=["PENDING"]).total, "they are placed")
        driver.add("hang nvmlDeviceGetMemoryInfo_v2 *")
    before = driver.calls()
    until(lambda: driver.calls() > before, "a sweep hangs")
    job_dirs = daemon.state_dir / "jobs"
    until(lambda: all((path / "exit").exists() for path in job_dirs.iterdir()), "the jobs end")
    assert daemon.stop() == 0
    log = daemon.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
    driver.remove("hang")
    daemon.start()


def test_a_gpu_missing_from_an_answer_fails_nothing(driver: FakeDriver, daemon_over: Start) -> None:
    """Its job runs on, nothing new is placed there, and it comes back."""
    daemon = daemon_over(driver, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    with daemon.client() as client:
        job = client.submit(["sleep", "60"], output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs")
        kept = driver.gpus[0]
        driver.drop_gpu(0)
        until(lambda: client.gpus()[0].state == "lost", "it is gone")
        assert is_running(client, job.id)
        _kill_nvml_child(daemon)  # the next one does not even list it
        until(lambda: "did not mention it" in (client.gpus()[0].reason or ""), "it is missing")
        assert is_running(client, job.id)
        waits = client.submit(["true"], output="/dev/null")
        text = until(lambda: reason(client, waits.id), "it waits")
        client.cancel([waits.id])
        driver.gpus[0] = kept
        driver.write()
        _kill_nvml_child(daemon)
        until(lambda: client.gpus()[0].state == "ok", "it is back")
        assert is_running(client, job.id)
        assert "GPU 0" in text or "job" in text
        driver.add(f"error nvmlDeviceGetMemoryInfo_v2 0 {UNKNOWN} 1")
        client.cancel([job.id])
        client.wait(job.id, timeout_s=30)
        after = client.submit(["true"], output="/dev/null")
        assert client.wait(after.id, timeout_s=30).state is JobState.COMPLETED


def test_an_xid_79_quarantines_its_gpu_and_is_the_cause_of_death(
    driver: FakeDriver, daemon_over: Start, tmp_path: Path
) -> None:
    """Its jobs end as they do; a restart makes no GPU well; 31 is the job's own business."""
    another(driver)
    daemon = daemon_over(driver, *QUICK)
    with daemon.client() as client:
        line = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"
        victim = client.submit(shell=line, output="/dev/null")
        until(lambda: is_running(client, victim.id), "it runs on GPU 0")
        driver.event(1, XID, 31)
        driver.event(0, XID, 79)
        until(lambda: gpus_by_index(client)[0] == "sick", "it is noticed")
        (tmp_path / "go").touch()
        ended = client.wait(victim.id, timeout_s=30)
        assert (ended.state, ended.cause, ended.exit_code) == (JobState.FAILED, "xid", 3)
        assert ended.cause_detail == "Xid 79 (GPU fell off the bus) on GPU 0"
        until(lambda: gpus_by_index(client) == {0: "sick", 1: "ok"}, "one is sick")
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        assert gpus_by_index(client) == {0: "sick", 1: "ok"}
        assert "Xid 79" in daemon.run("gq", "--gpus").stdout
        drained = daemon.run("gctl", "drain", "0", "--reason", "checking it")
        assert drained.returncode == 0
        assert gpus_by_index(client)[0] == "drained"
        assert daemon.run("gctl", "resume", "0").returncode == 0
        until(lambda: gpus_by_index(client)[0] == "ok", "an admin's word counts")


def test_an_admin_s_word_over_a_gpu_outlives_the_daemon(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """A failed row remap that an admin can live with, and errors that were counted already."""
    # No recovery action, 3 uncorrectable errors, no remap pending, one failed.
    driver.gpu(0, field=["230 0", "4 3", "144 0", "145 1"])
    daemon = daemon_over(driver, *QUICK)
    with daemon.client() as client:
        until(lambda: gpus_by_index(client)[0] == "sick", "it is noticed")
        assert daemon.run("gctl", "resume", "0").returncode == 0
        until(lambda: gpus_by_index(client)[0] == "ok", "an admin's word counts")
        client.wait(client.submit(["true"], output="/dev/null").id, timeout_s=60)
    daemon.kill()
    daemon.start()
    with daemon.client() as client:
        job = client.submit(["true"], output="/dev/null")
        assert client.wait(job.id, timeout_s=60).state is JobState.COMPLETED
        assert gpus_by_index(client)[0] == "ok"


def test_release_lets_go_of_the_driver_and_resume_takes_it_back(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """A job runs on; one more waits and is told why; slices made meanwhile are there after."""
    another(driver)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        job = client.submit(["sleep", "60"], output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs on GPU 0")
        said = daemon.run("gctl", "gpus", "release", "--reason", "MIG of GPU 1")
        assert said.stderr == ""
        assert said.stdout == f"the driver is released; job {job.id} still uses it\n"
        assert not _nvml_children(daemon)
        waits = client.submit(["true"], vram="4G", output="/dev/null")
        until_reason(client, waits.id, "released by an admin: MIG of GPU 1")
        driver.gpu(1, mig=1)
        driver.add(f"mig 1 0 MIG-new 3 0 {10 * GIB} NVIDIA Fake MIG 1g.10gb")
        said = daemon.run("gctl", "gpus", "resume")
        assert "MIG 1g.10gb" in said.stdout
        ended = client.wait(waits.id, timeout_s=30)
        assert (ended.state, ended.gpu_uuids) == (JobState.COMPLETED, ("MIG-new",))
        assert is_running(client, job.id)


def test_a_gpu_in_mig_mode_stands_for_its_slices(driver: FakeDriver, daemon_over: Start) -> None:
    """A drain by its index drains each of them, a resume puts each of them back."""
    another(driver)
    driver.gpu(1, mig=1)
    for slot, name in ((0, "MIG-a"), (1, "MIG-b")):
        driver.add(f"mig 1 {slot} {name} {slot + 3} 0 {10 * GIB} NVIDIA Fake MIG 1g.10gb")
    daemon = daemon_over(driver)
    with daemon.client() as client:
        until(lambda: set(gpus_by_index(client)) == {0, 200, 201}, "both slices are there")
        # By UUID as well, as `nvidia-smi -L` and logs name it, but not by what begins another's.
        parent = uuid_of(1)
        assert [gpu.index for gpu in client.drain_all(parent, "fan")] == [200, 201]
        assert [gpu.index for gpu in client.resume_all(parent)] == [200, 201]
        with pytest.raises(NotFound, match=f"2 GPUs are named '{parent[:-1]}'"):
            client.drain_all(parent[:-1], "fan")
        with pytest.raises(NotFound, match=f"no GPU is named '{parent}0'"):
            client.drain_all(parent + "0", "fan")
        said = daemon.run("gctl", "drain", "1", "--reason", "fan")
        assert said.stdout.splitlines() == [
            "GPU 200: drained: fan, by root",
            "GPU 201: drained: fan, by root",
        ]
        assert gpus_by_index(client) == {0: "ok", 200: "drained", 201: "drained"}
        waits = client.submit(["true"], gpu_model="1g.10gb", output="/dev/null")
        until_reason(client, waits.id, "GPUs 200 and 201 drained (fan, by root)")
        assert [gpu.state for gpu in client.resume_all(1)] == ["ok", "ok"]
        assert client.wait(waits.id, timeout_s=30).state is JobState.COMPLETED


def test_a_driver_that_hangs_can_be_released_and_its_trouble_is_told(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """Who wants to reset a GPU that hangs is not made to wait for it; then the module is gone."""
    daemon = daemon_over(driver, "--set", "nvml.sweep_deadline=3600")
    with daemon.client() as client:
        until(client.gpus, "the GPU is known")
        driver.add("hang nvmlDeviceGetMemoryInfo_v2 0")
        before = driver.calls()
        until(lambda: driver.calls() > before, "a sweep is under way, and hangs")
        assert daemon.run("gctl", "gpus", "release").returncode == 0
        driver.remove("hang")
        driver.set(init=DRIVER_NOT_LOADED)
        said = daemon.run("gctl", "gpus", "resume")
        assert "modprobe nvidia" in said.stdout


def _nvml_children(daemon: DaemonProcess) -> list[int]:
    assert daemon.process is not None
    pid = daemon.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if _name_of(child) == "gpuschedd-nvml"]


def _name_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _kill_nvml_child(daemon: DaemonProcess) -> None:
    os.kill(until(lambda: _nvml_children(daemon), "there is one")[0], 9)


def test_the_child_dies_with_the_daemon(driver: FakeDriver, daemon_over: Start) -> None:
    """kill -9 leaves no process in the driver."""
    daemon = daemon_over(driver)
    (child,) = until(lambda: _nvml_children(daemon), "there is one")
    daemon.kill()
    until(lambda: not os.path.exists(f"/proc/{child}"), "the child is gone")
    daemon.start()


# --- other people's tools -----------------------------------------------------------------------


@pytest.mark.parametrize("words", [["gpustat", "--no-color"], ["nvitop", "-1"]])
def test_other_tools_see_the_same_driver(driver: FakeDriver, words: list[str]) -> None:
    """The stand-in is good enough for gpustat and nvitop."""
    pytest.importorskip(words[0])
    driver.process(0, os.getpid(), 1000 * MIB)
    program = Path(sys.executable).parent / words[0]
    done = subprocess.run(
        [str(program), *words[1:]], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Fake 48G" in done.stdout
    assert "1000" in done.stdout


def test_a_gpu_that_the_configuration_drops_is_neither_missing_nor_lost(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """While a job runs there it is shown, out of service, with the reason; then it goes."""
    another(driver)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        job = client.submit(["sleep", "60"], output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs on GPU 0")
        (daemon.place / "config.toml").write_text("gpus = [1]\n")
        assert daemon.run("gctl", "reload").returncode == 0
        until(lambda: gpus_by_index(client) == {0: "unread", 1: "ok"}, "it takes no job")
        dropped = next(gpu for gpu in client.gpus() if gpu.index == 0)
        assert dropped.reason == "the configuration leaves it out (gpus)"
        client.cancel([job.id])
        client.wait(job.id, timeout_s=30)
        until(lambda: gpus_by_index(client) == {1: "ok"}, "it is gone")
        (daemon.place / "config.toml").write_text("")
        assert daemon.run("gctl", "reload").returncode == 0
        until(lambda: gpus_by_index(client) == {0: "ok", 1: "ok"}, "it is back")


# --- GPUs that the driver does not open ----------------------------------------------------------


@pytest.mark.parametrize("code", [UNKNOWN, GPU_IS_LOST])
def test_a_gpu_that_cannot_be_opened_at_the_start_is_shown_with_the_reason(
    driver: FakeDriver, daemon_over: Start, code: int
) -> None:
    """One that was never seen, too: status is a problem, and it can be drained."""
    another(driver)
    driver.add(f"error nvmlDeviceGetHandleByIndex_v2 1 {code}")
    daemon = daemon_over(driver)
    with daemon.client() as client:
        gpu = next(gpu for gpu in client.gpus() if gpu.index == 1)
        assert gpu.state == ("lost" if code == GPU_IS_LOST else "unread")
        assert "it cannot be opened" in (gpu.reason or "")
        status = daemon.run("gctl", "status")
        assert status.returncode == 1
        assert "GPU 1 is" in status.stdout
        assert daemon.run("gctl", "drain", "1", "--reason", "sent back").returncode == 0
        assert gpus_by_index(client) == {0: "ok", 1: "drained"}
        assert daemon.run("gctl", "status").returncode == 0


@pytest.mark.parametrize("trouble", ["hang", "crash"])
@pytest.mark.parametrize("is_on_record", [False, True])
def test_a_gpu_that_hangs_the_driver_from_the_start_is_shown_with_the_reason(
    driver: FakeDriver, daemon_over: Start, trouble: str, is_on_record: bool
) -> None:
    """Seen before or never: as one that cannot be opened. The others take jobs."""
    another(driver)
    line = f"{trouble} nvmlDeviceGetUUID 1"
    if not is_on_record:
        driver.add(line)
    daemon = daemon_over(driver, *QUICK_TO_GIVE_UP, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    if is_on_record:
        with daemon.client() as client:
            until(lambda: gpus_by_index(client) == {0: "ok", 1: "ok"}, "both are there")
        assert daemon.stop() == 0
        driver.add(line)
        daemon.start()
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "ok", 1: "unread"}, "it is given up")
        gpu = next(gpu for gpu in client.gpus() if gpu.index == 1)
        assert gpu.reason == "it hangs the driver (nvmlDeviceGetUUID) and is not asked for now"
        assert (gpu.uuid == uuid_of(1)) is is_on_record
        status = daemon.run("gctl", "status")
        assert status.returncode == 1
        assert "GPU 1 is unread: it hangs the driver" in status.stdout
        assert daemon.run("gctl", "drain", "1", "--reason", "sent back").returncode == 0
        assert gpus_by_index(client) == {0: "ok", 1: "drained"}
        job = client.submit(["true"], output="/dev/null")
        assert client.wait(job.id, timeout_s=30).gpu_indices == (0,)


@pytest.mark.parametrize("is_mig", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_gpu_that_was_drained_before_it_could_be_opened_stays_drained(
    driver: FakeDriver, daemon_over: Start, restarts: bool, is_mig: bool
) -> None:
    """Nobody knew its UUID, or its slices; it is put back by its own name, once and for good."""
    another(driver)
    driver.add(f"error nvmlDeviceGetHandleByIndex_v2 1 {UNKNOWN}")
    daemon = daemon_over(driver, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    assert daemon.run("gctl", "drain", "1", "--reason", "hot").returncode == 0
    driver.remove("error")
    if is_mig:
        cut(driver, 1, "MIG-a", "MIG-b")
    reopen(daemon, restarts)
    indices, model = ((200, 201), "1g.10gb") if is_mig else ((1,), None)
    drained, well = dict.fromkeys(indices, "drained"), dict.fromkeys(indices, "ok")
    with daemon.client() as client:
        until(lambda: set(gpus_by_index(client)) == {0, *indices}, "it is open")
        assert gpus_by_index(client) == {0: "ok", **drained}
        assert not [gpu for gpu in client.gpus() if gpu.uuid.startswith("unopened")]
        gpus = 1 if is_mig else 2
        waits = client.submit(["true"], gpus=gpus, gpu_model=model, output="/dev/null")
        until_reason(client, waits.id, "drained (hot, by root)")
        assert [gpu.state for gpu in client.resume_all(1)] == ["ok"] * len(indices)
        assert client.wait(waits.id, timeout_s=30).state is JobState.COMPLETED
    reopen(daemon, restarts)
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "ok", **well}, "nothing of it is left")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_gpu_that_was_always_in_slices_stays_drained_as_others(
    driver: FakeDriver, daemon_over: Start, restarts: bool
) -> None:
    """Nobody has ever seen it whole; a slice that is drained alone goes with its drain."""
    another(driver)
    cut(driver, 0, "MIG-x", "MIG-y")
    cut(driver, 1, "MIG-a", "MIG-b")
    daemon = daemon_over(driver, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    with daemon.client() as client:
        until(lambda: set(gpus_by_index(client)) == {100, 101, 200, 201}, "all are there")
        client.drain(101, "a demonstration")
        client.drain_all(1, "hot")
    cut(driver, 0, "MIG-z")
    cut(driver, 1, "MIG-c")
    reopen(daemon, restarts)
    with daemon.client() as client:
        until(lambda: set(gpus_by_index(client)) == {100, 200}, "they are cut otherwise")
        assert gpus_by_index(client) == {100: "ok", 200: "drained"}
        assert [gpu.state for gpu in client.resume_all(1)] == ["ok"]


def test_a_drained_gpu_stays_drained_whatever_it_is_cut_into(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """MIG mode on, other slices, off again: by names that nobody knew when it was drained."""
    another(driver)
    daemon = daemon_over(driver, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "ok", 1: "ok"}, "both are there")
        client.drain(1, "hot")
        cut(driver, 1, "MIG-a", "MIG-b")
        reopen(daemon)
        until(lambda: 200 in gpus_by_index(client), "it is in slices")
        assert gpus_by_index(client) == {0: "ok", 200: "drained", 201: "drained"}
        client.resume_all(1)
        assert gpus_by_index(client) == {0: "ok", 200: "ok", 201: "ok"}
        client.drain_all(1, "hot again")
        cut(driver, 1, "MIG-c")
        reopen(daemon)
        until(lambda: gpus_by_index(client).keys() == {0, 200}, "it is another slice")
        assert gpus_by_index(client) == {0: "ok", 200: "drained"}
        cut(driver, 1)
        driver.gpu(1, mig=-1)
        reopen(daemon)
        until(lambda: 1 in gpus_by_index(client), "it is whole")
        assert gpus_by_index(client) == {0: "ok", 1: "drained"}
        client.resume(1)
        cut(driver, 1, "MIG-c")
        reopen(daemon)
        until(lambda: 200 in gpus_by_index(client), "it is in the slice of before")
        assert gpus_by_index(client) == {0: "ok", 200: "ok"}


def test_a_gpu_that_is_drained_while_it_is_whole_is_so_in_the_slices_of_before(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """A slice of the same place has its old name again."""
    another(driver)
    cut(driver, 1, "MIG-a")
    daemon = daemon_over(driver, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "ok", 200: "ok"}, "it is in slices")
        driver.gpu(1, mig=-1)
        reopen(daemon)
        until(lambda: gpus_by_index(client) == {0: "ok", 1: "ok"}, "it is whole")
        client.drain(1, "hot")
        cut(driver, 1, "MIG-a")
        reopen(daemon)
        until(lambda: 200 in gpus_by_index(client), "it is in slices again")
        assert gpus_by_index(client) == {0: "ok", 200: "drained"}


def test_a_host_whose_only_gpu_hangs_from_the_start_shows_it(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """And goes on without GPUs."""
    driver.add("hang nvmlDeviceGetHandleByIndex_v2 0")
    daemon = daemon_over(driver, *QUICK_TO_GIVE_UP, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "unread"}, "it is given up")
        assert "it hangs the driver" in daemon.run("gctl", "status").stdout
        job = client.submit(["true"], gpus=0, output="/dev/null")
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED


def test_a_gpu_that_cannot_be_opened_is_one_that_the_configuration_may_name(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """It is here, and why it takes no job is not that there is no such GPU."""
    another(driver)
    driver.add(f"error nvmlDeviceGetHandleByIndex_v2 1 {UNKNOWN}")
    daemon = daemon_over(driver, "--set", "gpus=[1]")
    with daemon.client() as client:
        assert gpus_by_index(client) == {1: "unread"}
    assert "no such GPU" not in daemon.run("gctl", "status").stdout
    assert "no such GPU" not in daemon.log.read_text()


def test_a_gpu_on_record_that_the_start_did_not_bring_is_shown_with_its_job(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """By its own name, with the job that holds it; another's index is not its any more."""
    another(driver)
    another(driver, 2)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        ids = [client.submit(["sleep", "60"], output="/dev/null").id for _ in range(2)]
        until(lambda: all(is_running(client, job_id) for job_id in ids), "they run on GPUs 0 and 1")
    daemon.kill()
    last = driver.gpus.pop(2)
    driver.gpus[1] = last
    driver.write()
    daemon.start()
    with daemon.client() as client:
        found = {gpu.uuid: gpu for gpu in client.gpus()}
        assert found[uuid_of(2)].index == 1
        missing = found[uuid_of(1)]
        assert (missing.index, missing.state, missing.jobs) == (None, "unread", (ids[1],))
        assert "GPU 1 (was) is unread" in daemon.run("gctl", "status").stdout
        assert daemon.run("gctl", "drain", "1", "--reason", "fan").returncode == 0
        assert {gpu.uuid: gpu.state for gpu in client.gpus()}[uuid_of(2)] == "drained"
        assert daemon.run("gctl", "drain", uuid_of(1), "--reason", "removed").returncode == 0
    driver.gpus = {0: driver.gpus[0], 1: {**last, "uuid": uuid_of(1)}, 2: last}
    driver.write()
    _kill_nvml_child(daemon)
    with daemon.client() as client:
        until(lambda: [gpu.index for gpu in client.gpus()] == [0, 1, 2], "all have their indices")


def test_a_job_on_a_gpu_that_cannot_be_opened_any_more_is_shown_there(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """The index that was left out is that of the GPU on record."""
    another(driver)
    daemon = daemon_over(driver)
    daemon.stop()
    driver.add(f"error nvmlDeviceGetHandleByIndex_v2 1 {UNKNOWN}")
    daemon.start()
    with daemon.client() as client:
        assert [(gpu.index, gpu.uuid) for gpu in client.gpus()] == [
            (0, uuid_of(0)),
            (1, uuid_of(1)),
        ]
        assert gpus_by_index(client) == {0: "ok", 1: "unread"}


def test_the_daemon_s_own_cuda_visible_devices_is_taken_as_gpus_and_said_once(
    driver: FakeDriver, daemon_over: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In user mode, where the configuration names none."""
    another(driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    daemon = daemon_over(driver)
    with daemon.client() as client:
        assert gpus_by_index(client) == {1: "ok"}
        job = client.submit(["true"], output="/dev/null")
        assert client.wait(job.id, timeout_s=30).gpu_indices == (1,)
    assert daemon.log.read_text().count("CUDA_VISIBLE_DEVICES is taken as gpus: 1") == 1
    (daemon.place / "config.toml").write_text("gpus = [0]\n")
    assert daemon.run("gctl", "reload").returncode == 0
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "ok"}, "the configuration's word wins")


def test_status_says_only_what_is_true_now(driver: FakeDriver, daemon_over: Start) -> None:
    """Neither what is harmless, nor what was put right."""
    driver.gpu(0, persistence=0)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        driver.set(init=DRIVER_NOT_LOADED)
        _kill_nvml_child(daemon)
        until(lambda: "modprobe nvidia" in daemon.run("gctl", "status").stdout, "it is told")
        driver.set(init=0)
        assert daemon.run("gctl", "gpus", "release").returncode == 0
        assert daemon.run("gctl", "gpus", "resume").returncode == 0
        until(lambda: gpus_by_index(client) == {0: "ok"}, "it is back")
    assert "persistence mode off" in daemon.log.read_text()
    status = daemon.run("gctl", "status")
    assert status.returncode == 0
    assert "All is well." in status.stdout
    assert "Last errors" not in status.stdout


QUICK_TO_GO = """
import sys
from gpuschedd.gpu import free_memory
free_memory.RELEASE_LAG_S = 1.0
sys.argv = sys.argv[3:]  # what was asked: python -m gpuschedd.main ..
from gpuschedd.cli import cli
cli()
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "hang nvmlEventSetWait_v2 *",
            "the driver's events hang or crash it (nvmlEventSetWait): no Xid is seen, GPUs are "
            "judged by their health checks alone",
        ),
        (
            "hang nvmlDeviceRegisterEvents 1",
            "GPU 1 hangs the driver (nvmlDeviceRegisterEvents): its Xids are not seen",
        ),
    ],
)
def test_status_says_that_the_driver_s_events_are_out_until_they_are_back(
    driver: FakeDriver, daemon_over: Start, line: str, words: str
) -> None:
    """Nobody would hear of a fault, while all GPUs take jobs."""
    another(driver)
    driver.add(line)
    daemon = daemon_over(driver, *QUICK_TO_GIVE_UP, wrapper=[sys.executable, "-c", QUICK_TO_LOOK])
    with daemon.client() as client:
        until(lambda: gpus_by_index(client) == {0: "ok", 1: "ok"}, "it goes on without")
        status = daemon.run("gctl", "status")
        assert status.returncode == 1
        assert words in status.stdout
        job = client.submit(["true"], gpus=2, output="/dev/null")
        assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
        assert words in daemon.run("gctl", "status").stdout
        driver.remove("hang")
        reopen(daemon)
        until(lambda: gpus_by_index(client) == {0: "ok", 1: "ok"}, "it is open again")
        status = daemon.run("gctl", "status")
        assert "All is well." in status.stdout, status.stdout


def test_a_gpu_that_is_slowed_down_by_heat_is_shown_as_that_and_takes_jobs(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """A warning is no state."""
    driver.gpu(0, throttle=0x40)
    daemon = daemon_over(driver, *QUICK)
    words = "it is slowed down (too hot, by hardware)"
    with daemon.client() as client:
        until(lambda: client.gpus()[0].reason == words, "it is told")
        assert words in daemon.run("gq", "--gpus").stdout
        job = client.submit(["true"], output="/dev/null")
        assert client.wait(job.id, timeout_s=30).gpu_indices == (0,)
        assert daemon.run("gctl", "status").returncode == 0
        driver.gpu(0, throttle=0)
        until(lambda: not client.gpus()[0].reason, "it is cool again")


QUADS, PAIRS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))


def dgx_1(driver: FakeDriver) -> None:
    """Eight GPUs, two full quads, and each GPU joined with its like in the other one."""
    for index in range(1, 8):
        another(driver, index)
    for index in range(8):
        peers = [peer for group in (*QUADS, *PAIRS) if index in group for peer in group]
        peers = [peer for peer in peers if peer != index]
        links = [f"{link} {peer}" for link, peer in enumerate(peers)]
        driver.gpu(index, links=len(links), link=links)
    for group in (*QUADS, *PAIRS):
        driver.add(*(f"p2p {one} {two} 0" for one in group for two in group if one < two))


def filled(client: Client, count: int) -> dict[int, int]:
    """So many jobs of one GPU each run: by their GPU."""
    ids = [client.submit(["sleep", "600"], output="/dev/null").id for _ in range(count)]
    until(lambda: all(is_running(client, job_id) for job_id in ids), "they run")
    return {index: job_id for job_id in ids for index in client.job(job_id).gpu_indices or ()}


def free(client: Client, *ids: int) -> None:
    """These jobs are over."""
    client.cancel(ids)
    for job_id in ids:
        client.wait(job_id, timeout_s=30)


def test_gpus_joined_across_two_quads_are_a_pair_and_others_of_them_are_not(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """As on a DGX-1: 0 and 4 have a link, 0 and 5 have none, and the reason says so."""
    dgx_1(driver)
    daemon = daemon_over(driver)
    with daemon.client() as client:
        job_at = filled(client, 8)
        free(client, job_at[0], job_at[5])
        pair = client.submit(["true"], gpus=2, topology="nvlink", output="/dev/null")
        until_reason(client, pair.id, "NVLink")
        client.cancel([pair.id])
        job_at |= filled(client, 2)
        free(client, job_at[0], job_at[4])
        pair = client.submit(["true"], gpus=2, topology="nvlink", output="/dev/null")
        assert client.wait(pair.id, timeout_s=30).gpu_indices == (0, 4)
        assert daemon.run("gsub", "-g", "5", "--topology", "nvlink", "true").returncode == 65


NO_LISTS = [
    f"error nvmlDeviceGet{kind}RunningProcesses_v3 * 3"
    for kind in ("Compute", "Graphics", "MPSCompute")
]


def test_what_was_there_before_jobs_is_known_again_after_a_restart_beside_one(
    driver: FakeDriver, daemon_over: Start
) -> None:
    """WSL2: no lists, and a desktop of 900 MiB; once its memory may be gone, whole jobs start."""
    driver.gpu(0, ownerless=900 * MIB)
    driver.add(*NO_LISTS)
    daemon = daemon_over(driver, wrapper=(sys.executable, "-c", QUICK_TO_GO))
    with daemon.client() as client:
        job = client.submit(["sleep", "600"], output="/dev/null")
        until(lambda: is_running(client, job.id), "it runs")
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client:
        client.cancel([job.id])
        client.wait(job.id, timeout_s=30)
        second = client.submit(["true"], output="/dev/null")
        assert client.wait(second.id, timeout_s=60).state is JobState.COMPLETED
