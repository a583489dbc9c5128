"""Headroom by numbers: promised against seen, without a driver."""

from __future__ import annotations

from gpusched_client.terms import GpuUuid
from gpuschedd.gpu.metering import UseMeter
from gpuschedd.gpu.source import GpuInfo, GpuProcess, GpuReading, Sample
from gpuschedd.system.clock import boottime_s
from tests.support.gpus import GIB, MIB, Judge, headroom, held, key

UUID = GpuUuid("GPU-1")
CARD = GpuInfo(uuid=UUID, index=0, minor=0, model="m", total_bytes=48 * GIB)


def sample(
    used: int,
    *processes: tuple[int, int | None],
    listed_used: int | None = None,
    taken_s: float = 1.0,
    listed: bool = True,
) -> Sample:
    """One GPU with (pid, bytes) on it."""
    rows = tuple(GpuProcess(pid, 1, size) for pid, size in processes)
    reading = GpuReading(
        UUID,
        used,
        48 * GIB - used,
        processes=rows if listed else None,
        listed_used_bytes=(used if listed_used is None else listed_used) if listed else None,
    )
    return Sample(taken_s, (CARD,), (reading,))


def test_a_job_that_has_not_allocated_yet_holds_what_it_declared(judge: Judge) -> None:
    """The larger of promised and seen."""
    gpu = judge.gpu(sample(0), holdings={UUID: [held(1, 10 * GIB)]})
    assert headroom(gpu, 10 * GIB) == 38 * GIB


def test_use_within_the_promise_is_not_counted_twice(judge: Judge) -> None:
    """8 of 10 GiB."""
    judge.owners[7] = key(1)
    gpu = judge.gpu(sample(8 * GIB, (7, 8 * GIB)), holdings={UUID: [held(1, 10 * GIB)]})
    assert (gpu.foreign_bytes, headroom(gpu, 10 * GIB)) == (0, 38 * GIB)


def test_use_above_the_promise_is_in_use(judge: Judge) -> None:
    """12 GiB where 10 are held: until more is held, the rest is nobody's to give."""
    judge.owners[7] = key(1)
    gpu = judge.gpu(sample(12 * GIB, (7, 12 * GIB)), holdings={UUID: [held(1, 10 * GIB)]})
    assert headroom(gpu, 10 * GIB) == 36 * GIB


def test_growth_since_the_list_is_our_jobs_as_far_as_they_hold_more(judge: Judge) -> None:
    """Memory is looked at more often than processes are."""
    judge.owners[7] = key(1)
    holdings = {UUID: [held(1, 10 * GIB)]}
    grown = judge.gpu(sample(9 * GIB, (7, 1 * GIB), listed_used=GIB), holdings=holdings)
    assert (grown.foreign_bytes, headroom(grown, 10 * GIB)) == (0, 38 * GIB)
    beyond = judge.gpu(sample(30 * GIB, (7, 1 * GIB), listed_used=GIB), holdings=holdings)
    assert headroom(beyond, 10 * GIB) == 18 * GIB


def test_growth_on_a_gpu_without_jobs_is_foreign_at_once(judge: Judge) -> None:
    """Before anybody knows whose it is."""
    gpu = judge.gpu(sample(9 * GIB, listed_used=0))
    assert (gpu.foreign_bytes, gpu.whole_idle) == (9 * GIB, False)


def test_processes_that_cannot_be_listed_leave_what_is_free(judge: Judge) -> None:
    """Jobs stand for what they hold; the rest in use is foreign."""
    holdings = {UUID: [held(1, 10 * GIB)]}
    gpu = judge.gpu(sample(14 * GIB, listed=False), holdings=holdings)
    assert headroom(gpu, 10 * GIB) == 34 * GIB


def test_a_small_stranger_below_the_threshold_leaves_a_gpu_idle(judge: Judge) -> None:
    """Below 200 MiB, not at it."""
    assert judge.gpu(sample(199 * MIB, (9, 199 * MIB))).whole_idle
    assert not Judge().gpu(sample(200 * MIB, (9, 200 * MIB))).whole_idle


def test_what_a_former_job_left_behind_is_found_and_named(judge: Judge) -> None:
    """Its process is still there after its end; another's job is told whose it is."""
    judge.owners[7] = key(3)
    facts = judge.facts(sample(6 * GIB, (7, 6 * GIB)), holdings={UUID: [held(4, GIB)]})
    assert [(stray.key, stray.pid) for stray in facts.leftovers] == [(key(3), 7)]
    assert "pid 7 of job 3, left behind with 6 GiB" in facts.gpus[0].foreign_text
    assert headroom(facts.gpus[0], GIB) < 42 * GIB


def test_a_lone_job_s_use_is_the_device_s_where_no_process_can_be_listed(judge: Judge) -> None:
    """By difference to before; with a second job, or a stranger seen earlier, nobody knows."""
    meter = UseMeter()
    meter.begin(key(1), [UUID], {UUID: GIB})
    blind = sample(4 * GIB, listed=False)
    facts = judge.facts(blind, holdings={UUID: [held(1, 10 * GIB)]})
    for (of_job, _), seen in facts.seen.items():
        meter.add(of_job, blind.readings[0], seen, 1.0)
    (use,) = meter.uses(key(1))
    assert (use.peak_bytes, use.peak_source) == (3 * GIB, "device")
    both = {UUID: [held(1, 10 * GIB), held(2, 10 * GIB)]}
    assert judge.facts(blind, holdings=both).seen == {}
    judge.facts(sample(20 * GIB, (9, 20 * GIB)))
    again = judge.facts(blind, holdings={UUID: [held(1, 10 * GIB)]})
    assert [seen.foreign_on_gpu for seen in again.seen.values()] == [True]


def test_a_job_s_own_figures_count_where_the_device_has_none(judge: Judge) -> None:
    """Memory of the card is not supported, that of its processes is."""
    judge.owners[7] = key(1)
    rows = (GpuProcess(7, 1, 3 * GIB),)
    reading = GpuReading(UUID, None, None, processes=rows, fault="unsupported")
    facts = judge.facts(Sample(1.0, (CARD,), (reading,)), holdings={UUID: [held(1, 0)]})
    assert facts.seen[key(1), UUID].used_bytes == 3 * GIB
    assert facts.gpus[0].whole_idle


def test_a_failed_list_forgets_no_foreign_peak(judge: Judge) -> None:
    """It may come back to it."""
    judge.gpu(sample(20 * GIB, (9, 20 * GIB)))
    faulty = Sample(2.0, (CARD,), (GpuReading(UUID, None, None, fault="unread"),))
    assert judge.gpu(faulty).state == "unread"
    assert judge.gpu(sample(GIB, (9, GIB), taken_s=3.0)).foreign_bytes == 22 * GIB


def test_a_sample_older_than_a_jobs_end_counts_for_nothing(judge: Judge) -> None:
    """The ended job's memory is not foreign; a stranger seen before stays; newer samples count."""
    judge.owners[7] = key(3)
    old = sample(10 * GIB, (7, 8 * GIB), (9, 2 * GIB), taken_s=1.0)
    before = judge.gpu(old, holdings={UUID: [held(3, 8 * GIB)]})
    judge.ledger.job_ended(key(3), [UUID], 2.0)
    facts = judge.facts(old, holdings={})
    assert facts.leftovers == ()
    assert facts.gpus[0].foreign_bytes == before.foreign_bytes > 0
    assert facts.gpus[0].fresh is False
    newer = judge.gpu(sample(2 * GIB, (9, 2 * GIB), taken_s=3.0), holdings={})
    assert (newer.foreign_bytes, newer.fresh) == (before.foreign_bytes, True)


def test_a_list_that_fails_frees_nothing_that_was_foreign(judge: Judge) -> None:
    """A job that has not allocated yet must not explain away a stranger's memory."""
    holdings = {UUID: [held(1, 20 * GIB)]}
    before = judge.gpu(sample(10 * GIB, (9, 10 * GIB)), holdings=holdings)
    blind = judge.gpu(sample(10 * GIB, listed=False, taken_s=2.0), holdings=holdings)
    assert blind.foreign_bytes >= 10 * GIB
    assert headroom(blind, 20 * GIB) <= 18 * GIB
    gone = judge.gpu(sample(0, listed=False, taken_s=3.0), holdings=holdings)
    assert gone.foreign_bytes == 0
    after = judge.gpu(sample(10 * GIB, (9, 10 * GIB), taken_s=4.0), holdings=holdings)
    assert after.foreign_bytes == before.foreign_bytes


def test_memory_that_a_job_leaves_behind_is_its_own_at_first(judge: Judge) -> None:
    """For half a minute it is about to go; what is there later is foreign use, new by then."""
    judge.owners[7] = key(3)
    judge.gpu(sample(8 * GIB, (7, 8 * GIB)), holdings={UUID: [held(3, 8 * GIB)]})
    ended_s = boottime_s()
    judge.ledger.job_ended(key(3), [UUID], ended_s)
    glow = judge.gpu(sample(8 * GIB, taken_s=ended_s + 0.1))
    assert glow.foreign_bytes == 8 * GIB
    assert "job 3 leaves behind" in glow.foreign_text
    assert glow.leaves_by_s is not None
    assert 1025.0 < glow.leaves_by_s <= 1030.0
    assert glow.foreign_since_s == glow.leaves_by_s
    again = judge.gpu(sample(8 * GIB, taken_s=ended_s + 0.2))
    assert again.leaves_by_s == glow.leaves_by_s
    judge.ledger.job_ended(key(3), [UUID], ended_s - 31.0)
    later = judge.gpu(sample(8 * GIB, taken_s=ended_s + 0.3))
    assert later.leaves_by_s is None
    assert "job 3 was the last here" in later.foreign_text


def test_what_was_foreign_before_a_jobs_end_is_not_its_afterglow(judge: Judge) -> None:
    """A leak that many short jobs pass by does not get young again with each of them."""
    leak = judge.gpu(sample(8 * GIB))
    assert leak.foreign_since_s == 1000.0
    judge.ledger.job_ended(key(3), [UUID], boottime_s())
    after = judge.gpu(sample(8 * GIB, taken_s=boottime_s() + 1))
    assert (after.foreign_since_s, after.leaves_by_s) == (1000.0, None)
