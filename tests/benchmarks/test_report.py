"""What the benchmarks say: figures with aims, and their own section of a document."""

from __future__ import annotations

import pytest

from benchmarks.report import Figure, Report, with_section
from benchmarks.trees import NoTree, tree_of

AROUND = "# Figures\n\n<!-- begin start -->\nold\n<!-- end start -->\n\n## Other\n"


def test_a_section_is_replaced_and_all_around_it_stays() -> None:
    expected = "# Figures\n\n<!-- begin start -->\nnew\n<!-- end start -->\n\n## Other\n"
    assert with_section(AROUND, "start", "new") == expected


def test_a_section_that_is_not_there_is_added_at_the_end() -> None:
    found = with_section("# Figures\n", "start", "new")
    assert found == "# Figures\n\n<!-- begin start -->\nnew\n<!-- end start -->\n"


def test_a_section_without_its_end_is_no_reason_to_drop_the_rest() -> None:
    with pytest.raises(AssertionError, match="has no <!-- end start -->"):
        with_section("<!-- begin start -->\nold\n\n## Other\n", "start", "new")


@pytest.mark.parametrize(
    ("figure", "aim"),
    [
        (Figure("a", "ms", (9.0, 12.0, 15.0), at_most=10.0), "at most 10: 2 missing"),
        (Figure("a", "ms", (9.0, 10.0, 15.0), at_most=10.0), "at most 10: reached"),
        (Figure("a", "jobs/s", (90.0, 100.0), at_least=150.0), "at least 150: 55 missing"),
        (Figure("a", "ms", (9.0,)), ""),
    ],
)
def test_a_figure_says_what_is_missing_at_its_median(figure: Figure, aim: str) -> None:
    assert figure.aim == aim
    assert figure.row.endswith(f"| {aim} |")


def test_a_report_prints_each_figure_and_keeps_it_for_its_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report("start", "From here to there.", option="--exact")
    report.figure("by the API", "ms", [3.0, 1.0, 2.0])
    report.note("Slurm: not installed")
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["by the API: 2 ms (1 to 3, n 3)", "Slurm: not installed"]
    section = report.section()
    assert section.startswith("## `python benchmarks/start.py --exact`")
    assert "| by the API | ms | 1 | 2 | 3 | 3 |  |" in section
    assert "- Slurm: not installed" in section


def test_a_revision_that_is_not_here_is_told_with_the_cure() -> None:
    with pytest.raises(NoTree) as caught, tree_of("no-such-revision"):
        pass
    assert str(caught.value).startswith("no-such-revision is not in this clone")
    assert "git fetch" in str(caught.value)
