"""The daemon's command line: what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpusched_client import paths
from gpuschedd import cli
from gpuschedd.daemon import Options


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Options]:
    """What daemons would have been started with; the places of this test alone."""
    found: list[Options] = []

    def run(options: Options) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    for name in ("RUNTIME", "STATE", "CONFIG"):
        variable = f"XDG_{name}_{'DIR' if name == 'RUNTIME' else 'HOME'}"
        monkeypatch.setenv(variable, str(tmp_path / name.lower()))
    return found


def typed(*words: str) -> Result:
    """The end of the command."""
    return CliRunner().invoke(cli.cli, words)


def test_beside_the_system_s_daemon_one_s_own_has_to_be_asked_for(started: list[Options]) -> None:
    """Clients ask the system's: who forgot about his own would go on submitting to a toy."""
    assert typed().exit_code == 0
    Path(paths.SYSTEM_SOCKET).touch()
    refused = typed("--simulate", "4x24G")
    assert refused.exit_code == 78
    assert paths.SYSTEM_SOCKET in refused.output
    assert "--private" in refused.output
    assert len(started) == 1
    said = typed("--private")
    assert said.exit_code == 0
    assert f"export GPUSCHED_SOCKET={started[-1].socket}" in said.output
    assert typed("--socket", "/x/s.sock").output == ""
    assert typed("--system").exit_code == 0
    assert [options.is_system for options in started] == [False, False, False, True]


def test_who_has_no_home_names_the_places(
    started: list[Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback: what is missing, and the options that take its place."""

    def no_home(_app: str) -> str:
        raise RuntimeError("no home")

    for name in ("user_state_dir", "user_config_dir"):
        monkeypatch.setattr(f"platformdirs.{name}", no_home)
    refused = typed()
    assert refused.exit_code == 78
    assert "has no home directory" in refused.output
    assert "--state-dir" in refused.output
    words = ("--socket", "/x/s", "--state-dir", "/x", "--config", "/dev/null")
    assert typed(*words).exit_code == 0
    assert len(started) == 1


@pytest.mark.parametrize("option", ["--socket", "--state-dir", "--config", "--simulate", "--gpus"])
def test_an_option_with_an_empty_value_is_not_taken_as_left_out(
    started: list[Options], option: str
) -> None:
    """It is a variable that is not set: another place, or the real GPUs, were not meant."""
    refused = typed(option, "")
    assert (refused.exit_code != 0, option in refused.output) == (True, True)
    assert started == []


@pytest.mark.parametrize("host", ["4x24", "4x", "0x24G", "2x80G+4x24", "4x0G"])
def test_a_simulated_host_that_is_none_is_refused_in_the_words_of_its_option(
    started: list[Options], host: str
) -> None:
    """Not as a key of the configuration, which nobody wrote."""
    refused = typed("--simulate", host)
    assert refused.exit_code == 78
    assert refused.output.startswith(f"gpuschedd: --simulate: host '{host}': ")
    assert started == []
