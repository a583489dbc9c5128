"""The daemon's log: one line a fact, what is unknown left out, time and level as the journal."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpuschedd.logs import log_formatter
from tests.support.daemon import daemon_in


def test_a_line_has_its_facts_and_no_unknown_ones(tmp_path: Path) -> None:
    with daemon_in(tmp_path, "2x24G") as daemon:
        daemon.run("gsub", "-g", "2", "--wait", "-o", "/dev/null", "true")
        daemon.run("gsub", "-g", "0", "--wait", "-o", "/dev/null", "true")
        history = daemon.run("gq", "@").stdout
        log = daemon.log.read_text()
    assert " INFO job_placed job=1 uid=" in log
    assert " gpus=0,1\n" in log
    assert " INFO gpu_seen gpu=GPU-" in log
    assert "None" not in log
    assert "  placed, without a GPU\n" in history
    assert " \n" not in log


def test_the_journal_gets_the_level_as_it_reads_it_and_no_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = logging.LogRecord("x", logging.WARNING, "x", 1, "gpus_down error=%s", ("a\nb",), None)
    with (tmp_path / "stderr").open("w") as stream:
        assert log_formatter(stream).format(record).endswith(" WARNING gpus_down error=a\\nb")
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        assert log_formatter(stream).format(record) == "<4>WARNING gpus_down error=a\\nb"
