"""The daemon's log: one line a fact, what is unknown left out, time and level as the journal."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuschedd.logs import UnreadHandler, log_formatter
from tests.support.daemon import daemon_in


def test_a_line_has_its_facts_and_no_unknown_ones(tmp_path: Path) -> None:
    with daemon_in(tmp_path, "2x24G") as daemon:
        daemon.run("gsub", "-g", "2", "--wait", "-o", "/dev/null", "true")
        daemon.run("gsub", "-g", "0", "--wait", "-o", "/dev/null", "true")
        history = daemon.run("gq", "@").stdout
        log = daemon.log.read_text()
    assert " INFO job_placed job=1 uid=" in log
    assert " gpus=0,1 rule=first rank=1\n" in log
    assert " INFO gpu_seen gpu=GPU-" in log
    assert "None" not in log
    assert "  placed without a GPU: a slot for jobs without GPUs was free\n" in history
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


def test_a_log_that_nobody_reads_stops_nobody_and_says_what_it_lacks() -> None:
    """A pipe takes 64 KiB; whoever wrote more into it would wait for the reader for ever."""
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    log = logging.getLogger("gpuschedd")
    with open(writable, "w") as stream:
        handler = UnreadHandler(stream)
        log.addHandler(handler)
        try:
            for number in range(2_000):
                log.warning("line=%d %s", number, "x" * 100)
            fitted = os.read(readable, 2**20).decode().splitlines()
            log.warning("last")
            told = os.read(readable, 2**20).decode().splitlines()
        finally:
            log.removeHandler(handler)
            os.close(readable)
    assert [line.split()[0] for line in fitted] == [f"line={n}" for n in range(len(fitted))]
    dropped = 2_000 - len(fitted)
    assert 0 < dropped < 2_000
    assert told == [f"log_lines_dropped lines={dropped} text=nobody had read the log", "last"]


def test_a_daemon_without_standard_streams_writes_to_no_file_of_its_own(tmp_path: Path) -> None:
    """Descriptors 0 to 2 would be given to what it opens next."""
    told = tmp_path / "told"
    script = (
        "import os, sys; os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None;"
        "from gpuschedd.logs import set_up_logging; set_up_logging();"
        f"fd = os.open({str(told)!r}, os.O_WRONLY | os.O_CREAT);"
        "print('to nobody', flush=True); print('to nobody', file=sys.stderr, flush=True);"
        "os.write(fd, b'%d' % (fd > 2))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert told.read_text() == "1"
