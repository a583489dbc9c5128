"""Headroom by numbers: promised against seen, without a driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusched_client.terms import GpuUuid
from gpuschedd.core.model import GpuState
from gpuschedd.core.reasons import hints
from gpuschedd.gpu.attribution import ForeignProcess
from gpuschedd.gpu.free_memory import RELEASE_LAG_S
from gpuschedd.gpu.holdings import Holding
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
    listed_s: float | None = None,
) -> Sample:
    """One GPU with (pid, bytes) on it."""
    rows = tuple(GpuProcess(pid, 1, size) for pid, size in processes)
    reading = GpuReading(
        UUID,
        used,
        48 * GIB - used,
        processes=rows if listed else None,
        listed_used_bytes=(used if listed_used is None else listed_used) if listed else None,
        listed_boottime_s=listed_s,
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


def test_processes_that_were_listed_before_a_jobs_end_are_not_left_behind(judge: Judge) -> None:
    """In a sample that was taken after it, too, where the list was not made anew."""
    judge.owners[7] = key(3)
    first = sample(8 * GIB, (7, 8 * GIB), taken_s=1.0)
    before = judge.gpu(first, holdings={UUID: [held(3, 8 * GIB)]})
    assert judge.ledger.outdated(first) == frozenset()
    judge.ledger.job_ended(key(3), [UUID], 2.0)
    kept = sample(8 * GIB, (7, 8 * GIB), taken_s=3.0, listed_s=1.0)
    facts = judge.facts(kept, holdings={})
    assert facts.leftovers == ()
    assert (facts.gpus[0].foreign_bytes, facts.gpus[0].fresh) == (before.foreign_bytes, False)
    assert judge.ledger.outdated(kept) == {UUID}, "they are to be listed anew"
    anew = sample(8 * GIB, (7, 8 * GIB), taken_s=4.0, listed_s=4.0)
    assert [stray.pid for stray in judge.facts(anew, holdings={}).leftovers] == [7]
    assert judge.ledger.outdated(anew) == frozenset()


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


# --- memory of both the GPU and its host ----------------------------------------

SHARED_WITH_HOST = replace(CARD, integrated=True)


def on(info: GpuInfo, of: Sample) -> Sample:
    """The same on another card."""
    return replace(of, inventory=(info,))


def test_what_the_host_uses_of_its_own_memory_keeps_no_whole_job_away(judge: Judge) -> None:
    """Only a process with a GPU context does; admission by VRAM goes by what is available."""
    idle = judge.gpu(on(SHARED_WITH_HOST, sample(20 * GIB)))
    assert (idle.whole_idle, headroom(idle)) == (True, 28 * GIB)
    assert "20 GiB of the host, whose memory it shares" in idle.foreign_text
    blind = Judge().gpu(on(SHARED_WITH_HOST, sample(20 * GIB, listed=False)))
    assert (blind.whole_idle, headroom(blind)) == (True, 28 * GIB)
    busy = judge.gpu(on(SHARED_WITH_HOST, sample(20 * GIB, (9, GIB))))
    assert not busy.whole_idle
    unknown = Judge().gpu(on(SHARED_WITH_HOST, sample(20 * GIB, (9, None))))
    assert not unknown.whole_idle


def test_what_the_host_uses_is_no_job_s_peak(judge: Judge) -> None:
    """1024 MiB by its process, whatever other programs on the host take meanwhile."""
    judge.owners[7] = key(1)
    holdings = {UUID: [held(1, 10 * GIB)]}
    judge.gpu(on(SHARED_WITH_HOST, sample(20 * GIB)))
    facts = judge.facts(on(SHARED_WITH_HOST, sample(23 * GIB, (7, GIB))), holdings=holdings)
    (seen,) = facts.seen.values()
    assert (seen.used_bytes, seen.charged, seen.hides) == (GIB, False, False)


# --- a GPU that allows one process ----------------------------------------

ONE_PROCESS = replace(CARD, shareable=False)


@pytest.mark.parametrize("size", [MIB, 100 * MIB, None])
def test_where_one_process_is_allowed_any_that_computes_is_in_the_way(
    judge: Judge, size: int | None
) -> None:
    """However small it is: a job would fail at once."""
    gpu = judge.gpu(on(ONE_PROCESS, sample(size or 0, (9, size))))
    assert (gpu.whole_idle, headroom(gpu)) == (False, 0)
    assert "pid 9 of bob (python)" in gpu.foreign_text
    assert "allows one process only" in gpu.foreign_text


def test_where_one_process_is_allowed_a_display_and_the_mps_server_are_none(judge: Judge) -> None:
    """What only draws does not count there; the server is the one process, for all its clients."""
    rows = (GpuProcess(9, 1, 100 * MIB, graphics_only=True),)
    reading = GpuReading(UUID, 100 * MIB, 47 * GIB, processes=rows, listed_used_bytes=100 * MIB)
    assert judge.gpu(Sample(1.0, (ONE_PROCESS,), (reading,))).whole_idle
    server = GpuProcess(8, 1, 50 * MIB, infrastructure=True)
    both = (server, GpuProcess(9, 1, 100 * MIB))
    reading = GpuReading(UUID, 150 * MIB, 47 * GIB, processes=both, listed_used_bytes=150 * MIB)
    assert Judge().gpu(Sample(1.0, (ONE_PROCESS,), (reading,))).whole_idle


# --- processes that nobody can match ----------------------------------------


def of_alice(job_id: int, size: int) -> Holding:
    """A job of uid 1000 that runs."""
    return Holding(key(job_id), size, 1000)


def test_own_memory_is_not_counted_twice_where_no_process_is_listed(judge: Judge) -> None:
    """Up to what the jobs hold it is theirs; what is beyond that, or came before, is foreign."""
    judge.gpu(sample(GIB))
    holdings = {UUID: [of_alice(1, 5 * GIB), of_alice(2, 5 * GIB)]}
    both = judge.facts(sample(10 * GIB), holdings=holdings)
    assert headroom(both.gpus[0], 10 * GIB) == 37 * GIB
    assert "processes cannot be matched with jobs on GPU 0" in both.problems[0]
    assert "--pid=host" in both.problems[0]
    more = judge.gpu(sample(15 * GIB), holdings=holdings)
    assert headroom(more, 10 * GIB) == 33 * GIB
    after = judge.facts(sample(GIB))
    assert (headroom(after.gpus[0]), after.problems) == (47 * GIB, ())


@pytest.mark.parametrize(
    "who",
    [
        ForeignProcess(9, 0, "root", "python", is_contained=True),
        ForeignProcess(9, 1000, "alice", "python"),
    ],
)
def test_a_job_s_container_is_not_counted_twice(judge: Judge, who: ForeignProcess) -> None:
    """It is no child of the job, but it came while the job held more than it showed."""
    judge.strangers[9] = who
    judge.gpu(sample(0))
    holdings = {UUID: [of_alice(1, 5 * GIB)]}
    gpu = judge.gpu(sample(4 * GIB, (9, 4 * GIB)), holdings=holdings)
    assert headroom(gpu, 5 * GIB) == 43 * GIB
    assert "(counted as a job's)" in gpu.foreign_text
    grown = judge.gpu(sample(9 * GIB, (9, 9 * GIB)), holdings=holdings)
    assert headroom(grown, 5 * GIB) < 39 * GIB + GIB
    assert not judge.gpu(sample(9 * GIB, (9, 9 * GIB))).whole_idle  # the job ended, it did not


def test_a_process_of_somebody_else_is_foreign_beside_a_job_that_holds_more(judge: Judge) -> None:
    """Bob's, in plain sight, while alice's job has not allocated yet; so is one from before."""
    holdings = {UUID: [of_alice(1, 20 * GIB)]}
    judge.gpu(sample(0))
    bob = judge.gpu(sample(10 * GIB, (9, 10 * GIB)), holdings=holdings)
    assert headroom(bob, 20 * GIB) == 17 * GIB
    judge = Judge()
    judge.strangers[9] = ForeignProcess(9, 1000, "alice", "python")
    judge.gpu(sample(10 * GIB, (9, 10 * GIB)))
    before = judge.gpu(sample(10 * GIB, (9, 10 * GIB)), holdings=holdings)
    assert headroom(before, 20 * GIB) == 17 * GIB


def test_a_job_that_does_not_run_yet_explains_no_memory(judge: Judge) -> None:
    """What came before its launch would be its neighbour's "out of memory"."""
    judge.strangers[9] = ForeignProcess(9, 1000, "alice", "python")
    judge.gpu(sample(0))
    placed = {UUID: [Holding(key(1), 20 * GIB, 1000, may_hide=False)]}
    gpu = judge.gpu(sample(40 * GIB, (9, 40 * GIB)), holdings=placed)
    assert headroom(gpu) < 20 * GIB


def test_a_leak_between_the_decision_and_the_start_is_not_the_job_s(judge: Judge) -> None:
    """It came after the last look at the empty GPU, before anything of the job was there."""
    judge.owners[7] = key(1)
    judge.gpu(sample(0))
    decided = {UUID: [Holding(key(1), 48 * GIB, may_hide=False, runs=False)]}
    assert judge.facts(sample(150 * MIB), holdings=decided).seen == {}
    runs = {UUID: [Holding(key(1), 48 * GIB, may_hide=False)]}
    alone = judge.facts(sample(GIB + 150 * MIB, (7, GIB)), holdings=runs)
    assert (alone.seen[key(1), UUID].used_bytes, alone.seen[key(1), UUID].charged) == (GIB, False)
    managed = judge.facts(sample(3 * GIB + 150 * MIB, (7, GIB)), holdings=runs)
    assert managed.seen[key(1), UUID].used_bytes == 3 * GIB
    gone = judge.facts(sample(2 * GIB, (7, GIB)), holdings=runs)
    assert gone.seen[key(1), UUID].used_bytes == 2 * GIB - 150 * MIB


def test_memory_that_came_with_a_process_of_the_job_is_its_though_it_is_not_said_to_run(
    judge: Judge,
) -> None:
    """The sample may be ahead of the report of its start."""
    judge.owners[7] = key(1)
    judge.gpu(sample(0))
    decided = {UUID: [Holding(key(1), 48 * GIB, may_hide=False, runs=False)]}
    judge.facts(sample(3 * GIB, (7, GIB)), holdings=decided)
    runs = {UUID: [Holding(key(1), 48 * GIB, may_hide=False)]}
    facts = judge.facts(sample(3 * GIB, (7, GIB)), holdings=runs)
    assert facts.seen[key(1), UUID].used_bytes == 3 * GIB


def test_beside_memory_of_nobody_a_job_s_figure_is_a_lower_bound(judge: Judge) -> None:
    """Managed memory is on no process: whose it is, of two jobs, nobody can tell."""
    judge.owners |= {7: key(1), 8: key(2)}
    judge.gpu(sample(0))
    holdings = {UUID: [of_alice(1, 10 * GIB), of_alice(2, 10 * GIB)]}
    both = sample(10 * GIB, (7, GIB), (8, GIB))
    facts = judge.facts(both, holdings=holdings)
    assert [seen.hides for seen in facts.seen.values()] == [True, True]


# --- memory of nobody ----------------------------------------


def test_a_card_that_idles_above_the_threshold_is_told_which_setting_helps(judge: Judge) -> None:
    """The key, its value now, and the value that would be enough."""
    gpu = judge.gpu(sample(450 * MIB))
    assert not gpu.whole_idle
    assert gpu.foreign_hint == (
        'sharing.idle_threshold is 200M; with "464M" whole jobs may start beside it'
    )
    large = Judge().gpu(sample(30 * GIB))
    assert large.foreign_hint == "sharing.idle_threshold is 200M"


def test_where_no_process_tells_its_size_what_was_there_before_jobs_is_idle(judge: Judge) -> None:
    """WSL2: a desktop, and no figures. What comes later is in the way."""
    assert judge.gpu(sample(900 * MIB, listed=False)).whole_idle
    assert judge.gpu(sample(900 * MIB, listed=False), holdings={UUID: [held(1, GIB)]}).whole_idle
    later = judge.gpu(sample(3 * GIB, listed=False), holdings={UUID: [held(1, GIB)]})
    assert not later.whole_idle
    drawing = GpuProcess(9, 1, None, graphics_only=True)
    reading = GpuReading(UUID, GIB, 47 * GIB, processes=(drawing,), listed_used_bytes=GIB)
    assert Judge().gpu(Sample(1.0, (CARD,), (reading,))).whole_idle
    assert not Judge().gpu(sample(30 * GIB, listed=False)).whole_idle  # no desktop


def test_after_a_start_beside_a_job_what_is_left_without_it_is_idle(judge: Judge) -> None:
    """WSL2, and the daemon was restarted: once the job and what it leaves behind are gone."""
    ended_s = started_beside_a_job(judge, 900 * MIB)
    glow = judge.gpu(sample(900 * MIB, listed=False, taken_s=ended_s + 0.1))
    assert (glow.whole_idle, glow.leaves_by_s is None) == (False, False)
    judge.ledger.job_ended(key(1), [UUID], ended_s - RELEASE_LAG_S)
    later = judge.gpu(sample(900 * MIB, listed=False, taken_s=ended_s + 0.2))
    assert (later.whole_idle, later.leaves_by_s, later.foreign_hint) == (True, None, "")
    assert "leaves behind" not in later.foreign_text
    stranger = judge.gpu(sample(3 * GIB, listed=False, taken_s=ended_s + 0.3))
    assert not stranger.whole_idle


def test_after_a_start_beside_a_job_a_stranger_that_came_since_is_in_the_way(judge: Judge) -> None:
    """It is there in the first look without the job; it was not in those beside the job."""
    ended_s = started_beside_a_job(judge, 900 * MIB)
    judge.ledger.job_ended(key(1), [UUID], ended_s - RELEASE_LAG_S)
    assert not judge.gpu(sample(3 * GIB, listed=False, taken_s=ended_s)).whole_idle
    assert judge.gpu(sample(900 * MIB, listed=False, taken_s=ended_s + 0.1)).whole_idle


def started_beside_a_job(judge: Judge, used: int) -> float:
    """The first looks are beside a job, which ends now: the boot time."""
    judge.gpu(sample(used, listed=False), holdings={UUID: [held(1, 48 * GIB)]})
    judge.gpu(sample(used + GIB, listed=False), holdings={UUID: [held(1, 48 * GIB)]})
    ended_s = boottime_s()
    judge.ledger.job_ended(key(1), [UUID], ended_s)
    return ended_s


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("size", [160 * MIB, 896 * MIB])
def test_memory_of_nobody_that_was_there_before_a_job_is_not_left_behind_by_it(
    judge: Judge, size: int, listed: bool
) -> None:
    """Below the threshold or above, listed or not: it is told as before the job."""
    before = judge.gpu(sample(size, listed=listed))
    assert before.foreign_text == f"{size // MIB} MiB that no process owns"
    judge.gpu(sample(size, listed=listed), holdings={UUID: [held(1, 48 * GIB)]})
    ended_s = boottime_s()
    judge.ledger.job_ended(key(1), [UUID], ended_s)
    after = judge.gpu(sample(size, listed=listed, taken_s=ended_s + 0.1))
    assert (after.foreign_text, after.leaves_by_s) == (before.foreign_text, None)


@pytest.mark.parametrize("listed", [True, False])
def test_what_a_job_leaves_behind_is_told_apart_from_what_was_there_before(
    judge: Judge, listed: bool
) -> None:
    """It is about to go, also after a job that followed at once."""
    judge.gpu(sample(160 * MIB, listed=listed))
    ended_s = boottime_s()
    judge.ledger.job_ended(key(1), [UUID], ended_s)
    glow = judge.gpu(sample(3 * GIB + 160 * MIB, listed=listed, taken_s=ended_s + 0.1))
    assert "3 GiB that job 1 leaves behind, 160 MiB that no process owns" in glow.foreign_text
    assert glow.leaves_by_s is not None
    beside = {UUID: [held(2, 40 * GIB)]}
    judge.gpu(sample(160 * MIB, listed=listed, taken_s=ended_s + 0.2), holdings=beside)
    judge.ledger.job_ended(key(2), [UUID], ended_s + 0.2)
    second = judge.gpu(sample(GIB + 160 * MIB, listed=listed, taken_s=ended_s + 0.3))
    assert "1 GiB that job 2 leaves behind, 160 MiB that no process owns" in second.foreign_text


def test_memory_beside_a_process_of_unknown_size_is_probably_its(judge: Judge) -> None:
    """And not what the ended job leaves behind."""
    judge.ledger.job_ended(key(3), [UUID], boottime_s())
    gpu = judge.gpu(sample(6 * GIB, (9, None), taken_s=boottime_s() + 1))
    assert "pid 9 of bob (python) with an unknown amount" in gpu.foreign_text
    assert "6 GiB that no process owns, probably its" in gpu.foreign_text
    assert "job 3" not in gpu.foreign_text
    assert gpu.foreign_since_s == 1000.0


def test_only_small_processes_are_advised_to_be_ignored_and_each_line_once(judge: Judge) -> None:
    """Beside 60 GiB a job would run out of memory; two GPUs with the same one need one line."""
    small = judge.gpu(sample(700 * MIB, (9, 700 * MIB)))
    line = 'sharing.ignore_processes = ["name=python,uid=1001"] would let whole jobs beside it'
    assert small.foreign_hint == line
    assert hints([small, small]) == (line,)
    assert Judge().gpu(sample(40 * GIB, (9, 40 * GIB))).foreign_hint == ""


def test_memory_of_a_process_that_is_gone_needs_a_person_after_a_minute(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cure; it is told as long as it is there."""
    rows = (GpuProcess(9, None, 30 * GIB),)
    judge.strangers[9] = ForeignProcess(9, None, "", "")
    reading = GpuReading(UUID, 30 * GIB, 18 * GIB, processes=rows, listed_used_bytes=30 * GIB)
    stuck = Sample(1.0, (CARD,), (reading,))
    assert judge.facts(stuck).problems == ()
    now_s = boottime_s()
    monkeypatch.setattr("gpuschedd.gpu.lasting.boottime_s", lambda: now_s + 61.0)
    (text,) = judge.facts(stuck).problems
    assert "30 GiB on GPU 0 are held by pid 9, which is gone" in text
    assert "nvidia-smi --gpu-reset -i 0" in text
    assert judge.facts(sample(0)).problems == ()
    leak = sample(30 * GIB)
    assert judge.facts(leak).problems == ()
    monkeypatch.setattr("gpuschedd.gpu.lasting.boottime_s", lambda: now_s + 130.0)
    assert "30 GiB on GPU 0 are held by no process" in judge.facts(leak).problems[0]
    assert judge.gpu(leak).state is GpuState.OK


def test_a_private_host_names_no_owner_of_foreign_processes_but_to_admins(judge: Judge) -> None:
    """Not pid, name or command, and no line for the configuration; how much it is stays."""
    judge.ledger.hides_owners = True
    gpu = judge.gpu(sample(8 * GIB, (9, 5 * GIB), (10, 3 * GIB)))
    assert gpu.foreign_text == "2 processes outside the scheduler with 8 GiB"
    assert "pid 9" in gpu.foreign_detail
    judge.ledger.hides_owners = False
    gpu = judge.gpu(sample(8 * GIB, (9, 5 * GIB), (10, 3 * GIB)))
    assert "pid 9" in gpu.foreign_text
    assert gpu.foreign_detail == ""
