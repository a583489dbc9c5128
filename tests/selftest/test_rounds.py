"""The self-test over the stand-in drivers: each check where it holds, and where it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.selftest.conftest import Bench
from tests.support.daemon import BIN, until
from tests.support.fake_nvml.driver import GIB, UNKNOWN, uuid_of

Start = Callable[..., Bench]
SMALL = "MIG-5a110000-1111-4222-8333-000000000007"
LARGE = "MIG-1a59e000-1111-4222-8333-000000000005"


def live_jobs(bench: Bench) -> list[int]:
    assert bench.daemon is not None
    with bench.daemon.client() as client:
        return [job.job_id for job in client.jobs(states=["live"]).jobs]


def places() -> set[str]:
    """Directories that self-tests of this test have left; others run beside it."""
    return {name for name in os.listdir(os.environ["TMPDIR"]) if "gpuschedd-selftest" in name}


def programs(bench: Bench) -> list[int]:
    """Processes of this host's drivers that hold memory for a self-test."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if b"gpuschedd.selftest.hold" in words and str(bench.driver.place).encode() in environment:
            found.append(int(pid))
    return found


def test_on_a_host_as_it_should_be_nothing_fails_and_nothing_stays(bench: Start) -> None:
    here = bench()
    before = places()
    answer = here.selftest()
    assert answer.status == 0
    assert answer.result("inventory") == ("ok", "2 as nvidia-smi lists them")
    assert answer.results("own process") == ["ok", "ok"]
    assert answer.result("peak", 1) == ("ok", "1.3 GiB by the driver's accounts, 1 GiB allocated")
    assert answer.result("index and UUID", 1) == (
        "ok",
        f"CUDA_VISIBLE_DEVICES=1 is {uuid_of(1)} to CUDA as well",
    )
    assert answer.result("foreign process")[0] == "ok"
    assert answer.result("out of memory")[0] == "ok"
    assert answer.result("sandbox") == ("skipped", "user mode: the daemon is no unit")
    assert answer.result("MIG slices") == ("skipped", "no slices here")
    assert answer.value["driver"] == "570.86.10"
    assert answer.value["cuda"] == "12.8"
    assert answer.value["daemon"]["mode"] == "user"
    assert answer.value["result"] == "ok"
    assert (live_jobs(here), programs(here), places() - before) == ([], [], set())


def test_an_index_that_is_another_device_to_cuda_fails(bench: Start) -> None:
    """CUDA counts otherwise than NVML: the job lands on somebody's GPU."""
    here = bench()
    here.cuda("shifted")
    answer = here.selftest(is_patient=False)
    assert answer.status == 1
    result, reason = answer.result("index and UUID", 0)
    assert result == "failed"
    assert f"CUDA_VISIBLE_DEVICES=0 is {uuid_of(1).removeprefix('GPU-')} to CUDA" in reason
    assert uuid_of(0) in reason


def test_more_devices_than_were_granted_fail(bench: Start) -> None:
    here = bench()
    here.cuda("all")
    answer = here.selftest()
    assert answer.status == 1
    assert answer.results("index and UUID") == ["failed", "failed"]


def test_memory_that_shows_as_another_processs_fails_own_and_foreign(bench: Start) -> None:
    """As where the daemon cannot match the driver's pids."""
    here = bench()
    here.cuda("stranger")
    answer = here.selftest(is_patient=False)
    assert answer.status == 1
    reasons = [answer.result("own process", gpu) for gpu in (0, 1)]
    assert [result for result, _ in reasons] == ["failed", "failed"]
    assert any("counted as foreign" in reason for _, reason in reasons)
    result, reason = answer.result("foreign process")
    assert result == "failed"
    assert "held 256 MiB; the daemon says:" in reason


def test_accounts_that_differ_from_what_was_allocated_fail(bench: Start) -> None:
    here = bench()
    here.cuda("more")
    answer = here.selftest()
    assert (answer.status, answer.results("peak")) == (1, ["failed", "failed"])


def test_accounts_that_are_on_and_not_kept_fail(bench: Start) -> None:
    here = bench()
    here.driver.add(f"error nvmlDeviceGetAccountingStats * {UNKNOWN}")
    answer = here.selftest()
    assert answer.status == 1
    result, reason = answer.result("peak", 0)
    assert result == "failed"
    assert reason == "accounting is on, and the peak of job 1 is by sampled"


def test_accounts_that_are_off_are_said_to_be(bench: Start) -> None:
    here = bench()
    here.driver.gpu(0, accounting=0)
    here.list_gpus()
    answer = here.selftest()
    assert answer.status == 0
    result, reason = answer.result("peak", 0)
    assert result == "skipped"
    assert "gpusched-nvidia.service" in reason
    assert answer.result("peak", 1)[0] == "ok"


def test_a_card_that_gives_more_than_it_has_fails(bench: Start) -> None:
    """The job ends well: nobody would tell its OOM."""
    here = bench()
    here.cuda("boundless")
    answer = here.selftest()
    assert answer.status == 1
    result, reason = answer.result("out of memory")
    assert result == "failed"
    assert "is COMPLETED, exit 0" in reason
    assert "49 GiB" in reason


def test_a_gpu_on_which_no_context_can_be_made_fails(bench: Start) -> None:
    here = bench()
    here.cuda("broken")
    answer = here.selftest()
    assert answer.status == 1
    result, reason = answer.result("own process", 0)
    assert result == "failed"
    assert "cuCtxCreate_v2 failed with error 999" in reason
    assert answer.result("foreign process")[0] == "failed"
    assert answer.result("out of memory")[0] == "failed"


def test_without_cudas_driver_what_needs_it_is_skipped(bench: Start) -> None:
    here = bench()
    here.cuda("stub")
    answer = here.selftest()
    assert answer.status == 0
    for check in ("own process", "peak", "index and UUID"):
        assert answer.results(check) == ["skipped", "skipped"]
    assert answer.result("foreign process") == (
        "skipped",
        "no CUDA driver: libcuda.so.1 is the toolkit's stub",
    )
    assert answer.result("out of memory")[0] == "skipped"
    assert answer.result("inventory")[0] == "ok"


def test_an_inventory_that_differs_from_nvidia_smis_fails(bench: Start) -> None:
    here = bench()
    here.list_gpus(name="NVIDIA Other")
    answer = here.selftest()
    assert answer.status == 1
    result, reason = answer.result("inventory")
    assert result == "failed"
    assert f"name of {uuid_of(0)} is NVIDIA Fake 48G, to nvidia-smi NVIDIA Other" in reason


def test_a_gpu_that_was_left_out_on_purpose_is_no_failure(bench: Start) -> None:
    here = bench("--gpus", "1")
    answer = here.selftest()
    assert answer.status == 0
    reason = "1 as nvidia-smi lists them, 1 left out by the daemon's command line"
    assert answer.result("inventory") == ("ok", reason)
    assert answer.results("own process") == ["ok"]


def test_an_nvidia_smi_that_fails_is_a_failure_and_none_is_skipped(bench: Start) -> None:
    here = bench()
    here.smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    result, reason = here.selftest().result("inventory")
    assert (result, reason) == ("failed", "nvidia-smi ended with status 9: NVIDIA-SMI has failed")
    here.smi.unlink()
    answer = here.selftest()
    assert answer.status == 0
    assert answer.result("inventory") == ("skipped", "no nvidia-smi here")


def sliced(here: Bench) -> None:
    """The first GPU becomes two slices."""
    here.driver.gpu(0, mig=1)
    here.driver.add(
        f"mig 0 0 {SMALL} 7 0 {10 * GIB} NVIDIA Fake MIG 1g.10gb",
        f"mig 0 3 {LARGE} 5 0 {20 * GIB} NVIDIA Fake MIG 2g.20gb",
    )


def test_a_slice_is_what_cuda_sees_of_it(bench: Start) -> None:
    here = bench(prepare=sliced)
    answer = here.selftest()
    assert answer.status == 0
    assert answer.results("MIG slices") == ["ok", "ok"]
    assert answer.results("own process") == ["ok", "ok", "ok"]
    assert answer.results("peak").count("skipped") == 2
    assert answer.result("inventory")[0] == "ok"


def test_a_slice_that_is_another_to_cuda_or_to_nvidia_smi_fails(bench: Start) -> None:
    here = bench(prepare=sliced)
    here.cuda("shifted")
    assert set(here.selftest(is_patient=False).results("MIG slices")) == {"failed"}
    here.cuda()
    here.driver.remove("mig 0 3")
    here.list_gpus()
    sliced(here)
    answer = here.selftest()
    assert answer.status == 1
    assert answer.results("MIG slices").count("failed") >= 1
    assert LARGE in answer.result("inventory")[1]


def test_a_gpu_in_use_is_skipped_and_its_job_left_alone(bench: Start) -> None:
    here = bench()
    assert here.daemon is not None
    with here.daemon.client() as client:
        job = client.submit(["sleep", "300"], gpus=1)
        until(lambda: client.job(job.id).state == "RUNNING", "it runs")
        (busy,) = client.job(job.id).gpu_indices or ()
        answer = here.selftest()
        assert answer.status == 0
        assert answer.result("own process", busy) == ("skipped", f"in use: job {job.id}")
        assert answer.result("own process", 1 - busy)[0] == "ok"
        assert client.job(job.id).state == "RUNNING"


@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGINT, "own process"), (signal.SIGTERM, "foreign process")]
)
def test_a_signal_ends_what_was_started(bench: Start, number: signal.Signals, when: str) -> None:
    """Whatever runs just then: jobs, and the process beside the scheduler."""
    here = bench()
    assert here.daemon is not None
    # Nobody sees the memory: the self-test waits for it.
    here.driver.add("delay nvmlDeviceGetComputeRunningProcesses_v3 * 400")
    before = places()
    words = [str(BIN / "gpuschedd"), "selftest"]
    environment = {**os.environ, "GPUSCHED_SOCKET": str(here.daemon.socket)}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True) as test:
        assert test.stderr is not None
        heard = ""
        wanted = "jobs of" if when == "own process" else "a foreign process"
        while wanted not in heard:
            heard = test.stderr.readline()
            assert heard, "it ended"
        until(lambda: programs(here), "its program runs")
        test.send_signal(number)
        assert test.wait(60) == 128 + number
    assert live_jobs(here) == []
    until(lambda: not programs(here), "its programs are gone")
    assert places() == before


def test_the_foreign_process_is_no_jobs_where_the_self_test_is_one(bench: Start) -> None:
    here = bench()
    assert here.daemon is not None
    words = [sys.executable, "-m", "gpuschedd.cli", "selftest"]
    environment = {**os.environ, "GPUSCHED_SOCKET": str(here.daemon.socket)}
    with here.daemon.client() as client:
        output = here.place / "selftest.out"
        job = client.submit(words, gpus=0, environment=environment, output=output)
        assert client.wait(job.id, timeout_s=120).exit_code == 0, output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if "foreign process  " in line]
    assert "skipped  the self-test is a job itself" in line
