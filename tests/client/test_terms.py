"""The words both sides speak, and what both do with text of users."""

from __future__ import annotations

import pytest

from gpusched_client.errors import Invalid
from gpusched_client.terms import JobState, fill_pattern, parse_states, printable, unknown_marks


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


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (b"%x-%j.%A_%a.%u", b"a_b-7.7_0.ann"),
        (b"slurm-%N-%4j.out", b"slurm-node1-0007.out"),
        (b"%J_%n_%t_%s", b"7_0_0_batch"),
        (b"%04j %99j %3x", b"0007 0000000007 a_b"),
        (b"100%% %%j %y %", b"100% %j %y %"),
    ],
)
def test_a_pattern_is_filled_in_as_slurm_does_it(pattern: bytes, name: bytes) -> None:
    filled = fill_pattern(pattern, job_id=7, name="a/b", user="ann", host="node1.lab.org")
    assert filled == name


def test_marks_that_nothing_replaces_are_found() -> None:
    assert unknown_marks(b"%j%%q%4N") == []
    assert unknown_marks(b"%y-%12q-%") == ["%y", "%12q", "%"]


def test_states_are_read_in_either_length_and_any_case() -> None:
    assert parse_states("pd, Running,R") == (JobState.PENDING, JobState.RUNNING)
    assert all(state.is_live for state in parse_states("live"))
    assert set(parse_states("live,final")) == set(parse_states("all")) == set(JobState)
    with pytest.raises(Invalid, match="'RUN' is not a job state; use live, final, all or PENDING"):
        parse_states("RUN")
