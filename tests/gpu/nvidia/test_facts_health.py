"""Health: facts 52 to 58. The number of the fact ends each name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuschedd.config.keys import Nvml
from gpuschedd.core.model import GpuState
from gpuschedd.gpu.health import HealthBook
from gpuschedd.gpu.source import GpuSourceDown
from gpuschedd.store.records import Remembered
from tests.gpu.nvidia.test_facts_library import wait_for_backoff
from tests.support.fake_nvml.driver import UNKNOWN, XID, FakeDriver, uuid_of
from tests.support.gpus import Judge, Source

Open = Callable[..., Source]
UUID = uuid_of(0)
RECOVERY, ECC, PENDING, FAILED = 230, 4, 144, 145


def fields(driver: FakeDriver, **values: int) -> None:
    """What the driver says in its field values."""
    ids = {"recovery": RECOVERY, "ecc": ECC, "pending": PENDING, "failed": FAILED}
    said = {"recovery": 0, "ecc": 0, "pending": 0, "failed": 0} | values
    driver.gpu(0, field=[f"{ids[name]} {value}" for name, value in said.items()])


@pytest.mark.parametrize(("xid", "sick"), [(79, True), (48, True), (109, True), (31, False)])
def test_an_xid_quarantines_or_is_the_jobs_own_52(
    driver: FakeDriver, gpus: Open, judge: Judge, xid: int, sick: bool
) -> None:
    """By the table of the configuration."""
    source = gpus()
    source.sample()
    driver.event(0, XID, xid)
    sample = source.sample()
    assert [(event.kind, event.number) for event in sample.events] == [("fault", xid)]
    gpu = judge.gpu(sample)
    assert gpu.state is (GpuState.SICK if sick else GpuState.OK)
    assert (f"Xid {xid}" in gpu.state_text) is sick


def test_each_xid_of_the_facts_is_in_its_class_52() -> None:
    """The catalog's verdicts, not the device plugin's."""
    quarantine, reboot = set(Nvml().quarantine_xids), set(Nvml().reboot_xids)
    assert quarantine >= {46, 48, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158}
    assert reboot == {79}
    for own_fault in (13, 31, 32, 43, 45, 68, 69, 80, 94, 137, 63, 92, 93, 121, 154, 157, 155):
        assert own_fault not in quarantine | reboot


def test_a_recovery_action_is_the_verdict_53(driver: FakeDriver, gpus: Open, judge: Judge) -> None:
    """Whatever else looks healthy."""
    fields(driver, recovery=1)
    source = gpus()
    gpu = judge.gpu(source.sample(health=True))
    assert (gpu.state, gpu.state_text) == (GpuState.SICK, "the driver asks for a reset of the GPU")


def test_a_pending_remap_is_a_badge_and_a_failed_one_quarantines_54(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """New uncorrectable errors count as Xid 48."""
    fields(driver, pending=1)
    source = gpus()
    badge = judge.health
    gpu = judge.gpu(source.sample(health=True))
    assert gpu.state is GpuState.OK
    assert badge.warning(UUID) == "a row remap is pending: reset it when convenient"
    fields(driver, pending=0, failed=1)
    assert "should be replaced" in judge.gpu(source.sample(health=True)).state_text
    other = Judge()
    fields(driver, ecc=2)
    assert "Xid 48" in other.gpu(source.sample(health=True)).state_text


def test_remaps_and_ecc_are_asked_by_older_calls_where_fields_are_not_there_54(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """No field values at all."""
    driver.gpu(0, remap="1 0 0 1", ecc=0)
    driver.add("error nvmlDeviceGetFieldValues 0 3")
    assert "remap failed" in judge.gpu(gpus().sample(health=True)).state_text


@pytest.mark.parametrize(
    ("bits", "words"), [(0x40, "it is slowed down (too hot, by hardware)"), (0x4, ""), (0x1, "")]
)
def test_a_gpu_that_is_slowed_down_by_heat_says_so_and_stays_in_service(
    driver: FakeDriver, gpus: Open, judge: Judge, bits: int, words: str
) -> None:
    """A cap of power that somebody set, and idle clocks, are as they are."""
    driver.gpu(0, throttle=bits)
    sample = gpus().sample(health=True)
    judge.facts(sample)
    assert (judge.health.warning(UUID) or "") == words
    assert judge.gpu(sample).state is GpuState.OK


def test_a_gpu_without_events_is_not_sick_55(driver: FakeDriver, gpus: Open, judge: Judge) -> None:
    """It refuses the registration."""
    driver.gpu(0, events=0)
    assert judge.gpu(gpus().sample(health=True)).state is GpuState.OK


def test_an_unknown_error_of_the_event_set_has_every_gpu_checked_55(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """All are suspect; none is sick for that. Events from before the registration are lost."""
    fields(driver)
    driver.event(0, XID, 79)
    source = gpus()
    assert judge.gpu(source.sample()).state is GpuState.OK
    driver.add(f"error nvmlEventSetWait_v2 * {UNKNOWN} 1")
    sample = source.sample()
    assert [event.kind for event in sample.events] == ["suspect"]
    assert sample.readings[0].checks is not None
    assert judge.gpu(sample).state is GpuState.OK


def test_a_gpu_that_hangs_twice_is_left_out_and_the_others_go_on_56(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """The call names its GPU; the child is replaced."""
    driver.gpu(1, **{**driver.gpus[0], "uuid": uuid_of(1), "pci": "00000000:11:00.0"})
    source = gpus(sweep_deadline_s=2.0)
    source.sample()
    driver.add("hang nvmlDeviceGetMemoryInfo_v2 1")
    for _ in range(2):
        with pytest.raises(GpuSourceDown, match="in nvmlDeviceGetMemoryInfo on GPU 1"):
            source.sample()
        wait_for_backoff(source)
    sample = source.sample()
    assert judge.gpu(sample, 0).state is GpuState.OK
    silent = judge.gpu(sample, 1)
    assert silent.state is GpuState.UNREAD
    assert "it hangs the driver (nvmlDeviceGetMemoryInfo)" in silent.state_text


def hung(driver: FakeDriver, gpus: Open, index: int) -> Source:
    """A source that leaves the GPU out after two hangs, with a child that has not opened it."""
    for each in (1, 2):
        pci = f"00000000:{0x10 + each:02X}:00.0"
        driver.gpu(each, **{**driver.gpus[0], "uuid": uuid_of(each), "pci": pci})
    source = gpus(sweep_deadline_s=1.0)
    source.sample()
    driver.add(f"hang nvmlDeviceGetMemoryInfo_v2 {index}")
    for _ in range(2):
        with pytest.raises(GpuSourceDown):
            source.sample()
        wait_for_backoff(source)
    source.sample()
    driver.remove("hang")
    return source


def test_a_gpu_that_was_left_out_is_asked_again_in_time_57(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """The child that went on without it has never opened it: that takes a new one."""
    source = hung(driver, gpus, 1)
    assert judge.gpu(source.sample(), 1).state is GpuState.UNREAD
    source.source._breakers._breakers[1].open_until_s = 0.0
    sample = source.sample()
    assert [judge.gpu(sample, index).state for index in (0, 1, 2)] == [GpuState.OK] * 3


def test_a_gpu_that_was_reset_by_hand_is_asked_at_once_57(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """`gctl gpus release`, a reset, `gctl gpus resume`: its time need not be over."""
    source = hung(driver, gpus, 1)
    source.run(source.source.release())
    assert judge.gpu(source.sample(), 1).state is GpuState.OK


def test_a_gpu_that_got_another_s_number_is_not_left_out_in_its_place_56(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """After a loss the driver counts anew: what was known of a number is nobody's then."""
    source = hung(driver, gpus, 2)
    driver.gpu(0, uuid=uuid_of(2))
    driver.gpu(2, uuid=uuid_of(0))
    source.run(source.source._end_child())
    with pytest.raises(GpuSourceDown, match="has renumbered its GPUs"):
        source.sample()
    sample = source.sample()
    assert {gpu.index: gpu.uuid for gpu in sample.inventory} == {
        0: uuid_of(2),
        1: uuid_of(1),
        2: uuid_of(0),
    }
    assert [judge.gpu(sample, index).state for index in (0, 1, 2)] == [GpuState.OK] * 3


def test_a_gpu_that_hangs_from_the_start_costs_itself_only_56(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Nobody knows its name yet; its number is enough to go on without it."""
    driver.gpu(1, **{**driver.gpus[0], "uuid": uuid_of(1), "pci": "00000000:11:00.0"})
    driver.add("hang nvmlDeviceGetUUID 1")
    source = gpus(sweep_deadline_s=1.0, open_deadline_s=4.0)
    for _ in range(2):
        with pytest.raises(GpuSourceDown, match="nvmlDeviceGetUUID on GPU 1"):
            source.sample()
        wait_for_backoff(source)
    sample = source.sample()
    assert [gpu.index for gpu in sample.inventory] == [0]
    assert judge.gpu(sample).state is GpuState.OK
    assert "GPU 1 is left out, it hangs the driver at the start" in sample.warnings
    assert [(info.index, reading.reason) for info, reading in sample.unopened] == [
        (1, "it hangs the driver (nvmlDeviceGetUUID) and is not asked for now")
    ]
    driver.remove("hang")
    source.source._breakers._breakers[1].open_until_s = 0.0
    again = source.sample()
    assert ([gpu.index for gpu in again.inventory], again.unopened) == ([0, 1], ())


def test_a_crash_costs_the_child_only_56(driver: FakeDriver, gpus: Open) -> None:
    """SIGSEGV in the library."""
    source = gpus()
    source.sample()
    driver.add("crash nvmlDeviceGetMemoryInfo_v2 * 0 1")
    with pytest.raises(GpuSourceDown, match="ended by SIGSEGV in nvmlDeviceGetMemoryInfo"):
        source.sample()
    driver.remove("crash")
    wait_for_backoff(source)
    assert source.sample().readings[0].used_bytes == 0


def test_a_sick_gpu_recovers_by_itself_or_by_hand_57(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Three good checks with no action due; an admin's word at once, and it stands."""
    fields(driver, recovery=1)
    source = gpus()
    assert judge.gpu(source.sample(health=True)).state is GpuState.SICK
    fields(driver, recovery=0)
    states = [judge.gpu(source.sample(health=True)).state for _ in range(3)]
    assert states == [GpuState.SICK, GpuState.SICK, GpuState.OK]
    fields(driver, recovery=4)
    assert judge.gpu(source.sample(health=True)).state is GpuState.SICK
    judge.health.acknowledge(UUID)
    assert judge.gpu(source.sample(health=True)).state is GpuState.OK


def test_what_was_overruled_or_counted_is_known_to_the_next_daemon_57(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    fields(driver, recovery=4, ecc=2)
    source = gpus()
    judge.gpu(source.sample(health=True))
    judge.health.acknowledge(UUID)
    remembered = judge.health.remembered()
    assert remembered == {UUID: Remembered(("action", "remap"), 2)}
    after = HealthBook(judge.health.rules, remembered=remembered)
    assert after.take(source.sample(health=True)) == []
    fields(driver, recovery=4, ecc=3)
    (change,) = after.take(source.sample(health=True))
    assert "Xid 48" in str(change.illness)


def test_an_xid_79_stays_until_a_reboot_57(driver: FakeDriver, gpus: Open, judge: Judge) -> None:
    """However healthy the driver calls it."""
    fields(driver)
    source = gpus()
    source.sample()
    driver.event(0, XID, 79)
    assert judge.gpu(source.sample()).state is GpuState.SICK
    assert [judge.gpu(source.sample(health=True)).state for _ in range(5)] == [GpuState.SICK] * 5


def test_a_driver_that_tells_no_action_leaves_recovery_to_people_57(
    driver: FakeDriver, gpus: Open, judge: Judge
) -> None:
    """Unknown is not none."""
    source = gpus()
    source.sample()
    driver.event(0, XID, 95)
    judge.gpu(source.sample())
    assert [judge.gpu(source.sample(health=True)).state for _ in range(5)] == [GpuState.SICK] * 5


@pytest.mark.parametrize(
    ("mode", "state", "shareable"), [(3, GpuState.OK, False), (2, GpuState.UNREAD, True)]
)
def test_compute_modes_close_a_gpu_to_sharing_or_to_all_58(
    driver: FakeDriver, gpus: Open, judge: Judge, mode: int, state: GpuState, shareable: bool
) -> None:
    """At the start, and when an admin changes it later."""
    source = gpus()
    assert judge.gpu(source.sample()).shareable
    driver.gpu(0, compute_mode=mode)
    later = judge.gpu(source.sample(health=True))
    assert (later.state, later.shareable) == (state, shareable)
    assert "compute mode" in later.state_text
    first = Judge().gpu(gpus().sample())
    assert (first.state, first.shareable) == (state, shareable)
