"""What the submitter's shell had, end to end: the job has it, whatever the daemon itself has."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

import pytest

from tests.support.daemon import DaemonProcess, clean_up

#: As a login that keeps files to itself may start it: what a job would have by mere inheritance.
DAEMON_S_OWN = 'umask 077; ulimit -S -s 4096; ulimit -S -c 0; exec "$@"'


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that has less of everything than who submits."""
    place = tmp_path_factory.mktemp("narrow")
    daemon = DaemonProcess(place, "1x24G", wrapper=["sh", "-c", DAEMON_S_OWN, "sh"])
    daemon.start()
    yield daemon
    clean_up(daemon)


def typed(daemon: DaemonProcess, before: str, *words: str) -> list[str]:
    """The lines that a job writes, submitted by gsub after these lines of a shell."""
    output = daemon.work_dir / "job.out"
    line = shlex.join(["gsub", "--wait", "-g0", "-o", str(output), *words])
    said = daemon.run_shell(f"{before} {line}")
    assert said.returncode == 0, said.stderr
    return output.read_text().split("\n")[:-1]


def test_a_job_has_its_submitters_limits_umask_nice_value_and_cpus(narrow: DaemonProcess) -> None:
    """No limit is a limit to carry too, and 022 is sent although it is the usual umask."""
    cpu = max(os.sched_getaffinity(0))
    before = 'umask 022; ulimit -S -s "$(ulimit -H -s)"; ulimit -S -c "$(ulimit -H -c)"; '
    job = "ulimit -s; ulimit -c; umask; nice; grep Cpus_allowed_list /proc/self/status"
    stack, core = narrow.run_shell("ulimit -H -s; ulimit -H -c").stdout.split()
    assert stack != "4096"
    found = typed(narrow, f"{before} taskset -c {cpu} nice -n 7", "-c", job)
    nice = str(min(19, os.nice(0) + 7))
    assert found == [stack, core, "0022", nice, f"Cpus_allowed_list:\t{cpu}"]


def test_a_captured_script_knows_where_it_was(narrow: DaemonProcess) -> None:
    """It runs as a copy elsewhere: $0 is no way to what lies beside it, GPUSCHED_SCRIPT is."""
    place = narrow.work_dir / "project"
    place.mkdir()
    (place / "helper.sh").write_text("answer=42\n")
    script = place / "job.sh"
    script.write_text(
        "#!/bin/bash\nprintf '%s\\n' \"$GPUSCHED_SCRIPT\"\n"
        'cd "$(dirname "$GPUSCHED_SCRIPT")" && . ./helper.sh && echo "$answer"\n'
    )
    found = typed(narrow, "GPUSCHED_SCRIPT=/of/the/submitting/job", "--script", "project/job.sh")
    assert found == [str(script), "42"]
