"""The command key: one for what runs alike, another for what does not."""

from __future__ import annotations

import pytest

from gpuschedd.core.length_key import KEY_BYTES_MAX, length_key


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("/home/eva/train --lr 0.1", "train"),
        ("python train.py 1", "train.py"),
        ("/usr/bin/python3.11 -u src/train.py", "train.py"),
        ("python -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python -W ignore -X dev -u train.py", "train.py"),
        ("python -mtrain.run 4", "train.run"),
        ("python -um train.run 4", "train.run"),
        ("python3.12t train.py", "python3.12t"),
        ("python -W ignore", "python"),
        ("python - 4", "python"),
        ("bash --norc run.sh", "run.sh"),
        ("bash -o pipefail -O extglob run.sh", "run.sh"),
        ("bash -- run.sh", "run.sh"),
        ("torchrun --standalone --nproc_per_node 4 train.py", "train.py"),
        ("torchrun --nnodes 1 -m train.run", "train.run"),
        ("perl -I lib -w fold.pl", "fold.pl"),
        ("python", "python"),
        ("bash run.sh 4", "run.sh"),
        ("torchrun --nproc_per_node=4 train.py", "train.py"),
        ("", ""),
    ],
)
def test_the_command_says_it_where_no_name_was_given(command: str, key: str) -> None:
    assert length_key(None, command.encode().split()) == key


def test_digits_of_names_and_shell_lines_do_not_tell_runs_apart() -> None:
    assert length_key("sweep-0012", [b"python", b"x.py"]) == "sweep-"
    line = b"python train.py --seed 12 > out.3"
    assert length_key(None, [b"/bin/sh", b"-c", line]) == "python train.py --seed  > out."
    assert length_key(None, [b"bash", b"-lc", b"a1"]) == "a"
    assert length_key(None, [b"bash", b"--norc", b"-o", b"pipefail", b"-ec", b"b2"]) == "b"
    assert length_key(None, [b"python", b"-c", b"fit(12)"]) == "fit()"
    assert length_key(None, [b"python", b"-cfit(12)"]) == "fit()"
    assert length_key(None, [b"node", b"-e", b"fit(12)"]) == "fit()"


def test_a_name_of_digits_says_no_more_than_none() -> None:
    assert length_key("2026", [b"python", b"train.py"]) == "train.py"
    assert length_key("2026", []) == ""


def test_the_name_that_clients_make_of_a_command_is_none() -> None:
    assert length_key("python3", [b"/usr/bin/python3", b"train.py"]) == "train.py"
    assert length_key("python", [b"/bin/sh", b"-c", b"python train.py 3"]) == "python train.py "
    assert length_key("mine", [b"/usr/bin/python3", b"train.py"]) == "mine"


def test_a_key_is_short_and_text() -> None:
    long = "ä" * KEY_BYTES_MAX
    assert length_key(long, []) == "ä" * (KEY_BYTES_MAX // 2)
    assert length_key(None, [b"/x/\xff"]) == "\\udcff"
