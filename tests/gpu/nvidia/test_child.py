"""The child process: deadlines, crashes, a kernel that does not let go, and nothing that leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuschedd.gpu.nvidia.child import PROCESS_NAME
from gpuschedd.gpu.nvidia.child_process import hanging_orphan
from gpuschedd.gpu.nvidia.source import NvmlGpus
from gpuschedd.gpu.source import GpuSourceDown, SampleRequest
from tests.gpu.nvidia.test_facts_library import wait_for_backoff
from tests.gpu.test_monitor import another
from tests.support.daemon import until
from tests.support.fake_nvml.driver import GIB, FakeDriver
from tests.support.gpus import Source, leaks

Open = Callable[..., Source]
FREEZER = Path("/sys/fs/cgroup/freezer")


def test_a_slow_driver_passes_its_deadline_and_is_replaced(driver: FakeDriver, gpus: Open) -> None:
    """The next child answers; the pause between tries doubles up to a minute."""
    source = gpus(sweep_deadline_s=2.0)
    source.sample()
    first = source.source._child.process
    driver.add("delay nvmlDeviceGetMemoryInfo_v2 0 60000")
    with pytest.raises(GpuSourceDown, match="within 2 s in nvmlDeviceGetMemoryInfo on GPU 0"):
        source.sample()
    assert first.poll() == -signal.SIGKILL
    source.source._not_before_s += 3600.0
    with pytest.raises(GpuSourceDown):
        source.sample()  # within the pause: no child is started
    assert source.source._child is None
    driver.remove("delay")
    wait_for_backoff(source)
    assert source.sample().readings[0].fault is None


def test_a_driver_that_is_slow_on_every_gpu_is_waited_for(driver: FakeDriver, gpus: Open) -> None:
    """No GPU takes longer than it may, so none is to blame that all together do."""
    for index in (1, 2, 3):
        another(driver, index)
    source = gpus(sweep_deadline_s=4.0)
    source.sample()
    driver.add("delay nvmlDeviceGetMemoryInfo_v2 * 1100")
    assert [reading.fault for reading in source.sample().readings] == [None] * 4


def test_a_gpu_whose_every_call_is_slow_is_to_blame(driver: FakeDriver, gpus: Open) -> None:
    """None of its calls takes as long as the deadline, and together they hold up the others.

    A health check makes so many that it lasts several deadlines: a host that is busy, and looks a
    second too late, finds it at it still.
    """
    another(driver)
    source = gpus(sweep_deadline_s=2.0)
    source.sample()
    driver.add("delay * 1 1100")
    with pytest.raises(GpuSourceDown, match=r"within 2 s in nvml\w+ on GPU 1"):
        source.sample(health=True)


def test_a_child_that_does_not_die_is_never_joined_by_a_second(
    driver: FakeDriver, gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the kernel is enough; status says since when."""
    source = gpus(sweep_deadline_s=2.0)
    nvml: NvmlGpus = source.source
    source.sample()
    driver.add("hang nvmlDeviceGetMemoryInfo_v2 *")
    child = nvml._child
    assert child is not None
    monkeypatch.setattr("gpuschedd.gpu.nvidia.source.DEATH_S", 0.05)
    monkeypatch.setattr(child, "kill", lambda: None)
    with pytest.raises(GpuSourceDown):
        source.sample()
    driver.remove("hang")
    for _ in range(3):
        wait_for_backoff(source)
        with pytest.raises(GpuSourceDown, match=f"process {child.process.pid} cannot be ended"):
            source.sample()
        assert nvml._child is None
    child.process.kill()
    child.process.wait()
    wait_for_backoff(source)
    assert len(source.sample().readings) == 1


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """In D state, where KILL does not reach it: the freezer of cgroup v1."""
    place = FREEZER / f"gpuschedd-test-{os.getpid()}"
    place.mkdir()
    try:
        (place / "tasks").write_text(str(pid))
        (place / "freezer.state").write_text("FROZEN")
        state = place / "freezer.state"
        until(lambda: state.read_text().strip() == "FROZEN", "it is frozen")
        yield
    finally:
        (place / "freezer.state").write_text("THAWED")
        until(lambda: not (place / "tasks").read_text(), "it is gone")
        place.rmdir()


@pytest.mark.root
@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="needs the freezer of cgroup v1")
@pytest.mark.usefixtures("driver")
def test_a_child_in_d_state_is_survived_and_replaced_when_it_dies(gpus: Open) -> None:
    """A real one: KILL is pending and does nothing."""
    source = gpus(sweep_deadline_s=2.0)
    source.sample()
    pid = source.source._child.process.pid
    with frozen(pid):
        with pytest.raises(GpuSourceDown):
            source.sample()
        wait_for_backoff(source)
        with pytest.raises(GpuSourceDown, match="cannot be ended; only a reboot may help"):
            source.sample()
    undead = source.source._unkillable.process
    until(lambda: undead.poll() is not None, "it dies of it once it may")
    wait_for_backoff(source)
    assert len(source.sample().readings) == 1


def test_a_hanging_child_of_an_earlier_daemon_is_found(tmp_path: Path) -> None:
    """In D, nobody's child: a second one would hang beside it."""
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    for pid, name, state, parent in (
        (10, PROCESS_NAME.decode(), "S", 1),
        (11, "other", "D", 1),
        (12, PROCESS_NAME.decode(), "D", 4242),
    ):
        _process(tmp_path, pid, name, [state, str(parent), *stat[2:]])
    assert hanging_orphan(tmp_path) is None
    _process(tmp_path, 13, PROCESS_NAME.decode(), ["D", "1", *stat[2:]])
    assert hanging_orphan(tmp_path) == 13


def _process(proc: Path, pid: int, name: str, fields: list[str]) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "comm").write_text(f"{name}\n")
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_the_child_inherits_no_descriptor_and_dies_with_its_parent(
    driver: FakeDriver, tmp_path: Path
) -> None:
    """Neither the daemon's lock nor its sockets."""
    program = f"""
import asyncio, os, sys
from gpuschedd.gpu.source import SampleRequest
from gpuschedd.gpu.nvidia.source import NvmlGpus
lock = os.open({str(tmp_path / "lock")!r}, os.O_CREAT | os.O_RDWR)
os.set_inheritable(lock, True)
async def main():
    gpus = NvmlGpus()
    await gpus.sample(SampleRequest())
    print(gpus._child.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        names = {os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()}
        assert str(tmp_path / "lock") not in names
        assert not any(name.startswith("socket:") for name in names)
        parent.kill()
    until(lambda: not os.path.exists(f"/proc/{child}") or _state(child) == "Z", "it is gone too")
    assert driver.calls() > 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


async def call_off(source: Source, driver: FakeDriver) -> None:
    """Begin a sweep, and cancel it in the driver."""
    before = driver.calls()
    asking = asyncio.ensure_future(source.source.sample(SampleRequest()))
    while driver.calls() == before:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait({asking})


def test_a_sweep_that_is_called_off_blames_no_gpu(driver: FakeDriver, gpus: Open) -> None:
    """Its child is ended, for the answer is not the next one's; the next sweep has a new child."""
    another(driver)
    source = gpus()
    source.sample()
    driver.add("hang nvmlDeviceGetMemoryInfo_v2 0")
    for _ in range(3):
        driver.remove("hang")
        source.sample()
        driver.add("hang nvmlDeviceGetMemoryInfo_v2 0")
        source.run(call_off(source, driver))
    driver.remove("hang")
    assert [reading.fault for reading in source.sample().readings] == [None, None]


def test_a_child_that_takes_its_time_to_die_is_no_hanging_driver(
    driver: FakeDriver, gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host a KILL takes effect when its process has had a turn."""
    monkeypatch.setattr("gpuschedd.gpu.nvidia.source.DEATH_S", 60.0)
    source = gpus()
    source.sample()
    driver.add("hang nvmlDeviceGetMemoryInfo_v2 0")
    child = source.source._child
    kill = child.kill
    monkeypatch.setattr(child, "kill", lambda: threading.Timer(0.5, kill).start())
    source.run(call_off(source, driver))
    driver.remove("hang")
    assert [reading.fault for reading in source.sample().readings] == [None]


def test_what_a_library_prints_is_no_reply(driver: FakeDriver, gpus: Open) -> None:
    """stdout of the child goes to stderr; the pipe carries frames only."""
    source = gpus()
    source.sample()
    child = source.source._child.process.pid
    assert os.readlink(f"/proc/{child}/fd/1") == os.readlink(f"/proc/{child}/fd/2")
    assert driver.calls() > 0


def test_twenty_thousand_sweeps_leak_nothing(driver: FakeDriver, gpus: Open, is_soak: bool) -> None:
    """2,000 outside soak: descriptors and memory of both processes stay as they are."""
    rounds = 20_000 if is_soak else 2_000
    print(f"{rounds} sweeps of 20000")
    driver.process(0, os.getpid(), GIB)
    source = gpus()
    uuid = source.info().uuid
    want = SampleRequest(busy_uuids=frozenset({uuid}), health=True)

    async def sweeps(count: int) -> None:
        for _ in range(count):
            await source.source.sample(want)

    source.run(sweeps(500))
    child = source.source._child.process.pid
    before = leaks(child), leaks(os.getpid())
    source.run(sweeps(rounds))
    after = leaks(child), leaks(os.getpid())
    for (fds_before, bytes_before), (fds_after, bytes_after) in zip(before, after, strict=True):
        assert fds_after == fds_before
        assert bytes_after - bytes_before < 2 * 2**20
    assert source.source._child.process.pid == child
