"""The configuration: every key documented, every mistake named with its line and cure."""

from __future__ import annotations

import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpusched_client import paths
from gpuschedd.cli import cli
from gpuschedd.config import toml as config_file
from gpuschedd.config.keys import Config
from gpuschedd.config.toml import ConfigError, changed_keys, toml_name, with_limits
from gpuschedd.daemon import SYSTEM_DEFAULT_LIMIT_S, SYSTEM_MAX_LIMIT_S

EXAMPLE = Path(__file__).parents[2] / "systemd" / "config.example.toml"
SYSTEM = with_limits(Config(), SYSTEM_DEFAULT_LIMIT_S, SYSTEM_MAX_LIMIT_S)


def keys(section: Any, prefix: str = "") -> list[str]:
    """Every key that can be set, as table.key."""
    found = []
    for item in fields(section):
        value = getattr(section, item.name)
        name = prefix + toml_name(item.name)
        if is_dataclass(value):
            found += keys(value, f"{name}.")
        elif name not in ("shares", "billing", "limits.users"):
            found.append(name)
    return found


def spelt_out() -> str:
    """The example with every key set."""
    return re.sub(r'^#(?=[\w"\[])', "", EXAMPLE.read_text(), flags=re.MULTILINE)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_the_example_as_shipped_changes_nothing(tmp_path: Path) -> None:
    assert config_file.load(write(tmp_path, EXAMPLE.read_text()), base=SYSTEM) == SYSTEM


def test_the_example_shows_every_key_at_its_default(tmp_path: Path) -> None:
    text = spelt_out()
    table = ""
    shown = set()
    for line in text.splitlines():
        if match := re.match(r"\[(\w+)\]", line):
            table = f"{match[1]}."
        elif match := re.match(r"(\w+) =", line):
            shown.add(table + match[1])
    assert set(keys(SYSTEM)) <= shown
    found = config_file.load(write(tmp_path, text), base=SYSTEM)
    told_apart = {"shares", "billing", "limits.users", "scheduling.max_cpu_jobs"}
    assert set(changed_keys(SYSTEM, found)) <= told_apart


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\nx = 1\n", r":2: unknown key x; known here: .*simulate"),
        ("[limits]\nmax_gpu = 1\n", r":2: unknown key limits.max_gpu; known here: .*max_gpus"),
        ("[limits.bob]\nshares = 1\n", r":2: unknown key limits.bob.shares"),
        ("[limits]\nmax_gpus = -1\n", r":2: limits.max_gpus = -1: must be a whole number"),
        (
            '[sharing]\nignore_processes = ["name=ollama"]\n',
            r":2: sharing.ignore_processes = .*no uid.*write name=ollama,uid=NUMBER",
        ),
        (
            '[sharing]\nignore_processes = ["below=1G,name=x"]\n',
            r":2: sharing.ignore_processes = .*no uid",
        ),
        ('simulate = "4x"\n', r":1: simulate = '4x': .*write 4x24G"),
        ('[scheduling]\nkill_grace = "30"\n', r":2: .*write 30 without quotes"),
        ("private = 1\n", r":1: private = 1: must be true or false"),
        ("x = \n", r"not TOML"),
        ('[jobs]\nusers = "alice"\n', r":2: jobs.users .*a list of texts"),
        ("[limits]\nmax_jobs = 2\n[limits.bob]\nmax_jobs = -1\n", r":4: limits.bob.max_jobs"),
        ('[limits]\nmax_jobs = 2\n[limits."a.b"]\nmax_jobs = -1\n', r":4: limits.a.b.max_jobs"),
        ("# shares = 1\n[shares]\nbob = 1\neva = -1\n", r":4: shares.eva = -1: must be a number"),
        ("scheduling.w_age = 0\n", r":1: scheduling.w_age = 0"),
        ("half_life = 3\n", r":1: unknown key half_life; it is written scheduling.half_life"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_cure(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_file.load(write(tmp_path, text))


def test_a_user_s_own_limits_come_before_those_of_a_group(tmp_path: Path) -> None:
    text = (
        "[limits]\nmax_gpus = 4\nmax_jobs = 9\n[limits.alice]\nmax_gpus = 'unlimited'\n"
        "[limits.'@students']\nmax_gpus = 1\nqueued_jobs = 5\n"
    )
    limits = config_file.load(write(tmp_path, text)).limits
    alice, bob, carol = (
        limits.of("alice", ["students"]),
        limits.of("bob", ["students"]),
        limits.of("carol", []),
    )
    assert (alice.max_gpus, alice.max_jobs, alice.queued_jobs) == (None, 9, 10_000)
    assert (bob.max_gpus, bob.max_jobs, bob.queued_jobs) == (1, 9, 5)
    assert (carol.max_gpus, carol.max_jobs) == (4, 9)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "private = true\n")
    path.chmod(0o664)
    with pytest.raises(ConfigError, match="others may write it"):
        config_file.load(path, others_may=0o055)
    assert config_file.load(path, others_may=0o075).private  # a user's own group, in user mode
    path.chmod(0o606)
    with pytest.raises(ConfigError, match="chmod go-w"):
        config_file.load(path, others_may=0o075)


@pytest.mark.root
def test_a_file_of_another_owner_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "private = true\n")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        config_file.load(path, others_may=0o055)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_directory_that_others_may_write_is_refused_like_the_file(
    tmp_path: Path, depth: int
) -> None:
    """They could put another file there; one with the sticky bit keeps them from it."""
    place = tmp_path / "above" / "own"
    place.mkdir(parents=True)
    path = write(place, "private = true\n")
    path.chmod(0o600)
    directory = path.parents[depth]
    for others_may in (0o055, 0o075):
        directory.chmod(0o755)
        assert config_file.load(path, others_may=others_may).private
        directory.chmod(0o777)
        with pytest.raises(ConfigError, match=f"others may write .*chmod go-w {directory}"):
            config_file.load(path, others_may=others_may)
        directory.chmod(0o1777)
        assert config_file.load(path, others_may=others_may).private


def test_a_file_that_was_taken_away_or_is_a_link_out_of_reach_is_no_default(tmp_path: Path) -> None:
    """Who may write the directory makes limits and users what they are by default."""
    open_place, safe = tmp_path / "open", tmp_path / "safe"
    for place in (open_place, safe):
        place.mkdir()
    open_place.chmod(0o777)
    with pytest.raises(ConfigError, match=f"others may write {open_place}"):
        config_file.load(open_place / "config.toml", others_may=0o055)
    write(safe, "private = true\n").chmod(0o600)
    (open_place / "config.toml").symlink_to(safe / "config.toml")
    with pytest.raises(ConfigError, match=f"others may write {open_place}"):
        config_file.load(open_place / "config.toml", others_may=0o055)
    assert config_file.load(safe / "nothing" / "config.toml", others_may=0o055) == Config()


@pytest.mark.root
def test_a_directory_of_another_owner_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "private = true\n")
    path.chmod(0o600)
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ConfigError, match=f"{tmp_path} belongs to uid 12345"):
        config_file.load(path, others_may=0o055)


def test_a_file_that_is_named_and_not_there_is_no_default(tmp_path: Path) -> None:
    """By the daemon as by check-config: limits and users would be at their defaults."""
    missing = str(tmp_path / "nonexistent.toml")
    for words in (["--config", missing], ["--config", missing, "check-config"]):
        said = CliRunner().invoke(cli, words)
        assert said.exit_code == 78
        assert f"{missing}: no such file" in said.output


def test_a_fifo_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="is not a file"):
        config_file.load(tmp_path / "config.toml")


@pytest.mark.parametrize(
    "text",
    [
        "gpu_sample_interval = 0",
        "gpu_sample_interval = inf",
        "scheduling.half_life = 0",
        "scheduling.kill_grace = nan",
        "scheduling.max_time_limit = 0",
        "nvml.sweep_deadline = 0",
    ],
)
def test_durations_that_would_stop_or_spin_the_daemon_are_refused(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match=r"config.toml:1: .* must be"):
        config_file.load(write(tmp_path, text))


def test_the_default_limit_is_no_longer_than_the_longest(tmp_path: Path) -> None:
    """Who lowers the longest alone would refuse every job without --time."""
    found = config_file.load(write(tmp_path, '[scheduling]\nmax_time_limit = "4h"\n'), base=SYSTEM)
    assert found.scheduling.usual_time_limit_s == 4 * 3600.0
    assert SYSTEM.scheduling.usual_time_limit_s == SYSTEM_DEFAULT_LIMIT_S
    assert Config().scheduling.usual_time_limit_s is None


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    assert config_file.load(tmp_path / "none", others_may=0o055) == Config()


def test_check_config_answers_as_the_daemon_would(tmp_path: Path) -> None:
    """Exit 78 with the line of the mistake, as at the start; 0 with what is set."""
    found = CliRunner().invoke(cli, ["check-config", str(write(tmp_path, "[limits]\nmax = 1\n"))])
    assert found.exit_code == 78
    assert "config.toml:2: unknown key limits.max" in found.output
    found = CliRunner().invoke(cli, ["check-config", str(write(tmp_path, "private = true\n"))])
    assert (found.exit_code, "it sets private" in found.output) == (0, True)
    found = CliRunner().invoke(cli, ["check-config", str(tmp_path / "slip.toml")])
    assert (found.exit_code, "slip.toml: no such file" in found.output) == (78, True)


def test_check_config_never_guesses_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for root the configuration in use is the user's, unless --system is said."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = CliRunner().invoke(cli, ["check-config"])
    assert found.output.startswith(str(tmp_path))


@pytest.mark.parametrize(
    "words", [["check-config"], ["check-config", "--system"], ["--system", "check-config"]]
)
def test_check_config_reads_the_system_s_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """An operator who forgets --system is not told that a bad file is good."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(paths, "SYSTEM_CONFIG", str(write(tmp_path, "bogus = 1\n")))
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 78
    assert "config.toml:1: unknown key bogus" in found.output


def test_check_config_takes_the_daemon_s_options(tmp_path: Path) -> None:
    path = str(write(tmp_path, "private = true\n"))
    said = CliRunner().invoke(cli, ["--config", path, "check-config"])
    assert said.output.startswith(path)
    said = CliRunner().invoke(cli, ["--config", path, "--set", "gpus=x", "check-config"])
    assert said.exit_code == 78


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xef\xbb\xbf[limits]\nmax_gpus = 3\n")
    assert config_file.load(path).limits.max_gpus == 3


def test_what_is_no_text_is_named_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory; name a file"):
        config_file.load(tmp_path)
    path = tmp_path / "config.toml"
    path.write_bytes(b"[limits]\n\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 \(byte 9\); save it as UTF-8"):
        config_file.load(path)
