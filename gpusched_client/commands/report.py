"""What became of jobs, as lines and as an exit status: what several commands end with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusched_client.commands.answering import print_err, print_out
from gpusched_client.errors import BY_CODE, Internal
from gpusched_client.terms import JobState, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpusched_client.wire.job_messages import JobView, Outcome

LINES_MAX = 20  # jobs with a line of their own; more are summed up
EXIT_TIMEOUT, EXIT_CANCELLED, EXIT_UNKNOWN = 124, 143, 70


def report(command: str, outcomes: Iterable[Outcome], as_json: bool) -> int:
    """One line a job, or of many a summary; refusals on stderr.

    The status is that of the first job that was refused.
    """
    from gpusched_client.output.outcomes import done_text, refusal_text, summary

    outcomes = list(outcomes)
    refused = [outcome for outcome in outcomes if outcome.code is not None]
    done = [outcome for outcome in outcomes if outcome.code is None]
    if as_json:
        from gpusched_client.output.json import json_text

        print_out(json_text({"outcomes": outcomes}))
    if len(outcomes) > LINES_MAX:
        if done and not as_json:
            print_out(f"{printable(summary(done))}\n")
        if refused:
            print_err(f"{command}: {summary(refused)}")
    else:
        for outcome in outcomes:
            if outcome.code is not None:
                print_err(f"{command}: {refusal_text(outcome)}")
            elif not as_json:
                print_out(f"{printable(done_text(outcome))}\n")
    return BY_CODE.get(str(refused[0].code), Internal).exit_status if refused else 0


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
