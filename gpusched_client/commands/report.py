"""What became of jobs, as lines and as an exit status: what several commands end with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusched_client.commands.common import print_err, print_out
from gpusched_client.errors import BY_CODE, Internal
from gpusched_client.terms import JobState, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpusched_client.wire.job_messages import JobView, Outcome

EXIT_TIMEOUT, EXIT_CANCELLED, EXIT_UNKNOWN = 124, 143, 70


def report(command: str, outcomes: Iterable[Outcome], as_json: bool) -> int:
    """One line a job, refusals on stderr; the status is that of the first job that was refused."""
    from gpusched_client.output.json import json_text
    from gpusched_client.output.text import refusal_text

    outcomes = list(outcomes)
    if as_json:
        print_out(json_text({"outcomes": outcomes}))
    for outcome in outcomes:
        if outcome.code is not None:
            print_err(f"{command}: {refusal_text(outcome)}")
        elif not as_json:
            print_out(f"job {outcome.job_id}: {printable(outcome.text or 'done')}\n")
    refused = [outcome.code for outcome in outcomes if outcome.code is not None]
    return BY_CODE.get(refused[0], Internal).exit_status if refused else 0


def exit_status(job: JobView) -> int:
    """What a command that waited for the job ends with; 0 for COMPLETED only."""
    if job.state is JobState.COMPLETED:
        return 0
    if job.state is JobState.TIMEOUT:
        return EXIT_TIMEOUT
    if job.state is JobState.CANCELLED:
        return EXIT_CANCELLED
    if job.state in (JobState.FAILED, JobState.OUT_OF_MEMORY):
        if job.exit_signal:
            return 128 + job.exit_signal
        return job.exit_code or EXIT_UNKNOWN
    return EXIT_UNKNOWN
