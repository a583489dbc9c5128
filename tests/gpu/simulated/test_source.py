"""Which GPUs the daemon uses, and what simulated ones show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusched_client import Client
from gpusched_client import simulation as simclaims
from gpusched_client.errors import Invalid
from gpusched_client.terms import JobState
from gpuschedd.config.keys import Config
from gpuschedd.gpu.nvidia.vendor import Nvidia
from gpuschedd.gpu.simulated.source import UUID_PREFIX, SimulatedGpus, simulated_inventory
from gpuschedd.gpu.simulated.vendor import Simulated
from tests.support.daemon import DaemonProcess, daemon_in, until

GIB = 2**30


def test_a_host_is_written_as_groups_of_cards() -> None:
    """Indices run through; sizes are exact."""
    gpus = simulated_inventory("2x80G+1x24G")
    assert [(gpu.index, gpu.total_bytes) for gpu in gpus] == [
        (0, 80 * GIB),
        (1, 80 * GIB),
        (2, 24 * GIB),
    ]


@pytest.mark.parametrize(
    "text", ["", "4", "x24G", "0x24G", "4x", "4x24Q", "2x80G+", "9999x1G", "4x24"]
)
def test_a_host_that_is_none_says_how_to_write_one(text: str) -> None:
    """The error names the value and the form."""
    with pytest.raises(Invalid):
        simulated_inventory(text)


def test_a_size_without_a_unit_is_refused_with_what_was_meant() -> None:
    """As everywhere else: 24 would be 24 MiB."""
    with pytest.raises(Invalid, match=r"'24' has no unit; did you mean 4x24G\?"):
        simulated_inventory("2x80G+4x24")


def test_gpus_left_alone_take_no_job(tmp_path: Path) -> None:
    """--gpus 0,2 of four: two jobs run, on these two."""
    with daemon_in(tmp_path, "4x24G", "--gpus", "0,2") as daemon, daemon.client() as client:
        jobs = [client.submit(["sleep", "30"], output="/dev/null").id for _ in range(3)]
        until(
            lambda: sum(j.state is JobState.RUNNING for j in client.jobs(ids=jobs).jobs) == 2,
            "two run",
        )
        used = sorted(job.gpu_indices or () for job in client.jobs(ids=jobs).jobs)
        assert used == [(), (0,), (2,)]


def test_a_name_that_is_no_gpu_is_pointed_out(tmp_path: Path) -> None:
    """In the log, in the status, beside the GPUs, and in the reason of what waits."""
    with daemon_in(tmp_path, "2x1G", "--gpus", "9") as daemon, daemon.client() as client:
        text = "gpus names 9: no such GPU here (present: 0, 1)"
        assert text in daemon.log.read_text()
        assert text in daemon.run("gctl", "status").stdout
        assert text in daemon.run("gq", "--gpus").stderr
        job = client.submit(["true"], output="/dev/null")
        until(lambda: text in _reason(client, job.id), "it waits, and says why")


def _reason(client: Client, job_id: int) -> str:
    found = client.job(job_id).reason
    return found.text or "" if found else ""


def test_one_wrong_name_of_two_is_a_warning(tmp_path: Path) -> None:
    """The other GPU is used."""
    with daemon_in(tmp_path, "2x1G", "--gpus", "1,9") as daemon, daemon.client() as client:
        assert "gpus names 9: no such GPU here" in daemon.log.read_text()
        assert [gpu.index for gpu in client.gpus()] == [1]


def test_claims_show_as_use_and_go_with_their_process(daemon: DaemonProcess) -> None:
    """Memory of a simulated GPU is what live processes claim, however they end."""
    with daemon.client() as client:
        job = client.submit(
            [f"{Path(sys.executable).parent}/gpusched-simjob", "--vram", "8G", "--hold", "60"],
            vram="10G",
            output="/dev/null",
        )
        until(lambda: client.gpus()[0].used_bytes == 8 * GIB, "its claim shows")
        assert client.gpus()[0].foreign_bytes == 0
        client.cancel([job.id])
        client.wait(job.id, timeout_s=30)
        until(lambda: client.gpus()[0].used_bytes == 0, "its claim is gone")


@pytest.mark.parametrize(
    "content", [60_000 * "[", '{"gpus": {"a": 1e999}}', '{"gpus": [1]}', "nan", "", "\0"]
)
def test_a_claim_of_nonsense_is_passed_over(tmp_path: Path, content: str) -> None:
    """Whoever may claim may write anything."""
    own = f"{os.getpid()}.{simclaims.start_ticks_of(os.getpid())}"
    (tmp_path / own).write_text(content)
    assert list(simclaims.read_claims(tmp_path)) == []


def test_everybody_s_claims_fill_neither_run_nor_the_state_directory(tmp_path: Path) -> None:
    """They lie where all users may write anyway; PID 1 and the daemon need room in the others."""
    stands_for = Nvidia(Config)
    vendor = Simulated(stands_for, "1x1G", tmp_path, is_shared=True)
    place = Path(vendor.variables([], is_filtered=False)["GPUSCHED_SIM_DIR"])
    assert place == simclaims.SYSTEM_DIR
    closed = [Path(name).resolve() for name in ("/run", "/var/run", "/etc", "/var/lib", tmp_path)]
    assert not [each for each in closed if place.resolve().is_relative_to(each)]
    assert place.parent.stat().st_mode & 0o7777 == 0o1777
    own = Simulated(stands_for, "1x1G", tmp_path, is_shared=False)
    assert own.variables([], is_filtered=False)["GPUSCHED_SIM_DIR"] == str(tmp_path / "sim")


def test_a_claim_of_another_user_s_in_the_name_of_a_process_is_refused_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes memory in another's name, nor the name itself before its process claims."""
    simclaims.write_claim(tmp_path, {"GPU-1": GIB})
    about = os.fstat

    def others(descriptor: int) -> Any:
        found = about(descriptor)
        return SimpleNamespace(st_mode=found.st_mode, st_uid=found.st_uid + 1)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", others)
        assert list(simclaims.read_claims(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
    simclaims.write_claim(tmp_path, {"GPU-1": GIB})
    assert [claim.uid for claim in simclaims.read_claims(tmp_path)] == [os.getuid()]


@pytest.mark.root
def test_a_claim_counts_for_the_user_of_its_process_alone(tmp_path: Path) -> None:
    """By the owner of the file, whoever writes it; the same among very many files."""
    with subprocess.Popen(["sleep", "60"], user=65_534) as process:
        try:
            ticks = simclaims.start_ticks_of(process.pid)
            claim = tmp_path / f"{process.pid}.{ticks}"
            for uid, found in ((65_534, [65_534]), (12_345, []), (65_534, [65_534])):
                claim.write_text('{"gpus": {"GPU-1": 1024}}')
                os.chown(claim, uid, uid)
                assert [each.uid for each in simclaims.read_claims(tmp_path)] == found
            for number in range(simclaims.NAMES_MAX + 1):
                (tmp_path / f"0{number}").touch()
            os.chown(claim, 12_345, 12_345)
            assert list(simclaims.read_claims(tmp_path)) == []
        finally:
            process.kill()


def test_a_flood_of_files_hides_no_claim_and_is_taken_away(tmp_path: Path) -> None:
    """Whoever may claim may put there what he likes, before all others in any order."""
    for number in range(3 * simclaims.NAMES_MAX):
        (tmp_path / f"0{number}").touch()
    simclaims.write_claim(tmp_path, {"GPU-1": GIB})
    simclaims.write_host(tmp_path, {"GPU-1": 2 * GIB})
    own = f"{os.getpid()}.{simclaims.start_ticks_of(os.getpid())}"
    (tmp_path / f".{own}.tmp").touch()  # it claims more just now
    for _ in range(4):
        assert [claim.gpus for claim in simclaims.read_claims(tmp_path)] == [{"GPU-1": GIB}]
    assert set(os.listdir(tmp_path)) == {own, f".{own}.tmp", "host.json"}


def test_a_directory_of_somebody_else_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users of a shared host may make one of that name first."""
    (tmp_path / "claims").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Invalid, match="remove it"):
        SimulatedGpus("1x1G", tmp_path / "claims", shared=True)


def test_the_host_s_file_follows_nothing_that_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users of a shared host may write where it lies."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    claims = tmp_path / "claims"
    claims.mkdir()
    monkeypatch.setattr(os, "urandom", bytes)
    (claims / f".host.json.{os.getpid()}").symlink_to(victim)
    simclaims.write_host(claims, {"GPU-1": GIB})
    assert simclaims.read_totals(claims) == {"GPU-1": GIB}
    (claims / f".host.json.{16 * '0'}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        simclaims.write_host(claims, {"GPU-1": 2 * GIB})
    assert victim.read_text() == "precious"


def test_a_look_that_breaks_ends_no_daemon(daemon: DaemonProcess) -> None:
    """The source's own mistake is a reason to place nothing, until it is over."""
    claims = daemon.state_dir / "sim"
    with daemon.client() as client:
        claims.rename(daemon.state_dir / "away")
        claims.write_text("no directory")
        until(lambda: client.gpus_result().problem, "the trouble shows")
        assert "NotADirectoryError" in str(client.gpus_result().problem)
        claims.unlink()
        (daemon.state_dir / "away").rename(claims)
        until(lambda: client.gpus_result().problem is None, "it is over")


def test_foreign_use_keeps_whole_jobs_away_and_is_named(daemon: DaemonProcess) -> None:
    """A process outside the scheduler on every card: the reason says who and how much."""
    uuids = ",".join(f"GPU-51300000-0000-4000-8000-{index:012d}" for index in range(4))
    stranger = subprocess.Popen(
        [sys.executable, "-m", "gpusched_client.commands.simjob", "--vram", "3G", "--hold", "120"],
        env={"GPUSCHED_SIM_DIR": str(daemon.state_dir / "sim"), "GPUSCHED_GPU_UUIDS": uuids},
        stdout=subprocess.DEVNULL,
    )
    try:
        with daemon.client() as client:
            until(lambda: (client.gpus()[3].foreign_bytes or 0) > 0, "it is seen")
            job = client.submit(["true"], output="/dev/null")
            shared = client.submit(["true"], vram="4G", output="/dev/null")
            assert client.wait(shared.id, timeout_s=30).state is JobState.COMPLETED
            words = f"pid {stranger.pid}"
            until(lambda: words in _reason(client, job.id), "it waits, and says for whom")
            stranger.kill()
            stranger.wait()
            assert client.wait(job.id, timeout_s=30).state is JobState.COMPLETED
    finally:
        if stranger.poll() is None:
            stranger.kill()
            stranger.wait()


def simjob_outside(hold: str = "120", **environment: str) -> subprocess.Popen[bytes]:
    """One that is no job, as somebody's notebook is none."""
    words = [
        sys.executable,
        "-m",
        "gpusched_client.commands.simjob",
        "--vram",
        "3G",
        "--hold",
        hold,
    ]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def test_a_process_outside_claims_on_the_daemon_that_a_client_would_find(
    daemon: DaemonProcess,
) -> None:
    """CUDA_VISIBLE_DEVICES is all that it says of GPUs, as with CUDA."""
    stranger = simjob_outside(GPUSCHED_SOCKET=str(daemon.socket), CUDA_VISIBLE_DEVICES="1,3")
    try:
        with daemon.client() as client:
            until(lambda: (client.gpus()[3].foreign_bytes or 0) > 0, "it is seen")
            seen = [gpu.used_bytes for gpu in client.gpus()]
            assert seen == [0, 3 * GIB, 0, 3 * GIB]
    finally:
        stranger.kill()
        stranger.communicate()


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "GPUSCHED_GPU_UUIDS"])
def test_who_finds_no_simulated_host_says_that_it_claims_nothing(tmp_path: Path, name: str) -> None:
    nowhere = str(tmp_path / "none.sock")
    stranger = simjob_outside("0", GPUSCHED_SOCKET=nowhere, **{name: "0"})
    _, said = stranger.communicate(timeout=60)
    assert stranger.returncode == 0
    assert b"nothing is claimed: no gpuschedd is reachable" in said


def test_oom_once_fails_as_cuda_does_and_then_succeeds(daemon: DaemonProcess) -> None:
    """For trying retries."""
    simjob = f"{Path(sys.executable).parent}/gpusched-simjob"
    once = str(daemon.work_dir / "once")
    with daemon.client() as client:
        words = [simjob, "--vram", "1G", "--hold", "0", "--oom-once", once]
        first = client.submit(words, vram="2G", cwd=daemon.work_dir)
        ended = client.wait(first.id, timeout_s=30)
        assert (ended.state, ended.cause) == (JobState.OUT_OF_MEMORY, "cuda_oom")
        second = client.submit(words, vram="2G", cwd=daemon.work_dir)
        assert client.wait(second.id, timeout_s=30).state is JobState.COMPLETED


def test_a_simulated_job_is_told_no_number_of_a_real_gpu(daemon: DaemonProcess) -> None:
    """A program that looks for its GPU finds none, whatever visible_devices says."""
    (daemon.place / "config.toml").write_text('visible_devices = "index"\n')
    assert daemon.run("gctl", "reload").returncode == 0
    with daemon.client() as client:
        job = client.submit(shell="echo $CUDA_VISIBLE_DEVICES", cwd=daemon.work_dir, output="t.out")
        client.wait(job.id, timeout_s=30)
        uuid = client.job(job.id).gpu_uuids
    assert uuid is not None
    assert (daemon.work_dir / "t.out").read_text() == f"{uuid[0]}\n"
    assert uuid[0].startswith(UUID_PREFIX)


def test_nothing_is_made_in_what_took_the_place_of_the_state_directory(tmp_path: Path) -> None:
    state = tmp_path / "state"
    source = SimulatedGpus("1x1G", state / "claims", shared=False)
    state.rename(tmp_path / "moved")
    state.mkdir()
    source.read()
    assert list(state.iterdir()) == []


def test_a_directory_of_claims_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Jobs that start later would end with a traceback of theirs."""
    source = SimulatedGpus("1x1G", tmp_path / "claims", shared=False)
    shutil.rmtree(tmp_path / "claims")
    source.read()
    uuid = source.inventory[0].uuid
    simclaims.write_claim(tmp_path / "claims", {uuid: 2**20})
    assert source.read().readings[0].used_bytes == 2**20
