"""Slurm's options in gsub's words: each of sbatch's has a fate, and none that counts is dropped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusched_client.errors import Invalid
from gpusched_client.submission.slurm import Translation, read_line, translate
from gpusched_client.submission.slurm_options import (
    BY_NAME,
    SLURM_OPTIONS,
    Fate,
    SlurmOption,
    Takes,
)

SBATCH = Path(__file__).parents[2] / "data/sbatch-options.txt"
HOST = os.uname().nodename.partition(".")[0]


def of(*lines: str, gpus: int | None = None) -> Translation:
    """What comes of these lines, numbered from 1."""
    given = [
        option
        for number, line in enumerate(lines, start=1)
        for option in read_line(line.split(), f"line {number}")
    ]
    return translate(given, gpus)


def test_every_option_of_sbatch_has_a_fate() -> None:
    rows = [line.split() for line in SBATCH.read_text().splitlines() if line[:1] == "-"]
    assert len(rows) > 100
    listed = {(name, "" if letter == "-" else letter, takes) for name, letter, takes in rows}
    known = {(option.name, option.letter, option.takes.value) for option in SLURM_OPTIONS}
    assert listed ^ known == set()
    assert len(BY_NAME) == len(SLURM_OPTIONS) + sum(bool(option.letter) for option in SLURM_OPTIONS)


@pytest.mark.parametrize(
    "option",
    [option for option in SLURM_OPTIONS if option.fate is Fate.REFUSED],
    ids=lambda o: o.name,
)
def test_what_would_run_something_else_is_refused_with_its_line_and_a_cure(
    option: SlurmOption,
) -> None:
    name, letter, takes, _, cure = option
    assert cure
    for written in filter(None, (name, letter)):
        words = [written] if takes is not Takes.VALUE else [written, "x"]
        with pytest.raises(Invalid) as caught:
            translate(read_line(words, "job.sh: line 3"))
        assert caught.value.message.startswith(f"job.sh: line 3: {written}")
        assert caught.value.message.endswith(cure)


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("-t 5 -J n -o a -e b -D /d", "--time=5 --name=n --output=a --error=b --chdir=/d"),
        ("--mem 4G --nice=5 -H", "--nice=5 --hold --mem=4096M"),
        ("--hold --hold", "--hold"),
        ("-t 0", "--time=unlimited"),
        ("--time=0-00:00:00", "--time=unlimited"),
        ("--time=", "--time="),
        ("--mem=0 -N 1 -n1", ""),
        ("--nodes=1-4 --ntasks=1", ""),
        ("--nice", "--nice=100"),
        ("--job=abbreviated", "--name=abbreviated"),
        ("-Hn1", "--hold"),
    ],
)
def test_what_means_the_same_is_taken(words: str, taken: str) -> None:
    translation = of(words)
    assert (" ".join(translation.taken), translation.ignored) == (taken, [])


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("-G2", "--gpus=2"),
        ("--gpus=a100:2", "--gpus=2 --gpu-model=a100"),
        ("--gres=gpu", "--gpus=1"),
        ("--gres=gpu:2", "--gpus=2"),
        ("--gres=gres/gpu:a100:3", "--gpus=3 --gpu-model=a100"),
        ("--gres=none", "--gpus=0"),
        ("--gres=gpu:0", "--gpus=0"),
        ("--gpus-per-node=2", "--gpus=2"),
        ("--gpus-per-task=2", "--gpus=2"),
        ("--ntasks=4 --gpus-per-task=1", "--gpus=4 --cpus=4"),
        ("--ntasks-per-node=2 --gpus-per-task=v100:2", "--gpus=4 --gpu-model=v100 --cpus=2"),
        ("--gpus=4 --gpus-per-task=2 --cpus-per-task=3", "--gpus=4 --cpus=6"),
        ("--ntasks=8 --ntasks-per-gpu=4", "--gpus=2 --cpus=8"),
        ("--gpus-per-socket=2 --sockets-per-node=2", "--gpus=4"),
        ("--gpus=2 --gres=gpu:2", "--gpus=2"),
        ("--tres-per-task=cpu=3,gres/gpu=2 -n2", "--gpus=4 --cpus=6"),
        ("--gpus=2 --cpus-per-gpu=4", "--gpus=2 --cpus=8"),
        ("--gpus=2 --mem-per-gpu=10G", "--gpus=2 --mem=20480M"),
        ("--ntasks=4", "--cpus=4"),
        ("--ntasks-per-node=4 --mem-per-cpu=1G", "--cpus=4 --mem=4096M"),
        ("--gpus=2 --ntasks-per-gpu=4", "--gpus=2 --cpus=8"),
        ("--gpus=4 --gpus-per-task=2", "--gpus=4 --cpus=2"),
        ("-c4 --mem-per-cpu=2000", "--cpus=4 --mem=8000M"),
        ("--mem=4000", "--mem=4000M"),
        ("--mem=512K", "--mem=524288B"),
    ],
)
def test_counts_are_those_of_the_one_host(words: str, taken: str) -> None:
    """What counts is not said to be ignored."""
    translation = of(words)
    assert (" ".join(translation.taken), translation.ignored) == (taken, [])


def test_the_last_of_an_option_counts_and_counts_depend_on_all_lines() -> None:
    translation = of("--gpus-per-task=2 -t 5", "-n 9 --time=6", "--ntasks=3")
    assert translation.lines == [
        ("line 2", ("--time=6",)),
        ("line 1", ("--gpus=6",)),
        ("line 3", ("--cpus=3",)),
    ]


def test_counts_per_gpu_are_of_the_gpus_that_gsubs_own_option_asks_for() -> None:
    assert of("--gpus=2 --cpus-per-gpu=4", gpus=3).taken == ["--gpus=2", "--cpus=12"]


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        ("-p short --qos=normal", ["-p", "--qos"]),
        ("--ntasks=4 --cpus-per-gpu=2 --gpus=1", ["--ntasks"]),
        ("--ntasks=4 --ntasks-per-node=4", ["--ntasks-per-node"]),
        ("--sockets-per-node=2 --gpus=2", ["--sockets-per-node"]),
        ("--gpus=0 --ntasks-per-gpu=4", ["--ntasks-per-gpu"]),
        ("--gres=lustre:1", ["--gres"]),
        ("--gres=gpu:1,lustre:2", ["--gres"]),
        ("--exclusive --export=ALL", ["--exclusive", "--export"]),
        (f"-w {HOST} -x other", ["-w", "-x"]),
        ("--open-mode=truncate --propagate", ["--open-mode", "--propagate"]),
        ("-vvQ", ["-v", "-Q"]),
    ],
)
def test_what_is_harmless_is_named(words: str, ignored: list[str]) -> None:
    assert [given.written for given in of(words).ignored] == ignored


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("-N2", "line 1: -N=2 is more than the one host"),
        ("--nodes=2-4", "is more than the one host"),
        ("-w elsewhere", "names another host"),
        (f"-x a,{HOST}", "excludes the one host there is"),
        ("--export=NONE", "env -i"),
        ("--export=ALL,A=1", "set variables before gsub"),
        ("--open-mode=append", "put %j into their names"),
        ("--propagate=NONE", "ulimit"),
        ("--gres=gpu:1,shard:2", "shard has no size; share a GPU with --vram"),
        ("--gres=mps:50", "mps has no size"),
        ("--gres=GPU:2", "write gpu:COUNT or gpu:MODEL:COUNT"),
        ("--gres=gpus:2", "write gpu:COUNT or gpu:MODEL:COUNT"),
        ("--gres=gpu=2", "write gpu:COUNT or gpu:MODEL:COUNT"),
        ("--gres=gpu:a:b:2", "is not understood"),
        ("--gres=gpu:a:1,gpu:b:1", "several kinds of GPUs"),
        ("--gpus=a:1,b:1", "is not understood"),
        ("--gpus=$N", "is not expanded here"),
        ("--gres=gpu:${N}", "is not expanded here"),
        ("--gpus=4 --gres=gpu:2", "asks for 2 GPUs and --gpus=4 for 4; keep one of them"),
        ("--gpus=3 --ntasks=2 --gpus-per-task=1", "asks for 2 GPUs and --gpus=3 for 3"),
        ("--gpus-per-socket=1", "needs --sockets-per-node"),
        ("--ntasks=3 --ntasks-per-gpu=2", "does not divide the 3 tasks"),
        ("--ntasks=none", "is not a number from 1"),
        ("--mem=4G --mem-per-cpu=1G", "exclude each other"),
        ("--mem=4Q", "is not an amount of memory"),
        ("--grse=gpu:2", "line 1: no option --grse is known; did you mean --gres?"),
        ("--gpu=2", "did you mean --gpus?"),
        ("--vram=8G", "--vram is gsub's own; write it as #GSUB --vram=8G"),
        ("-Z", "no option -Z is known"),
        ("--time", "--time needs a value"),
        ("--hold=yes", "--hold takes no value"),
        ("\u2013gpus=2", "begins with a dash that is no '-'"),
        ("train.py", "'train.py' is not an option"),
    ],
)
def test_what_cannot_be_done_or_is_not_known_is_refused(words: str, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        of(words)
    assert problem in caught.value.message
