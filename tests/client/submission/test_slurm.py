"""Slurm's options in gsub's words."""

from __future__ import annotations

import pytest

from gpusched_client.errors import Invalid
from gpusched_client.submission.slurm import translate


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("-t 5 -J n -o a -e b -D /d", "--time=5 --name=n --output=a --error=b --chdir=/d"),
        ("--cpus-per-task=4 -c 2 --mem 4G --nice=5", "--cpus=4 --cpus=2 --mem=4G --nice=5"),
        ("-H --hold", "--hold --hold"),
        ("-t 0 --time=0-00:00:00", "--time=unlimited --time=unlimited"),
        ("--time=", "--time="),
        ("--mem=0 -N 1 -n1 --ntasks=1", ""),
        ("-G2 --gpus=a100:2 --gres=gpu", "--gpus=2 --gpus=2 --gpu-model=a100 --gpus=1"),
    ],
)
def test_what_means_the_same_is_taken(words: str, taken: str) -> None:
    translation = translate(words.split(), "here")
    assert (" ".join(translation.taken), translation.ignored) == (taken, [])


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        ("-p short --qos=normal", ["-p", "--qos"]),
        ("--ntasks=4 --gres=lustre:1", ["--ntasks", "--gres=lustre:1"]),
        ("--exclusive --nice -t", ["--exclusive", "--nice", "-t"]),
    ],
)
def test_what_has_no_meaning_is_named(words: str, ignored: list[str]) -> None:
    translation = translate(words.split(), "here")
    assert (translation.taken, translation.ignored) == ([], ignored)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--array=1-9", "here: --array is not supported"),
        ("-d afterok:1", "here: -d is not supported"),
        ("-N2", "here: -N=2: there is one host"),
        ("--gres=gpu:a:b:2", "is not understood"),
        ("train.py", "'train.py' is not an option"),
    ],
)
def test_what_would_run_something_else_is_refused(words: str, problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        translate(words.split(), "here")
