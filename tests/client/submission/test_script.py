"""Scripts: where options in them are read, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched_client.errors import Invalid
from gpusched_client.submission.script import script_named, script_of


def options_of(*lines: str) -> tuple[str, ...]:
    return script_of(("#!/bin/bash\n" + "\n".join(lines)).encode(), "f").options


def test_a_byte_order_mark_is_stripped_and_the_lines_behind_it_are_read() -> None:
    script = script_of(b"\xef\xbb\xbf#!/bin/bash\n#SBATCH --gpus=4\n#GSUB -t 5\n", "f")
    assert script.content.startswith(b"#!/bin/bash\n")
    assert [(given.written, given.value) for given in script.slurm] == [("--gpus", "4")]
    assert (script.options, script.warnings) == (("-t", "5"), ())


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH--gpus=4",
        "#gsub -g 4",
        "#sbatch --gpus=4",
        "# SBATCH --gpus=4",
        "# gsub -g 4",
        "#SBATCH\u00a0--gpus=4",
        "#SBATCH\u2013gpus=4",
        "#GSUB: -g 4",
        "#SBACTH --gpus=4",
        "#sbtach -G 4",
        "#GUSB -g 4",
        "#SLURM --gpus=4",
        "#PBS -l ngpus=4",
        "#BSUB -gpu num=4",
        "#$ -l gpu=4",
    ],
)
def test_a_line_that_looks_like_options_and_is_not_taken_is_warned_about(line: str) -> None:
    script = script_of(f"#!/bin/bash\n\n{line}\n".encode(), "job.sh")
    assert (script.options, script.slurm) == ((), ())
    (warning,) = script.warnings
    assert warning.startswith("job.sh: line 3 is not read: ")


def test_options_behind_the_first_command_are_warned_about_with_its_line() -> None:
    script = script_of(b"#!/bin/bash\nset -euo pipefail\n#SBATCH --gpus=4\n", "job.sh")
    assert script.slurm == ()
    assert script.warnings == (
        "job.sh: line 3 is not read: it stands behind line 2, the first command; move it up",
    )


@pytest.mark.parametrize(
    "line",
    [
        "##SBATCH --gpus=4",
        "# run with sbatch --gpus=4",
        "# sbatch this",
        "# train --gpus=4",
        "# note -- see the README",
        "# -g 4",
        "#",
        "#GSUBS",
    ],
)
def test_a_comment_is_no_line_of_options(line: str) -> None:
    assert script_of(f"#!/bin/bash\n{line}\n".encode(), "f").warnings == ()


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("#GSUB -J lr#3", ("-J", "lr#3")),
        ("#GSUB -J a # b", ("-J", "a")),
        ("#GSUB -J 'a # b' -g 2", ("-J", "a # b", "-g", "2")),
        ('#GSUB -J "#1" #2', ("-J", "#1")),
        ("#GSUB -J a\\ #b", ("-J", "a #b")),
        ("#GSUB # nothing", ()),
        ("\t#GSUB\t-g 2\r", ("-g", "2")),
    ],
)
def test_a_hash_begins_a_comment_only_at_the_begin_of_a_word(
    line: str, options: tuple[str, ...]
) -> None:
    assert options_of(line) == options


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("#SBATCH --job-name=lr#3", ["lr#3"]),
        ("#SBATCH -J lr#3 -t 5", ["lr#3", "5"]),
        ("#SBATCH --job-name=a # b", ["a"]),
        ("#SBATCH --job-name='a # b' --gpus=2", ["a # b", "2"]),
        ('#SBATCH -J "#1" #2', ["#1"]),
        ("#SBATCH -J a\\ #b", ["a #b"]),
        ("#SBATCH # nothing", []),
        ("\t#SBATCH\t--gpus=2\r", ["2"]),
    ],
)
def test_a_hash_in_a_line_of_slurms_is_taken_as_in_ours(line: str, values: list[str]) -> None:
    given = script_of(f"#!/bin/bash\n{line}\n".encode(), "f").slurm
    assert [each.value for each in given] == values


def test_a_line_of_options_that_goes_on_in_the_next_is_refused() -> None:
    with pytest.raises(Invalid, match=r"f: line 2: a line of options is not continued by"):
        script_of(b"#!/bin/bash\n#SBATCH --gpus=2 \\\n  --time=5\n", "f")


def test_a_first_line_that_ends_in_a_carriage_return_is_refused() -> None:
    with pytest.raises(Invalid, match=r"line 1 of f ends in CR.*dos2unix"):
        script_of(b"#!/usr/bin/env python3\r\nprint()\r\n", "f")


def test_a_script_of_another_language_runs_from_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("#!/usr/bin/env python3\n#SBATCH --gpus=2\nimport helper\n")
    script = script_named(str(path))
    assert script is not None
    assert not script.is_captured
    assert script.place_command == [b"/usr/bin/env", b"python3", bytes(path)]
    path.chmod(0o755)
    assert script.place_command == [bytes(path)]
