"""What is told of one job."""

from __future__ import annotations

from gpusched_client.output.job import _observed_part
from gpusched_client.terms import JobState
from gpusched_client.wire.job_messages import JobView


def test_figures_of_a_part_of_the_run_are_marked() -> None:
    """After a kill of the daemon nobody saw what was drawn meanwhile."""

    def seen(observed_s: float) -> str:
        view = JobView(
            job_id=1,
            state=JobState.COMPLETED,
            started_at_s=1000.0,
            ended_at_s=4600.0,
            gpu_observed_s=observed_s,
        )
        return _observed_part(view, 5000.0)

    assert seen(3590.0) == ""
    assert seen(2400.0) == " (seen for 40:00 of 1:00:00)"
