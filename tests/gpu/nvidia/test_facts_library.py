"""Library, versions and start-up: facts 1 to 15. The number of the fact ends each name."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched_client.terms import GpuUuid
from gpuschedd.gpu.nvidia.source import NvmlGpus
from gpuschedd.gpu.source import GpuSourceDown
from tests.support.fake_nvml.driver import (
    DRIVER_NOT_LOADED,
    GIB,
    LIB_RM_MISMATCH,
    MIB,
    FakeDriver,
    uuid_of,
)
from tests.support.gpus import Judge, Source

Open = Callable[..., Source]


def in_process(code: str) -> str:
    """Run Python with the driver, the child's modules at hand; what it prints."""
    head = """
    import pynvml, ctypes
    from gpuschedd.gpu.nvidia.library import Failed, Library
    from gpuschedd.gpu.nvidia.driver import Driver
    library = Library()
    driver = Driver(library)
    """
    program = textwrap.dedent(head) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_without_a_library_the_reason_names_simulate_1(
    gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the driver may be installed later."""
    source = gpus()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nonexistent")
    with pytest.raises(GpuSourceDown, match=r"libnvidia-ml\.so\.1.*--simulate 4x24G"):
        source.sample()
    monkeypatch.undo()


def test_a_module_loaded_later_is_found_without_a_restart_2(driver: FakeDriver, gpus: Open) -> None:
    """Driver not loaded at boot."""
    driver.set(init=DRIVER_NOT_LOADED)
    source = gpus()
    with pytest.raises(GpuSourceDown, match=r"kernel module is not loaded; `modprobe nvidia`"):
        source.sample()
    driver.set(init=0)
    assert len(source.sample().readings) == 1


def test_a_driver_upgraded_under_us_asks_for_a_reboot_3(driver: FakeDriver, gpus: Open) -> None:
    """Library and kernel module differ."""
    driver.set(init=LIB_RM_MISMATCH)
    with pytest.raises(GpuSourceDown, match="running jobs go on, new ones start after a reboot"):
        gpus().sample()


def test_an_old_driver_is_asked_by_its_own_names_4(
    driver: FakeDriver, old_library: Path, gpus: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No _v3, no MemoryInfo v2; the binding's mismatch error is no NVMLError."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(old_library.parent))
    driver.process(0, 1, 700 * MIB)
    reading = gpus().reading()
    assert reading.processes is not None
    assert [(p.pid, p.used_bytes) for p in reading.processes] == [(1, 700 * MIB)]
    said = in_process(
        """
        driver.open({"op": "open", "recount_every_s": 60.0})
        handle = library.call("nvmlDeviceGetHandleByIndex", 0)
        try:
            library.call("nvmlDeviceGetComputeRunningProcesses", handle)
        except Failed as failure:
            print(failure.code)
        """,
    )
    assert said == "13"


def test_rows_that_grew_under_the_same_name_are_not_believed_5(
    driver: FakeDriver, gpus: Open
) -> None:
    """32-byte rows under v3 give pids as bytes; v2 still tells the truth."""
    driver.set(wide_rows=1)
    driver.process(0, 1, 700 * MIB)
    driver.process(0, 2, 900 * MIB)
    processes = gpus().reading().processes
    assert processes is not None
    assert {p.pid: p.used_bytes for p in processes} == {1: 700 * MIB, 2: 900 * MIB}


def test_a_row_that_cannot_be_costs_itself_where_there_is_no_older_form_5(
    driver: FakeDriver, gpus: Open
) -> None:
    """A driver that has v3 only: its other rows are true."""
    driver.add("error nvmlDeviceGetComputeRunningProcesses_v2 * 13")
    driver.process(0, 1, 700 * MIB)
    driver.process(0, 2**23, 900 * MIB)
    processes = gpus().reading().processes
    assert processes is not None
    assert {p.pid: p.used_bytes for p in processes} == {1: 700 * MIB}


@pytest.mark.usefixtures("driver")
def test_another_module_called_pynvml_is_refused_by_name_6(
    gpus: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-ml-py3 and pynvml install the same module name."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pynvml.py").write_text("class NVMLError(Exception): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    with pytest.raises(GpuSourceDown, match=r"other/pynvml\.py is not the module of nvidia-ml-py"):
        gpus().sample()


def test_peer_status_is_asked_with_plain_numbers_7(driver: FakeDriver) -> None:
    """The binding's constant for READ is a tuple: its ctypes error is caught like any other."""
    driver.gpu(1, **{**driver.gpus[0], "uuid": "GPU-other", "pci": "00000000:20:00.0"})
    said = in_process(
        """
        driver.open({"op": "open", "recount_every_s": 60.0})
        one, two = (library.call("nvmlDeviceGetHandleByIndex", i) for i in (0, 1))
        print(library.ask("nvmlDeviceGetP2PStatus", one, two, 2))
        try:
            library.call("nvmlDeviceGetP2PStatus", one, two, pynvml.NVML_P2P_CAPS_INDEX_READ)
        except Failed as failure:
            print(failure.code, "ArgumentError" in failure.text or "TypeError" in failure.text)
        """,
    )
    assert said.split() in (["1", "-1", "True"], ["1"])


@pytest.mark.usefixtures("driver")
def test_a_count_that_cannot_be_is_no_count() -> None:
    """Nobody asks for four billion GPUs one by one."""
    said = in_process(
        """
        pynvml.nvmlDeviceGetCount = lambda: 4_000_000_000
        print(driver.open({"op": "open", "recount_every_s": 60.0})["down"])
        """,
    )
    assert "counts 4000000000 GPUs" in said


@pytest.mark.usefixtures("driver")
def test_another_count_of_the_driver_s_asks_for_a_new_child_22() -> None:
    """In a container there may be no /proc/driver/nvidia to count in."""
    said = in_process(
        """
        driver.open({"op": "open", "recount_every_s": 0.0})
        print(driver.sweep({})["new_child"])
        pynvml.nvmlDeviceGetCount = lambda: 2
        print(driver.sweep({})["new_child"])
        """,
    )
    assert said.splitlines() == ["None", "the driver counts 2 GPUs now; it counted 1"]


def test_a_slice_s_own_list_counts_where_its_parent_s_is_empty_47(driver: FakeDriver) -> None:
    """Some drivers list a slice's processes with the slice alone, and without its instance."""
    driver.gpu(0, mig=1)
    driver.add(f"mig 0 0 MIG-one 5 0 {20 * GIB} NVIDIA Fake MIG 2g.20gb")
    said = in_process(
        """
        from types import SimpleNamespace
        driver.open({"op": "open", "recount_every_s": 60.0})
        parent = ctypes.addressof(library.call("nvmlDeviceGetHandleByIndex", 0).contents)
        def listed(handle):
            row = SimpleNamespace(pid=1, usedGpuMemory=5, gpuInstanceId=2**32 - 1)
            return [] if ctypes.addressof(handle.contents) == parent else [row]
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3 = listed
        (reading,) = driver.sweep({"fresh": ["MIG-one"]})["readings"]
        print([(row[0], row[2]) for row in reading["processes"]])
        """,
    )
    assert said == "[(1, 5)]"


def test_words_that_are_no_text_leave_an_error_its_number_10(driver: FakeDriver) -> None:
    """A code that the binding does not know is put into words by the library."""
    driver.add("error nvmlDeviceGetUUID 0 77")
    said = in_process(
        """
        def words(code):
            return b"odd\\xff".decode()
        pynvml.nvmlErrorString = words
        print(driver.open({"op": "open", "recount_every_s": 60.0})["warnings"])
        """,
    )
    assert "error 77" in said


@pytest.mark.parametrize("answer", [[], ["error nvmlDeviceGetProcessUtilization 0 6"]])
def test_no_utilization_samples_is_no_error_8(
    driver: FakeDriver, gpus: Open, answer: list[str]
) -> None:
    """Neither as "Success" nor as "Not Found"."""
    driver.add(*answer)
    source = gpus()
    uuid = source.info().uuid
    sample = source.sample(busy_uuids=frozenset({uuid}))
    assert sample.readings[0].fault is None
    assert sample.readings[0].process_utilization == {}


@pytest.mark.usefixtures("driver")
def test_whether_a_handle_is_a_slice_is_a_ctypes_object_9() -> None:
    """We never ask: slices are known by how they were opened. The trap is still there."""
    said = in_process(
        """
        driver.open({"op": "open", "recount_every_s": 60.0})
        handle = library.call("nvmlDeviceGetHandleByIndex", 0)
        answer = library.call("nvmlDeviceIsMigDeviceHandle", handle)
        print(answer == 0, answer.value)
        """,
    )
    assert said == "False 0"
    source = Path(sys.modules["gpuschedd.gpu.nvidia.child"].__file__ or "").with_name("driver.py")
    assert "IsMigDeviceHandle" not in source.read_text()


def test_a_garbage_name_costs_the_name_only_10(driver: FakeDriver, gpus: Open) -> None:
    """UnicodeDecodeError is no NVMLError either."""
    driver.gpu(0, name=b"\xff\xfe\xfd".decode("utf-8", "surrogateescape"))
    info = gpus().info()
    assert (info.model, info.total_bytes) == ("unknown", 48 * 2**30)


def test_a_call_that_ends_the_process_ends_the_child_and_can_be_skipped_11(
    driver: FakeDriver, gpus: Open
) -> None:
    """Other vendors' libraries do; the configuration names the call."""
    driver.add("exit nvmlDeviceGetUtilizationRates * 3")
    with pytest.raises(GpuSourceDown, match="status 3 in nvmlDeviceGetUtilizationRates on GPU 0"):
        gpus().sample()
    reading = gpus(skip_calls=("nvmlDeviceGetUtilizationRates",)).reading()
    assert reading.used_bytes == 0
    assert reading.utilization is None


def test_persistence_mode_off_is_warned_about_and_init_is_done_once_12(
    driver: FakeDriver, gpus: Open
) -> None:
    """Each start of the driver costs seconds then."""
    driver.gpu(0, persistence=0)
    source = gpus()
    assert any("persistence mode off" in text for text in source.sample().warnings)
    child = source.source._child.process.pid
    source.sample()
    assert source.source._child.process.pid == child


@pytest.mark.usefixtures("driver")
def test_an_unbalanced_init_is_undone_before_ours_13() -> None:
    """Else a later init would be a no-op with the old list of GPUs."""
    said = in_process(
        """
        for _ in range(3):
            library.call("nvmlInit")
        driver.open({"op": "open", "recount_every_s": 60.0})
        library.call("nvmlShutdown")
        try:
            library.call("nvmlShutdown")
        except Failed as failure:
            print(failure.code)
        """,
    )
    assert said == "1"


def test_an_init_that_hangs_is_ended_by_its_deadline_14(driver: FakeDriver, gpus: Open) -> None:
    """A driver bug of its own; the next try may work."""
    driver.add("hang nvmlInitWithFlags *")
    source = gpus(open_deadline_s=5.0)
    with pytest.raises(GpuSourceDown, match=r"did not answer within 5 s in nvmlInit"):
        source.sample()
    driver.remove("hang")
    wait_for_backoff(source)
    assert len(source.sample().readings) == 1


def wait_for_backoff(source: Source) -> None:
    """The pause before the next try is over."""
    nvml: NvmlGpus = source.source
    nvml._not_before_s = 0.0


@pytest.mark.usefixtures("driver")
def test_one_thread_calls_the_driver_and_shuts_it_down_15(gpus: Open) -> None:
    """Events are taken by the sweep itself; no destructor runs beside a call."""
    source = gpus()
    source.sample()
    process = source.source._child.process
    tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
    assert len(tasks) == 1
    source.run(source.source.release())
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    "garbage", [{"total": 0}, {"total": 2**63}, {"reserved": 100 * GIB}, {"ownerless": 100 * GIB}]
)
def test_memory_that_cannot_be_is_no_memory(
    driver: FakeDriver, gpus: Open, judge: Judge, garbage: dict[str, int]
) -> None:
    """More in use than there is, none at all, or exabytes: the GPU is unread until it makes sense.

    Also where it was so when the driver was opened.
    """
    good = dict(driver.gpus[0])
    driver.gpu(0, **garbage)
    source = gpus()
    bad = judge.gpu(source.sample())
    assert (bad.state, bad.total_bytes) == ("unread", 0)
    assert "which cannot be" in bad.state_text
    driver.gpus[0] = good
    driver.write()
    source.sample()  # this one finds out that the driver must be opened again
    fine = judge.gpu(source.sample())
    assert (fine.state, fine.total_bytes) == ("ok", 48 * GIB)


def test_a_uuid_names_one_gpu(driver: FakeDriver, gpus: Open) -> None:
    """A second GPU of the same name, or one without, is left out and said."""
    for index, uuid in ((1, uuid_of(0)), (2, "")):
        driver.gpu(index, **{**driver.gpus[0], "uuid": uuid, "minor": index})
    sample = gpus().sample()
    assert [info.index for info in sample.inventory] == [0]
    texts = [text.split(":")[0] for text in sample.warnings]
    assert texts[:2] == [
        "GPU 1 is left out, its UUID is not a name of its own",
        "GPU 2 is left out, its UUID is not a name of its own",
    ]
    assert [info.index for info, _ in sample.unopened] == [1, 2]


def test_shares_and_watts_that_cannot_be_are_none(driver: FakeDriver, gpus: Open) -> None:
    """None, not 4000 %."""
    driver.gpu(0, util=4000, power_mw=2**32 - 1)
    reading = gpus().reading(busy_uuids=frozenset({GpuUuid(uuid_of(0))}))
    assert (reading.utilization, reading.power_w) == (None, None)
