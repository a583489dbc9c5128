"""The words both sides speak, and what both do with text of users."""

from __future__ import annotations

import pytest

from gpusched_client.errors import Invalid
from gpusched_client.terms import JobState, fill_pattern, parse_states, printable


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("訓練 7", "訓練 7"),
        ("red\x1b[31m", "red\\x1b[31m"),
        ("two\nlines", "two\\nlines"),
        ("over\u202eturned", "over\\u202eturned"),
        (b"a\xffb\x07", "a\\xffb\\x07"),
    ],
)
def test_no_text_can_drive_a_terminal(value: str | bytes, shown: str) -> None:
    assert printable(value) == shown
    assert printable(shown) == shown


def test_a_pattern_is_filled_in_as_slurm_does_it() -> None:
    def filled(pattern: bytes) -> bytes:
        return fill_pattern(pattern, job_id=7, name="a/b", user="ann")

    assert filled(b"%x-%j.%A_%a.%u") == b"a_b-7.7_0.ann"
    assert filled(b"100%% %%j %y %") == b"100% %j %y %"


def test_states_are_read_in_either_length_and_any_case() -> None:
    assert parse_states("pd, Running,R") == (JobState.PENDING, JobState.RUNNING)
    assert all(state.is_live for state in parse_states("live"))
    assert set(parse_states("live,final")) == set(parse_states("all")) == set(JobState)
    with pytest.raises(Invalid, match="'RUN' is not a job state; use live, final, all or PENDING"):
        parse_states("RUN")
