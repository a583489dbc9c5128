"""One life of a daemon with simulated GPUs, typed and asked: every fate of a job, every command.

Plays through the console commands, the socket and the SQL views alone, and returns what they said.
Nothing here sleeps: each step waits until the daemon says that the one before it is done.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, closing, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.face import probe
from tests.face.normal import Normal, Pattern, Shapes, briefly, without_chance, without_facts
from tests.face.wire import Refused, Watch, Wire
from tests.support.daemon import BIN, DaemonProcess, until

GIB = 2**30
CONFIG = """\
gpu_sample_interval = 0.05
[scheduling]
kill_grace = "10s"
default_time_limit = "1d"
max_cpu_jobs = {cpu_jobs}
[limits]
requests_per_second = 100000
{limits}
[jobs]
environment_patience = 0
{users}
"""
VIEWS = ("jobs_v", "usage_v", "events_v", "promises_v")
DONE = "done, ended"  # the view of which those of other jobs are told by what differs
BY_CHANCE = "gpu_left_behind"  # told where a sample was under way as a job ended
LONG_LIST = 6  # of more jobs than this a list tells the names alone
#: Jobs whose use of their GPUs is waited for before they end.
MEASURED_JOBS = ("used", "over")


def write_config(place: Path, *, cpu_jobs: int = 32, limits: str = "", users: str = "") -> None:
    """The daemon's configuration, as it is at the start where nothing is given."""
    (place / "config.toml").write_text(CONFIG.format(cpu_jobs=cpu_jobs, limits=limits, users=users))


class Scenario:
    """What is played on one daemon, and what was said meanwhile."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.work = daemon.work_dir
        self.wire = Wire(daemon.socket)
        self.watch = Watch(daemon.socket)
        self.ids: dict[str, int] = {}
        self.typed: list[dict[str, Any]] = []
        self.shown: dict[str, Any] = {}
        self._open: list[tuple[list[str], subprocess.Popen[str]]] = []

    def close(self) -> None:
        """Hang up, and leave no command behind."""
        for _, process in self._open:
            process.kill()
            process.communicate()
        self.watch.close()
        self.wire.close()

    # --- typing -------------------------------------------------------------------------------

    def type(self, line: str, *more: str) -> Any:
        """Run a command to its end, and note its status and its answer.

        `{name}` in the line is the id of that job; `more` are words that hold blanks.
        """
        return self._note([line, *more], *self._run(*line.format(**self.ids).split(), *more))

    def _run(self, command: str, *words: str) -> tuple[int, str, str]:
        """The console script of that name, in this process: status, stdout, stderr."""
        (script,) = entry_points(group="console_scripts", name=command)
        out, err = io.StringIO(), io.StringIO()
        typed = mock.patch.object(sys, "argv", [command, *words])
        with typed, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            script.load()()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out.getvalue(), err.getvalue()

    def start(self, name: str, *words: str) -> None:
        """`gsub --wait --json` in the background; its job's id is found by the name."""
        line = ["gsub", "-J", name, "--wait", "--json", *words]
        process = subprocess.Popen(
            [str(BIN / line[0]), *line[1:]],
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._open.append((line, process))

    def find(self, name: str) -> None:
        """The id of a job that was started."""

        def found() -> int:
            jobs = self.wire.look("jobs", name=name)["jobs"]
            return int(jobs[0]["job_id"]) if jobs else 0

        self.ids[name] = until(found, f"{name} is submitted")

    def end_all(self) -> None:
        """Wait for all that was started, and note how each ended."""
        while self._open:
            line, process = self._open[0]
            out, err = process.communicate(timeout=60)
            del self._open[0]
            self._note(line, process.returncode, out, err)

    def submit(self, name: str, line: str, *more: str) -> None:
        """`gsub` with a name."""
        self.ids[name] = self.type(f"gsub -J {name} --json {line}", *more)["job_id"]

    def show(self, name: str, label: str) -> None:
        """Note `gq ID --json` of a job as it is now, under its name and a label."""
        status, out, err = self._run("gq", str(self.ids[name]), "--json")
        assert status == 0, err
        (job,) = json.loads(out)["jobs"]
        self.shown[f"{name}, {label}"] = without_facts(job)

    def _note(self, words: list[str], status: int, out: str, err: str) -> Any:
        note = r"^\w+: your own daemon answered; its GPUs are simulated\n"
        err = re.sub(note, "", err, flags=re.MULTILINE)
        try:
            answer = json.loads(out)
        except ValueError:
            answer = "<text>" if out else ""
        if "--parsable" in " ".join(words):
            answer = {"job_id": answer}
        elif isinstance(answer, str) and len(out.split()) == 1:
            answer = out
        entry = {"command": words, "status": status, "stdout": answer}
        self.typed.append({**entry, "stderr": "<text>" if err else ""})
        return answer

    # --- waiting ------------------------------------------------------------------------------

    def job(self, name: str) -> dict[str, Any]:
        """All that the daemon says of a job."""
        return self.wire.look("job", job_id=self.ids[name])

    def until_state(self, name: str, state: str) -> None:
        """Wait for a state."""
        until(lambda: self.job(name)["state"] == state, f"{name} is {state}")

    def until_reason(self, name: str, code: str, *, starts: str | None = None) -> None:
        """Wait for the reason why it waits, and for its expected_start_s or promised_start_s."""

        def is_there() -> bool:
            job = self.job(name)
            said = job["reason"] is not None and job["reason"]["code"] == code
            return said and (starts is None or job[starts] is not None)

        until(is_there, f"{name} waits for {code}")

    def until_gpu(self, index: int, **facts: Any) -> None:
        """Wait until a GPU is seen so."""

        def is_so() -> bool:
            gpu = self.wire.look("gpus")["gpus"][index]
            return bool(facts.items() <= gpu.items())

        until(is_so, f"GPU {index} has {facts}")

    def until_peak(self, name: str, peak_bytes: int) -> None:
        """Wait until a job was seen with so much VRAM."""
        until(lambda: self.job(name)["vram_peak_bytes"] == peak_bytes, f"{name} is measured")

    def until_there(self, name: str) -> Path:
        """Wait for a file of a job's in the work directory."""
        path = self.work / name
        until(path.exists, f"{name} is there")
        return path

    def end(self, *names: str) -> None:
        """Wait until these are final, and note them."""
        self.wire.look("wait", job_ids=[self.ids[name] for name in names])
        for name in names:
            self.show(name, "ended")

    def look_around(self, *names: str) -> None:
        """Ask for all that can be seen now, for the shapes of the answers."""
        ids = [self.ids[name] for name in names]
        for method in ("queue", "gpus", "usage", "stats", "status"):
            self.wire.call(method)
        self.wire.call("jobs", ids=ids)
        for job_id in ids:
            self.wire.call("job", job_id=job_id)

    # --- gates: a job waits at `: < NAME` until it is let through ------------------------------

    def gates(self, *names: str) -> None:
        """Make FIFOs in the work directory."""
        for name in names:
            os.mkfifo(self.work / name)

    def let_through(self, *names: str) -> None:
        """Open each as soon as its job waits there."""
        for name in names:
            until(partial(_opens, self.work / name), f"a job waits at {name}")


def _opens(gate: Path) -> bool:
    try:
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def play(daemon: DaemonProcess) -> dict[str, Any]:
    """The whole scenario; what was said, by the name of its golden file."""
    scenario = Scenario(daemon)
    with chdir(daemon.work_dir), pytest.MonkeyPatch.context() as patch, closing(scenario):
        patch.setenv("GPUSCHED_SOCKET", str(daemon.socket))
        patch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
        for act in (_ends, _shares, _whole, _closed_gpus, _changes, _reloads, _refusals, _lists):
            act(scenario)
        _ask_everything(scenario.wire, scenario.ids)
        facts = _facts(scenario)
        requests = probe.requests(daemon.socket)
        scenario.wire.look("gpus_resume")  # one of the requests has released them
        return facts | {"requests": requests}


# --- how jobs end ---------------------------------------------------------------------------------


def _ends(play: Scenario) -> None:
    """Jobs without a GPU, each with its fate; `gsub --wait` has the status of it."""
    (play.work / "plain").write_text("no program\n")
    play.gates("late-gate", "cut-gate", "kept-gate")
    quiet = ("-g", "0", "-o", "/dev/null")
    late = "trap 'touch late-was-told' TERM; sleep 600 & wait; : < late-gate"
    trapped = "trap 'exit 5' USR1; sleep 600 & touch trapped-is-ready; wait"
    fates: dict[str, tuple[str, ...]] = {
        "done": ("-g", "0", "-o", "%x.%%.out", "-e", "%x.%a.err", "sh", "-c", "echo 1; echo 2 >&2"),
        "failed": (*quiet, "sh", "-c", "exit 3"),
        "killed": (*quiet, "sh", "-c", "kill -KILL $$"),
        "unknown": (*quiet, "--no-check", "no-such-command-anywhere"),
        "forbidden": (*quiet, "--no-check", "./plain"),
        "homeless": (*quiet, "--no-check", "-D", "nowhere", "true"),
        "late": (*quiet, "-t", "1s", "-c", late),
        "trapped": (*quiet, "-c", trapped),
        "lost": (*quiet, "-c", "echo $PPID > ppid.part; mv ppid.part ppid; sleep 600"),
        "cut": (*quiet, "-c", "sleep 600"),
        "leftover": (*quiet, "-c", "trap '' TERM; (: < kept-gate) & exit 0"),
    }
    for name, words in fates.items():
        play.start(name, *words)
    for name in fates:
        play.find(name)
    _end_by_hand(play)
    play.end_all()
    play.end(*fates)
    play.shown["files of done"] = sorted(path.name for path in play.work.glob("done.*"))


def _end_by_hand(play: Scenario) -> None:
    """Those of the fates that need somebody else's doing."""
    play.until_there("trapped-is-ready")
    play.type("gcancel --json -s USR1 {trapped}")
    os.kill(int(play.until_there("ppid").read_text()), signal.SIGKILL)
    play.until_state("leftover", "COMPLETING")
    play.show("leftover", "its rest is being ended")
    play.let_through("kept-gate")
    play.until_state("cut", "RUNNING")
    play.show("cut", "it runs")
    play.type("gq --status {cut}")
    play.type("gq --status {cut} --json")
    play.type("gcancel --json {cut} --reason", "asked for")
    play.watch.wait_for("job_near_limit", job_id=play.ids["late"])
    play.until_there("late-was-told")
    play.let_through("late-gate")


# --- GPUs -----------------------------------------------------------------------------------------


def _shares(play: Scenario) -> None:
    """Jobs that declare their VRAM: measured, above their declaration, out of memory."""
    play.gates("used-gate", "over-gate", "stray-gate")
    claims = "gpusched-simjob --vram 6G --hold 600s & : < {}-gate; kill $!; wait"
    play.type("gq --gpus --json")
    play.submit("used", "-m 8G -t 1h --command", claims.format("used"))
    play.submit("over", "-m 4G -t 1h --command", claims.format("over"))
    play.watch.wait_for("job_over_declaration", job_id=play.ids["over"])
    play.until_gpu(0, used_bytes=12 * GIB, foreign_bytes=0)
    for name in ("used", "over"):
        play.until_peak(name, 6 * GIB)
        play.show(name, "it runs")
    play.type("gq --gpus --json")
    play.type("gq --usage --json")
    play.look_around("used", "over")
    elsewhere = play.wire.look("gpus")["gpus"][3]["uuid"]
    stray = f"export GPUSCHED_GPU_UUIDS={elsewhere}; {claims.format('stray')}"
    play.submit("stray", "-m 1G -t 1h --command", stray)
    play.watch.wait_for("gpu_not_granted", job_id=play.ids["stray"])
    play.let_through("used-gate", "over-gate", "stray-gate")
    play.end("used", "over", "stray")
    play.until_gpu(0, used_bytes=0, foreign_bytes=0)
    play.until_gpu(3, used_bytes=0, foreign_bytes=0)
    simjob = "gpusched-simjob --hold 0 --oom-once"
    for name, asked, size in (
        ("oom", "-m 4G", "4G"),
        ("retried", "-m 4G --retries 2", "4G"),
        ("widened", "-m 22G --retries 1", "22G"),
    ):
        play.submit(name, f"{asked} -t 1h {simjob} {name}.mark --vram {size}")
        play.end(name)


def _whole(play: Scenario) -> None:
    """Whole GPUs: the head of the queue and its promise, backfill, jobs without limit."""
    play.gates("busy-gate", "head-gate", "endless-gate")
    play.submit("busy", "-g 2 -t 1h --command", ": < busy-gate")
    play.until_state("busy", "RUNNING")
    play.submit("head", "-g 4 -t 10m --command", ": < head-gate")
    play.until_reason("head", "Resources", starts="promised_start_s")
    play.submit("behind", "-g 1 -t 5h --nice 3 true")
    play.submit("second", "-g 3 -t 10m true")
    play.submit("small", "-g 1 -t 1m true")
    play.end("small")
    play.until_reason("behind", "Reserved", starts="expected_start_s")
    play.until_reason("second", "Resources", starts="expected_start_s")
    for name in ("busy", "head", "behind", "second"):
        play.show(name, "the head waits")
    play.look_around("busy", "head", "behind", "second")
    play.type("gq --json -t live")
    play.type("gsub --dry-run --json -g 4 -t 1h true")
    play.type("gsub --dry-run --json -g 1 -t 1m true")
    play.type("gsub --dry-run --json --hold true")
    play.type("gsub --dry-run -g 1 -t 1m true")
    play.let_through("busy-gate")
    play.until_state("head", "RUNNING")
    play.let_through("head-gate")
    play.end("busy", "head", "behind", "second")
    play.submit("endless", "-g 1 -t unlimited --command", ": < endless-gate")
    play.until_state("endless", "RUNNING")
    play.submit("patient", "-g 4 -t 1h true")
    play.until_reason("patient", "UnlimitedJob")
    play.show("patient", "it waits for a job without limit")
    play.let_through("endless-gate")
    play.end("endless", "patient")


def _closed_gpus(play: Scenario) -> None:
    """Drained, released to an administrator, taken by somebody else."""
    play.type("gctl drain 3 --reason", "a fan")
    play.until_gpu(3, state="drained")
    play.submit("four", "-g 4 -t 1h true")
    play.until_reason("four", "GpuUnavailable")
    play.show("four", "a GPU is drained")
    play.type("gq --gpus --json")
    play.type("gctl status --json")
    play.type("gctl resume 3")
    play.end("four")
    play.type("gctl gpus release --reason", "MIG")
    play.until_gpu(0, state="unread")
    play.submit("after", "-t 1h true")
    play.until_reason("after", "GpuUnavailable")
    play.show("after", "the driver is released")
    play.look_around("after")
    play.type("gctl status --json")
    play.type("gctl gpus resume")
    play.end("after")
    with _somebody_on_gpu_0(play):
        play.submit("crowded", "-g 4 -m 20G -t 1h true")
        until(lambda: play.job("crowded")["reason"]["code"] != "None", "it was looked at")
        play.show("crowded", "somebody else is on a GPU")
        play.type("gq --gpus --json")
    play.end("crowded")


@contextmanager
def _somebody_on_gpu_0(play: Scenario) -> Iterator[None]:
    """A process that no job started, with most of the card's memory."""
    words = [str(BIN / "gpusched-simjob"), "--vram", "20G", "--hold", "600s"]
    found = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    process = subprocess.Popen(words, env=found, cwd=play.work, stdout=subprocess.DEVNULL)
    try:
        play.until_gpu(0, used_bytes=20 * GIB)
        yield
    finally:
        process.kill()
        process.wait()


# --- what is changed afterwards -------------------------------------------------------------------


def _changes(play: Scenario) -> None:
    """Hold, release, update, top, cancel: queued and running."""
    play.gates("long-gate")
    asked = "--hold -g 1 -m 8G --exclusive --gpu-model Simulated --topology nvlink"
    play.submit("held", f"{asked} --mem 1G --cpus 2 --retries 3 -t 1h true")
    play.submit("dropped", "--hold -g 4 -t 1h true")
    play.until_reason("held", "Held")
    play.show("held", "by its owner")
    play.type("gctl update --json {held} -t 2h --nice 5 -J renamed -m 10G")
    play.type("gctl hold --json {held}")
    play.type("gctl top --json {held}")
    play.show("held", "changed")
    play.type("gcancel --json -s USR1 {held}")
    play.type("gctl release --json {held}")
    play.type("gcancel --json {dropped}")
    play.type("gcancel --json {dropped}")
    play.end("held", "dropped")
    play.submit("long", "-g 1 -t 1h --command", ": < long-gate")
    play.until_state("long", "RUNNING")
    play.type("gctl update --json {long} -t 2h")
    play.type("gctl update --json {long} -m 8G")
    play.type("gctl hold --json {long}")
    play.type("gctl top --json {long}")
    play.let_through("long-gate")
    play.end("long")
    play.type("gctl update --json {long} --nice 7")


def _reloads(play: Scenario) -> None:
    """Other limits: a user's, the host's, and who may submit at all."""
    place = play.daemon.place
    play.gates("slot-gate")
    play.type("gctl reload")
    write_config(place, cpu_jobs=1, limits="max_gpus = 1")
    play.type("gctl reload")
    play.submit("wide", "-g 2 -t 1h true")
    play.until_reason("wide", "UserLimit")
    play.show("wide", "over its user's limit")
    play.submit("slot", "-g 0 --command", ": < slot-gate")
    play.submit("slotless", "-g 0 -t 1h true")
    play.until_reason("slotless", "CpuSlots")
    play.show("slotless", "no slot is free")
    write_config(place, cpu_jobs=1, limits="max_gpus = 1", users='users = ["@nobody-of-that-name"]')
    play.type("gctl reload")
    play.until_reason("wide", "Held")
    play.show("wide", "its user is barred")
    play.type("gsub --json true")
    write_config(place, limits="queued_jobs_all = 1")
    play.type("gctl reload")
    play.type("gsub --json true")
    (place / "config.toml").write_text("[scheduling]\nbackfill = 'sideways'\n")
    play.type("gctl reload")
    write_config(place)
    play.type("gctl reload")
    play.let_through("slot-gate")
    play.end("wide", "slot", "slotless")


# --- what is refused, and what is only asked ------------------------------------------------------


def _refusals(play: Scenario) -> None:
    """Each kind of refusal by each command, and its status."""
    (play.work / "there").touch()
    for line in (
        "gsub",
        "gsub -m 20X true",
        "gsub -g -1 true",
        "gsub --json --parsable true",
        "gsub --json -g 0 -m 8G true",
        "gsub --json -g 9 true",
        "gsub --json -m 96G true",
        "gsub --json --gpu-model H100 true",
        "gsub --json -g 2 --topology nvlink true",
        "gsub --json --nice -5 --dry-run true",
        "gq 999",
        "gq 998,999 --json",
        "gq --status 999",
        "gq --me --gpus",
        "gq -t NOWHERE",
        "gcancel 999",
        "gcancel --json 999",
        "gcancel",
        "gcancel -s NOSUCH {done}",
        "gcancel --json {done}",
        "gctl hold --json 999",
        "gctl hold --json {done},999",
        "gctl release --json {done}",
        "gctl update --json 999",
        "gctl update --json {done} -t 2h",
        "gctl top --json 999",
        "gctl top {done},{failed}",
        "gctl drain 9",
        "gctl resume 9",
        "gctl nonsense",
        "gctl backup there",
    ):
        play.type(line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUSCHED_SOCKET", str(play.work / "no.sock"))
        for line in ("gsub -D . true", "gq --json", "gcancel 1", "gctl status --json"):
            play.type(line)


def _lists(play: Scenario) -> None:
    """Every way to ask for jobs, GPUs and users."""
    (play.work / "job.sh").write_text("#!/bin/sh\n#GSUB -g 0 -t 2h -J scripted\nexit 0\n")
    play.submit("scripted", "-o /dev/null job.sh one two")
    for name, how in (("parsable", "--parsable"), ("waited", "--wait --parsable"), ("told", "")):
        play.type(f"gsub -J {name} {how} -g 0 -o /dev/null true")
        play.find(name)
    play.end("scripted", "parsable", "waited", "told")
    for line in (
        "gq",
        "gq --json",
        "gq --json -t final",
        "gq --json -t CA,TO",
        "gq --json --name done",
        "gq --json --me --name done",
        "gq --json -u me --name done",
        "gq --json -n 1 --name failed",
        "gq --json {done},{failed}",
        "gq -o JOBID,NAME,ST,EXIT",
        "gq {done}",
        "gq --status {done}",
        "gq --status {failed}",
        "gq --gpus",
        "gq --usage",
        "gq --usage --json",
        "gctl status",
        "gctl backup copy.sqlite3",
        "gctl backup --force copy.sqlite3",
        "gcancel -t PD --json",
    ):
        play.type(line)


def _ask_everything(wire: Wire, ids: dict[str, int]) -> None:
    """Each method once more over the bare socket, for the shape of its answer."""
    known = list(ids.values())
    job = {"argv": ["true"], "cwd": "/", "gpus": 0, "output": "/dev/null", "name": "bare"}
    with pytest.raises(Refused):
        wire.call("job", job_id=999)
    wire.call("hello")
    wire.call("submit", jobs=[job], dry_run=True)
    (job_id,) = wire.call("submit", jobs=[{**job, "hold": True}])["job_ids"]
    wire.call("queue")
    wire.call("update", job_ids=[job_id, 999], nice=1)
    wire.call("top", job_id=job_id)
    wire.call("job", job_id=job_id)
    wire.call("wait", job_ids=[job_id], timeout_s=0)
    wire.call("cancel", job_ids=[job_id, 999])
    wire.call("wait", job_ids=[job_id])
    wire.call("jobs", ids=known)
    for known_id in known:
        wire.call("job", job_id=known_id)
    wire.call("gpus")
    wire.call("usage")
    wire.call("drain", gpu=0, reason="a look")
    wire.call("resume", gpu=0)
    wire.call("reload")
    wire.call("gpus_release", reason="a look")
    wire.call("gpus_resume")
    wire.call("status")
    wire.call("backup")
    wire.call("stats")


# --- what was said --------------------------------------------------------------------------------


def _facts(play: Scenario) -> dict[str, Any]:
    names = {number: name for name, number in play.ids.items()}
    normal = Normal(play.daemon.place, names, MEASURED_JOBS)
    events = play.watch.wait_for("job_ended", job_id=play.ids["told"])
    shown, typed = normal.value(play.shown), [_typed(normal, entry) for entry in play.typed]
    gpu = next(e["stdout"] for e in typed if e["command"] == "gq --gpus --json")["gpus"][0]
    done = shown.pop(DONE)
    patterns = (Pattern(DONE, "submitted_at", done), Pattern("GPU 0, idle", "promised_bytes", gpu))
    return {
        "commands": {"GPU 0, idle": gpu, "typed": [briefly(entry, patterns) for entry in typed]},
        "jobs": {DONE: done} | briefly(shown, patterns),
        "events": _events(normal, events),
        "views": _views(play.daemon.state_dir / "gpuschedd.sqlite3", normal),
        "responses": play.wire.shapes.seen(),
    }


def _typed(normal: Normal, entry: dict[str, Any]) -> dict[str, Any]:
    answer = normal.value(entry["stdout"])
    if isinstance(answer, dict) and len(answer.get("jobs", ())) > LONG_LIST:
        answer["jobs"] = {job["job_id"]: job["state"] for job in answer["jobs"]}
    command = normal.text(" ".join(entry["command"]))
    return {**entry, "command": command, "stdout": answer}


def _events(normal: Normal, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The kinds of each job's events in their order, and what each kind carries."""
    shapes = Shapes()
    of_jobs: dict[str, list[dict[str, Any]]] = {}
    of_no_job: dict[str, int] = {}
    for event in events:
        if event["kind"] == BY_CHANCE:
            continue
        shapes.add("event", {**event, "data": {}})
        shapes.add(event["kind"], _sure(event["data"]))
        if event["job_id"] is None:
            of_no_job[event["kind"]] = of_no_job.get(event["kind"], 0) + 1
        elif event["job_id"] in normal.names:
            of_jobs.setdefault(normal.names[event["job_id"]], []).append(event)
    return {
        "of jobs": {
            name: [event["kind"] for event in without_chance(its)]
            for name, its in sorted(of_jobs.items())
        },
        "of no job": of_no_job,
        "what they carry": shapes.seen(),
    }


def _sure(data: dict[str, Any]) -> dict[str, Any]:
    """Without what depends on when a sample was taken."""
    return {**data, "peak_bytes": 0} if "peak_bytes" in data else data


def _views(database: Path, normal: Normal) -> dict[str, Any]:
    """Columns of each view, and its rows of the scenario's jobs."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        return {view: _columns(db, view) for view in VIEWS} | {
            "rows of jobs_v": _rows(db, "jobs_v", normal),
            "rows of promises_v": _rows(db, "promises_v", normal),
        }


def _columns(db: sqlite3.Connection, view: str) -> list[str]:
    """Each column with its type, where it has one."""
    found = db.execute(f"PRAGMA table_info({view})")
    return [f"{row['name']} {row['type']}".rstrip() for row in found]


def _rows(db: sqlite3.Connection, view: str, normal: Normal) -> list[Any]:
    rows = [dict(row) for row in db.execute(f"SELECT * FROM {view} ORDER BY job_id")]
    first, *others = normal.value([row for row in rows if row["job_id"] in normal.names])
    return [first, *briefly(others, [Pattern("the first", "job_id", first)])]
