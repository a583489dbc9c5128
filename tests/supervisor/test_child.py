"""The child between fork and exec: what the job gets, and what is said where it gets nothing."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpuschedd.supervisor.errors import EnvironmentLost, ExecFailed
from gpuschedd.supervisor.program import execute, require_program
from tests.support.jobs import Host

ODD_WORDS = (b"", b"--", b"-x", b"a b", b"line\nline", b"\xff\xfe\x80", b"'\"$HOME", b"caf\xc3\xa9")


def test_argv_arrives_byte_for_byte(host: Host) -> None:
    job = host.start("/bin/cat", "/proc/self/cmdline", "/dev/null")
    script = host.start("/bin/sh", "-c", "cat /proc/$$/cmdline; exit 0", *ODD_WORDS)
    host.wait_exit(job)
    host.wait_exit(script)
    assert host.output(job) == b"/bin/cat\0/proc/self/cmdline\0/dev/null\0"
    assert host.output(script).split(b"\0")[3:-1] == list(ODD_WORDS)


def test_the_environment_is_the_spec_s_and_the_marks_and_nothing_else(host: Host) -> None:
    pairs = tuple((b"K%d" % index, word) for index, word in enumerate(ODD_WORDS))
    job = host.start("/bin/cat", "/proc/self/environ", environment=pairs)
    host.wait_exit(job)
    assert host.output(job).split(b"\0")[:-1] == [
        *(key + b"=" + value for key, value in pairs),
        b"GPUSCHED_JOB_ID=%d" % job.job_id,
        b"GPUSCHED_ATTEMPT=1",
        b"GPUSCHED_INSTANCE=" + host.root.name.encode(),
    ]


def test_no_descriptor_but_three_reaches_the_job(host: Host) -> None:
    job = host.start("ls", "-l", "/proc/self/fd")
    host.wait_exit(job)
    found = re.findall(r"(\d+) -> (.*)", host.output(job).decode())
    out = str(host.work / f"out.{job.job_id}")
    # ls itself has the directory open.
    assert [row for row in found if not row[1].startswith("/proc/")] == [
        ("0", "/dev/null"),
        ("1", out),
        ("2", out),
    ]


def test_session_umask_directory_and_signals_are_as_a_login_would_have_them(host: Host) -> None:
    line = "umask; pwd; ps -o sid= -p $$; echo $$; grep -E 'Sig(Blk|Ign)' /proc/self/status"
    job = host.sh(line, umask=0o027)
    host.wait_exit(job)
    umask, place, session, pid, *masks = host.output(job).decode().split()
    assert (umask, place) == ("0027", str(host.work))
    assert session == pid
    assert masks[:3] == ["SigBlk:", "0" * 16, "SigIgn:"]
    # 32 and 33 belong to the C library: no program can set them, and make leaves 32 ignored.
    assert int(masks[3], 16) & ~(0b11 << 31) == 0


def test_limits_are_lowered_and_never_raised(host: Host) -> None:
    rlimits = (("RLIMIT_NOFILE", 50, 60), ("RLIMIT_CORE", 0, 0), ("RLIMIT_STACK", -1, -1))
    job = host.sh("ulimit -Sn; ulimit -Hn; ulimit -c", rlimits=rlimits)
    host.wait_exit(job)
    assert host.output(job).split() == [b"50", b"60", b"0"]


def test_a_script_runs_under_its_interpreter_and_is_gone_afterwards(host: Host) -> None:
    script = b"#!/bin/sh -e\nstat -c '%a %U' \"$0\"\nprintf '%s|' \"$@\"\n"
    job = host.start(b"a b", b"", script=script)
    assert host.wait_exit(job).code == 0
    host.wait_dead(job)
    owner = job.path.owner()
    assert host.output(job) == f"400 {owner}\na b||".encode()
    assert list(host.scripts_dir.iterdir()) == []


def test_a_script_without_a_first_line_is_for_sh(host: Host) -> None:
    job = host.start(script=b"echo from $0; exit 4\n")
    assert host.wait_exit(job).code == 4
    assert b"from " + os.fsencode(host.scripts_dir) in host.output(job)


def test_both_streams_share_a_file_or_have_their_own(host: Host) -> None:
    both = host.sh("echo out; echo err >&2")
    apart = host.sh("echo out; echo err >&2", error=b"err")
    host.wait_exit(both)
    host.wait_exit(apart)
    assert host.output(both) == b"out\nerr\n"
    assert host.output(apart) == b"out\n"
    assert (host.work / "err").read_bytes() == b"err\n"


def test_the_first_attempt_truncates_and_later_ones_append(host: Host) -> None:
    (host.work / "log").write_text("old")
    host.wait_exit(host.sh("echo one", output=b"log"))
    host.wait_exit(host.sh("echo two", output=b"log", attempt=2))
    assert (host.work / "log").read_text() == "one\ntwo\n"


def test_a_symlink_and_a_fifo_with_a_reader_are_good_logs(host: Host) -> None:
    (host.work / "link").symlink_to("target")
    host.wait_exit(host.sh("echo linked", output=b"link"))
    os.mkfifo(host.work / "fifo")
    with open(os.open(host.work / "fifo", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        host.wait_exit(host.sh("echo piped", output=b"fifo"))
        assert reader.read() == b"piped\n"
    assert (host.work / "target").read_text() == "linked\n"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["no-such-command"], 127, "command not found: no-such-command"),
        ([""], 127, "command not found"),
        (["/nowhere/x"], 127, "command not found: /nowhere/x"),
        (["/etc/passwd"], 126, "Permission denied"),
        (["/etc"], 126, "/etc"),
        (["true", "x" * 200_000], 126, "Argument list too long"),
    ],
)
def test_a_command_that_cannot_run_ends_as_in_a_shell(
    host: Host, argv: list[str], code: int, words: str
) -> None:
    end = host.run(*argv)
    assert (end.code, end.cause) == (code, "exit")
    assert words in str(end.reason)


def test_a_closed_directory_in_path_is_no_command_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where PATH was root's: a command that is nowhere is not found; a closed path is closed."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)

    def execve(path: bytes, *_: object) -> None:
        if path.startswith(bytes(closed)):
            raise PermissionError(errno.EACCES, "Permission denied")
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "execve", execve)
    environment = {b"PATH": bytes(closed) + b":/bin"}
    with pytest.raises(ExecFailed, match="command not found: no-such") as failed:
        execute([b"no-such"], environment)
    assert failed.value.code == 127
    with pytest.raises(ExecFailed, match="Permission denied") as failed:
        execute([bytes(closed) + b"/sh"], environment)
    assert failed.value.code == 126


def test_a_place_behind_the_command_in_path_may_be_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One before it may have the command; what comes behind it is not looked at."""
    stale, really = os.fsencode(tmp_path / "stale"), os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if os.fsencode(path).startswith(stale):
            raise OSError(errno.ESTALE, "Stale file handle")
        return really(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    require_program([b"true"], {b"PATH": b"/bin:" + stale}, checked=True)
    with pytest.raises(EnvironmentLost, match=r"command .*/stale/true: Stale file handle"):
        require_program([b"true"], {b"PATH": stale + b":/bin"}, checked=True)


@pytest.mark.parametrize(
    ("argv", "lacks"),
    [
        ([b"/bin/sh"], None),
        ([b"/no/python", b"/x/script"], "command /no/python"),
        ([b"/usr/bin/env", b"no-python", b"/x/script"], "interpreter no-python"),
        ([b"/usr/bin/env", b"A=1", b"no-python"], None),
        ([b"/usr/bin/env", b"-S", b"no-python"], None),
        ([b"./by-env"], "interpreter no-python"),
        ([b"./by-path"], "interpreter /no/python"),
        ([b"./by-sh"], None),
    ],
)
def test_an_interpreter_that_was_there_at_submit_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[bytes], lacks: str | None
) -> None:
    """By its path and by env; of what was never looked at, absence is its own business."""
    monkeypatch.chdir(tmp_path)
    lines = {"by-env": "/usr/bin/env no-python", "by-path": "/no/python -u", "by-sh": "/bin/sh"}
    for name, line in lines.items():
        (tmp_path / name).write_text(f"#!{line}\n")
    require_program(argv, {b"PATH": b"/bin"}, checked=False)
    if lacks is None:
        require_program(argv, {b"PATH": b"/bin"}, checked=True)
        return
    with pytest.raises(EnvironmentLost) as lost:
        require_program(argv, {b"PATH": b"/bin"}, checked=True)
    assert lost.value.place == lacks


def test_files_without_a_usable_first_line(host: Host) -> None:
    for name, content in (("plain", b"exit 5\n"), ("binary", b"\x7fXX\0"), ("lost", b"#!/no/sh\n")):
        (host.work / name).write_bytes(content)
        (host.work / name).chmod(0o755)
    assert host.run("./plain").code == 5
    assert host.run("./binary").code == 126
    assert "interpreter does not exist" in str(host.run("./lost").reason)


def test_a_fifo_in_place_of_the_program_is_not_waited_for(host: Host) -> None:
    os.mkfifo(host.work / "pipe")
    (host.work / "pipe").chmod(0o755)
    assert host.run("./pipe").code == 126


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"output": b"fifo"}, "setup", "a FIFO that nobody reads"),
        ({"output": b"no/such/x"}, "environment", "directory no/such does not exist (ENOENT)"),
        ({"output": b"/"}, "setup", "Is a directory"),
        ({"output": b"/dev/full"}, "setup", "No space left"),
        ({"error": b"fifo"}, "setup", "error fifo: a FIFO that nobody reads"),
        ({"cwd": b"/no/such"}, "environment", "directory /no/such: No such file"),
        ({"cwd": b"/dev/null"}, "environment", "Not a directory (ENOTDIR)"),
        ({"cwd": b"loop"}, "environment", "Too many levels of symbolic links (ELOOP)"),
        ({"output": b"a\0b"}, "setup", "null character"),
    ],
)
def test_a_failed_set_up_says_why(
    host: Host, changes: dict[str, bytes], cause: str, words: str
) -> None:
    """What may be there in a moment is told from what is wrong whenever it is tried."""
    os.mkfifo(host.work / "fifo")
    (host.work / "loop").symlink_to("loop")
    if "cwd" in changes:
        changes = {"cwd": os.path.join(os.fsencode(host.work), changes["cwd"])}
    job = host.sh("echo ran > ran", **changes)
    end = host.wait_exit(job)
    assert (end.code, end.signal, end.cause) == (None, None, cause)
    assert (end.place is not None) is (cause == "environment")
    assert words in str(end.reason)
    assert job.started() is None
    assert not (host.work / "ran").exists()


def test_a_cpu_limit_that_the_kernel_cannot_count_is_none(host: Host) -> None:
    """In nanoseconds it is below zero there, and whoever has it dies at the first tick."""
    job = host.sh("ulimit -Ht", rlimits=(("RLIMIT_CPU", -1, 2**62),))
    assert host.wait_exit(job).code == 0
    assert host.output(job).strip() == b"unlimited"
