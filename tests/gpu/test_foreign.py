"""What memory of others does to jobs, through one daemon: each GPU is a situation of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched_client import Client
from gpusched_client.terms import JobState
from tests.gpu.test_monitor import claim, is_running, until_reason
from tests.support.daemon import DaemonProcess, clean_up, until
from tests.support.fake_nvml.driver import GIB, MIB, FakeDriver, uuid_of

HOST = ("NVIDIA GB10", "Managed", "Idles", "Nameless", "Large", "Twins", "Twins", "Leak", "Desktop")
INTEGRATED, MANAGED, IDLES, NAMELESS, LARGE, TWIN, OTHER_TWIN, LEAK, DESKTOP = range(len(HOST))
# As `python -m gpuschedd.main ..`, with a minute of patience less.
IMPATIENT = """
import sys
from gpuschedd.gpu import lasting
lasting.PERSON_AFTER_S = 0.2
sys.argv = sys.argv[3:]
from gpuschedd.cli import cli
cli()
"""


@pytest.fixture(scope="module")
def host(library: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """A GPU for each situation, told apart by its model."""
    made = FakeDriver(tmp_path_factory.mktemp("host") / "driver", library, gpus=len(HOST))
    for index, model in enumerate(HOST):
        made.gpu(index, name=model)
    made.gpu(INTEGRATED, ownerless=20 * GIB)
    made.gpu(IDLES, ownerless=450 * MIB)
    return made


@pytest.fixture(scope="module")
def daemon(host: FakeDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """The daemon of all tests here."""
    impatient = [sys.executable, "-c", IMPATIENT]
    started = DaemonProcess(
        tmp_path_factory.mktemp("daemon"), wrapper=impatient, environment=host.environment
    )
    started.options = ["--set", "scheduling.kill_grace=1.0"]
    try:
        yield started.start()
    finally:
        clean_up(started)


@pytest.fixture
def client(
    daemon: DaemonProcess, host: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """A client whose jobs find the driver."""
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    with daemon.client() as made:
        yield made


@pytest.fixture
def stranger() -> Iterator[int]:
    """The pid of a live process that is no job's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def reason_of(client: Client, index: int) -> str:
    """What is said of a GPU."""
    return next(gpu.reason or "" for gpu in client.gpus() if gpu.index == index)


def test_what_the_host_uses_of_memory_that_is_shared_with_it_is_no_stranger_s(
    client: Client, tmp_path: Path
) -> None:
    """20 GiB of a unified memory are in use: a whole job starts, and its peak is its own."""
    go = tmp_path / "go"
    words = claim("--vram", "1024", "--hold", "0", "--until", str(go))
    job = client.submit(words, gpu_model="GB10", output="/dev/null")
    until(lambda: client.job(job.id).vram_peak_bytes, "it is seen")
    go.touch()
    assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
    assert client.job(job.id).vram_peak_bytes == 1024 * MIB


def test_jobs_beside_memory_of_nobody_get_a_lower_bound_and_no_verdict(
    client: Client, host: FakeDriver, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Managed memory, which the driver counts for no process, of one of two jobs."""
    go = tmp_path / "go"
    words = claim("--vram", "1000", "--hold", "0", "--until", str(go))
    jobs = [
        client.submit(words, vram="9G", gpu_model="Managed", output="/dev/null") for _ in range(2)
    ]
    until(lambda: all(client.job(job.id).vram_peak_bytes for job in jobs), "both are seen")
    host.gpu(MANAGED, ownerless=8 * GIB)
    until(
        lambda: all("at least" in daemon.run("gq", str(job.id)).stdout for job in jobs),
        "their figures are known to be lower bounds",
    )
    go.touch()
    ended = [client.wait(job.id, timeout_s=30) for job in jobs]
    host.gpu(MANAGED, ownerless=0)
    assert [job.state for job in ended] == [JobState.COMPLETED] * 2
    assert [client.job(job.id).vram_verdict for job in jobs] == [None, None]


def test_a_job_that_waits_for_a_card_that_idles_high_is_told_the_setting(client: Client) -> None:
    """The key, its value, and the value that would be enough."""
    job = client.submit(["true"], gpu_model="Idles", output="/dev/null")
    text = until_reason(client, job.id, "sharing.idle_threshold is 200M", "whole jobs may start")
    assert '"464M"' in text
    client.cancel(job.id)


def test_memory_beside_a_process_of_unknown_size_is_not_the_ended_job_s(
    client: Client, host: FakeDriver, stranger: int
) -> None:
    """Six GiB stay when the job goes, and somebody is there who does not tell how much it has."""
    job = client.submit(
        claim("--vram", "1024", "--hold", "60"), vram="4G", gpu_model="Nameless", output="/dev/null"
    )
    until(lambda: client.job(job.id).vram_peak_bytes, "it is seen")
    host.process(NAMELESS, stranger, -1)
    host.gpu(NAMELESS, ownerless=6 * GIB)
    until(lambda: str(stranger) in reason_of(client, NAMELESS), "the process is seen")
    client.cancel(job.id)
    client.wait(job.id, timeout_s=30)
    until(lambda: "probably its" in reason_of(client, NAMELESS), "it is told whose it may be")
    assert f"job {job.id}" not in reason_of(client, NAMELESS)


def test_nobody_is_advised_to_start_jobs_beside_a_large_process(
    client: Client, host: FakeDriver, stranger: int
) -> None:
    """40 of 48 GiB: a job beside it would run out of memory."""
    host.process(LARGE, stranger, 40 * GIB)
    until(lambda: str(stranger) in reason_of(client, LARGE), "it is seen")
    job = client.submit(["true"], gpu_model="Large", output="/dev/null")
    text = until_reason(client, job.id, f"pid {stranger} of ", "with 40 GiB")
    assert "ignore_processes" not in text
    client.cancel(job.id)


def test_one_process_on_two_gpus_is_one_line_of_advice(
    client: Client, host: FakeDriver, stranger: int
) -> None:
    for index in (TWIN, OTHER_TWIN):
        host.process(index, stranger, 700 * MIB)
    until(lambda: str(stranger) in reason_of(client, TWIN), "it is seen")
    until(lambda: str(stranger) in reason_of(client, OTHER_TWIN), "there too")
    job = client.submit(["true"], gpus=2, gpu_model="Twins", output="/dev/null")
    text = until_reason(client, job.id, "sharing.ignore_processes")
    assert text.count("sharing.ignore_processes") == 1
    client.cancel(job.id)


@pytest.mark.usefixtures("client")
def test_memory_of_a_process_that_is_gone_is_a_problem_with_its_cure(
    host: FakeDriver, daemon: DaemonProcess
) -> None:
    """30 GiB that nobody will give back: status says so, and no more once they are."""
    with subprocess.Popen(["true"]) as process:
        pid = process.pid
    host.process(LEAK, pid, 30 * GIB)
    words = f"30 GiB on GPU {LEAK} are held by pid {pid}, which is gone"
    until(lambda: words in daemon.run("gctl", "status").stdout, "it is told")
    said = daemon.run("gctl", "status")
    assert said.returncode == 1
    assert f"nvidia-smi --gpu-reset -i {LEAK}" in said.stdout
    host.remove(f"proc {LEAK} ")
    until(lambda: words not in daemon.run("gctl", "status").stdout, "it is over")


def test_the_daemon_s_own_user_s_desktop_keeps_no_job_waiting(
    client: Client, host: FakeDriver, stranger: int
) -> None:
    """In user mode: 230 MiB of a program that only draws."""
    host.process(DESKTOP, stranger, 230 * MIB, "G")
    job = client.submit(["sleep", "60"], gpu_model="Desktop", output="/dev/null")
    until(lambda: is_running(client, job.id), "it starts beside it")
    assert client.job(job.id).gpu_uuids == (uuid_of(DESKTOP),)
    client.cancel(job.id)
