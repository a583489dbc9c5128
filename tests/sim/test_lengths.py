"""What runs teach, and what expectations are kept: through the controller, restarts and full disks.

Attempts start at once and end as they are told to, under a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import JobId, JobState
from gpusched_client.wire.job_messages import CancelRequest, UpdateRequest
from gpusched_client.wire.submit_messages import JobRequest, SubmitRequest
from gpuschedd.core.lengths import expected
from gpuschedd.core.model import HOUR_S, FirstHead, Kind, Policy
from gpuschedd.jobs import cancel as jobs_cancel
from gpuschedd.jobs import submit as jobs_submit
from gpuschedd.jobs import update as jobs_update
from gpuschedd.store.records import Changes
from tests.sim.harness import Host, ToldRunner

UID = 1001
GUESS_S = 24 * HOUR_S
Story = Callable[["Told"], Awaitable[None]]


@dataclass
class Told:
    """A host whose attempts are told when to end."""

    host: Host
    runner: ToldRunner

    async def submit(self, *argv: str, **asked: Any) -> JobId:
        request = JobRequest(
            argv=tuple(word.encode() for word in argv), cwd=b"/", environment={}, **asked
        )
        wanted = SubmitRequest(jobs=(request,))
        owner = self.host.caller(UID)
        made = await self.host.ask(lambda b: jobs_submit.submit(b, owner, wanted, None))
        (job_id,) = made.job_ids
        return JobId(job_id)

    async def run(
        self, *argv: str, lasts_s: float, cause: str = "exit", code: int = 0, **asked: Any
    ) -> JobId:
        """Submit it and let it run so long."""
        job_id = await self.submit(*argv, **asked)
        await self.host.pass_time(lasts_s)
        if cause == "cancelled":
            await self.cancel(job_id)
        elif cause == "lost":
            self.runner.die(job_id)
        else:
            self.runner.end(job_id, cause, code if cause == "exit" else None)
        await self.host.pass_time(20.0)
        return job_id

    async def cancel(self, job_id: JobId) -> None:
        owner, request = self.host.caller(UID), CancelRequest(job_ids=(job_id,))
        await self.host.ask(lambda b: jobs_cancel.cancel(b, owner, request))

    async def hold(self, job_id: JobId, is_held: bool) -> None:
        owner, request = self.host.caller(UID), UpdateRequest(job_ids=(job_id,), hold=is_held)
        await self.host.ask(lambda b: jobs_update.update(b, owner, request, None))
        await self.host.pass_time(1.0)

    def lengths(self) -> dict[Kind, list[float]]:
        """What the user's runs have shown."""
        own = self.host.controller.state.histories.view().by_uid.get(UID)
        rows = {} if own is None else own.rows
        return {kind: [run.length_s for run in runs] for kind, runs in rows.items()}


def tell(place: Path, story: Story, *settings: str, gpus: int = 4) -> None:
    """It happens on a host of its own."""
    host = Host(place, 3, gpus, ToldRunner, settings)
    assert isinstance(host.runner, ToldRunner)
    told = Told(host, host.runner)

    async def whole() -> None:
        await story(told)
        await host.controller.stop()
        host.controller.close()

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("lasts_s", "cause", "code", "limit_s", "shown_s"),
    [
        (500.0, "exit", 0, None, 500.0),
        (5.0, "exit", 0, None, 5.0),
        (59.0, "exit", 3, None, None),
        (60.0, "exit", 3, None, 60.0),
        (300.0, "time_limit", 0, 295, 295.0),
        (500.0, "cancelled", 0, 3600, None),
        (500.0, "stopped", 0, 3600, None),
        (500.0, "shutdown", 0, 3600, None),
        (500.0, "lost", 0, 3600, None),
        (GUESS_S + 500.0, "cancelled", 0, None, GUESS_S + 500.0),
        (GUESS_S + 500.0, "stopped", 0, None, GUESS_S + 500.0),
        (GUESS_S + 500.0, "shutdown", 0, None, GUESS_S + 500.0),
    ],
)
def test_which_runs_count_and_for_how_long(
    tmp_path: Path,
    lasts_s: float,
    cause: str,
    code: int,
    limit_s: int | None,
    shown_s: float | None,
) -> None:
    """TIMEOUT as its limit; who was ended from outside only where it ran longer than expected."""

    async def story(told: Told) -> None:
        await told.run(
            "python", "train.py", lasts_s=lasts_s, cause=cause, code=code, time_limit_s=limit_s
        )
        train = Kind("train.py", 1)
        close = {} if shown_s is None else {train: [pytest.approx(shown_s, abs=1.0)]}
        assert told.lengths() == close

    tell(tmp_path, story)


def test_one_that_nobody_saw_end_shows_nothing(tmp_path: Path) -> None:
    """Its supervisor is gone, and no record has its end: it may have been long before."""

    async def story(told: Told) -> None:
        job_id = await told.run("train", lasts_s=GUESS_S + 500.0, cause="lost")
        assert job_id not in told.host.controller.state.jobs
        assert told.lengths() == {}

    tell(tmp_path, story)


def test_runs_of_one_kind_are_told_from_others_by_command_and_gpus(tmp_path: Path) -> None:
    """A sweep by its script, whatever its arguments; a name that was given, without digits."""

    async def story(told: Told) -> None:
        for lasts_s, lr in ((100.0, "3"), (300.0, "0.1"), (500.0, "0.01")):
            await told.run("python", "train.py", "--lr", lr, lasts_s=lasts_s)
        await told.run("python", "-m", "torch.run", "x.py", lasts_s=40.0, gpus=2)
        await told.run("bash", "-c", "sleep 7 # 12", lasts_s=50.0)
        await told.run("sleep", "9", name="night-17", lasts_s=60.0)
        close = {kind: pytest.approx(lengths_s, abs=1.0) for kind, lengths_s in {
            Kind("train.py", 1): [300.0, 500.0],
            Kind("torch.run", 2): [40.0],
            Kind("sleep  # ", 1): [50.0],
            Kind("night-", 1): [60.0],
        }.items()}  # fmt: skip
        assert told.lengths() == close

    tell(tmp_path, story)


def test_what_has_run_is_expected_of_who_starts_next_and_kept_with_the_attempt(
    tmp_path: Path,
) -> None:
    """Own command and GPUs, own command, owner; then the limit or the guess, and never above it."""

    async def story(told: Told) -> None:
        async def expected_of(*argv: str, **asked: Any) -> float:
            job_id = await told.submit(*argv, **asked)
            await told.host.pass_time(1.0)
            found = told.host.controller.state.jobs[job_id].decided_expected_s
            await told.cancel(job_id)
            await told.host.pass_time(20.0)
            assert found is not None
            return found

        assert await expected_of("a") == GUESS_S
        assert await expected_of("a", time_limit_s=70) == 70.0
        await told.run("a", lasts_s=100.0)
        await told.run("a", lasts_s=200.0)
        await told.run("a", lasts_s=400.0, gpus=2)
        await told.run("b", lasts_s=1000.0)
        assert await expected_of("a") == pytest.approx(150.0, abs=1.0)
        assert await expected_of("a", gpus=2) == pytest.approx(400.0, abs=1.0)
        assert await expected_of("a", gpus=4) == pytest.approx(300.0, abs=1.0)
        assert await expected_of("c") == pytest.approx(700.0, abs=1.0)
        assert await expected_of("a", time_limit_s=120) == 120.0
        assert await expected_of("a", estimate_s=77) == 77.0
        told.host.reload("scheduling.learn_lengths=false", "scheduling.guess_length=1h")
        assert await expected_of("a") == HOUR_S
        assert await expected_of("a", time_limit_s=120) == 120.0

    tell(tmp_path, story)


@dataclass(frozen=True)
class Kept:
    """What a restart must not change."""

    first: FirstHead | None
    expected_s: float | None
    lengths: dict[Kind, list[float]]
    patient_until_s: float | None
    promised: JobId | None

    @classmethod
    def of(cls, told: Told, runs: JobId, waits: JobId) -> Kept:
        state = told.host.controller.state
        held = state.reservation
        row = state.queues.get(waits)
        assert state.ages[waits] == row
        return cls(
            None if row is None else row.first_head,
            state.jobs[runs].decided_expected_s,
            told.lengths(),
            None if held is None else held.patient_until_s,
            told.host.promised_job(),
        )


def test_a_heads_first_expectation_and_its_patience_survive_restarts(tmp_path: Path) -> None:
    """And the length that a running attempt was expected to have, and what runs have shown."""

    async def story(told: Told) -> None:
        await told.run("train", lasts_s=1000.0)
        runs = await told.submit("train", gpus=2)
        await told.host.pass_time(1.0)
        began_s = told.host.controller.state.jobs[runs].decided_sched_s
        assert began_s is not None
        waits = await told.submit("wide", gpus=4)
        await told.host.pass_time(1.0)
        before = Kept.of(told, runs, waits)
        assert before.first is not None
        assert before.expected_s == pytest.approx(1000.0, abs=1.0)
        assert before.first.expected_at_s == pytest.approx(began_s + 1000.0 + 15.0, abs=2.0)
        assert before.patient_until_s == before.first.expected_at_s + 2 * 24 * HOUR_S
        assert before.promised is None
        assert before.lengths == {Kind("train", 1): [pytest.approx(1000.0, abs=1.0)]}
        for passes_s in (0.0, 500.0, 2000.0, 30 * HOUR_S):
            await told.host.restart()
            await told.host.pass_time(passes_s)
            assert Kept.of(told, runs, waits) == before
        # Nothing behind it starts once its patience is over, and it does when the other one ends.
        await told.host.pass_time(20 * HOUR_S)
        late = await told.submit("true", time_limit_s=60, estimate_s=1)
        await told.host.pass_time(1.0)
        assert told.host.controller.state.jobs[late].state is JobState.PENDING
        await told.host.restart()
        assert told.host.controller.state.jobs[late].state is JobState.PENDING
        told.runner.end(runs, "exit", 0)
        await told.host.pass_time(20.0)
        assert told.host.controller.state.jobs[waits].state is JobState.RUNNING

    tell(tmp_path, story)


def test_what_a_batch_would_have_taught_waits_for_its_commit(tmp_path: Path) -> None:
    """A full disk: neither the length nor the first time as head is known before it is written."""

    async def story(told: Told) -> None:
        runs = await told.submit("train", gpus=4)
        await told.host.pass_time(100.0)
        waits = await told.submit("wide", gpus=4)
        await told.host.pass_time(1.0)
        first = told.host.controller.state.ages[waits].first_head
        assert first is not None
        told.host.world.disk_full = True
        told.runner.end(runs, "exit", 0)
        await told.host.pass_time(20.0)
        assert told.lengths() == {}
        assert told.host.controller.state.ages[waits].first_head == first
        told.host.world.disk_full = False
        await told.host.pass_time(60.0)
        assert told.lengths() == {Kind("train", 4): [pytest.approx(101.0, abs=1.0)]}
        await told.host.restart()
        assert told.lengths() == {Kind("train", 4): [pytest.approx(101.0, abs=1.0)]}

    tell(tmp_path, story)


def test_what_changes_a_waiting_job_makes_it_head_anew(tmp_path: Path) -> None:
    """Held and released it begins at age 0, and its patience does so with it."""

    async def story(told: Told) -> None:
        await told.submit("train", gpus=2)
        await told.host.pass_time(1.0)
        waits = await told.submit("wide", gpus=4)
        await told.host.pass_time(1.0)
        first = told.host.controller.state.ages[waits].first_head
        assert first is not None
        await told.host.pass_time(600.0)
        await told.hold(waits, True)
        await told.hold(waits, False)
        again = told.host.controller.state.ages[waits].first_head
        assert again is not None
        assert again.since_s >= first.since_s + 600.0
        await told.host.restart()
        assert told.host.controller.state.ages[waits].first_head == again

    tell(tmp_path, story)


def test_ten_thousand_that_wait_learn_from_two_ends_without_a_row_of_theirs(
    tmp_path: Path,
) -> None:
    """What is expected of them is looked up: an end writes its own rows, and one of lengths."""

    async def story(told: Told) -> None:
        owner = told.host.caller(UID)
        one = JobRequest(argv=(b"train.py",), cwd=b"/", environment={}, gpus=4)
        wanted = SubmitRequest(jobs=(one,) * 1_000)
        for _ in range(10):
            await told.host.ask(lambda b: jobs_submit.submit(b, owner, wanted, None))
        written: list[Changes] = []
        commit = told.host.store.commit

        def noting(changes: Changes) -> None:
            written.append(changes)
            commit(changes)

        told.host.store.commit = noting  # type: ignore[method-assign]
        for _ in range(2):
            (runs,) = told.host.controller.state.holding
            await told.host.pass_time(100.0)
            told.runner.end(runs, "exit", 0)
            await told.host.pass_time(20.0)
        # The second began as the first ended, but for a launch, 20 s before it was looked at.
        took = [pytest.approx(took_s, abs=3.0) for took_s in (100.0, 120.0)]
        assert told.lengths() == {Kind("train.py", 4): took}
        touched = {job_id for changes in written for job_id in (*changes.jobs, *changes.ages)}
        assert len(touched) <= 6
        assert sum(len(changes.lengths) for changes in written) == 2
        last = max(told.host.controller.state.jobs)
        view = told.host.controller.state.queues.get(last)
        assert view is not None
        lengths = told.host.controller.state.histories.view()
        found = expected(lengths, UID, view.length_key, view.request, Policy())
        assert found.length_s == pytest.approx(110.0, abs=3.0)

    tell(tmp_path, story)
