"""What each check concludes, also from what no stand-in driver shows: filters, units, charges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusched_client.terms import Cause, JobState
from gpusched_client.wire.admin_messages import StatusResult
from gpusched_client.wire.gpu_messages import GpuView
from gpusched_client.wire.job_messages import GpuUseView, JobView
from gpuschedd.gpu.attribution import ForeignProcess
from gpuschedd.gpu.foreign import Foreign, told_of
from gpuschedd.gpu.source import GpuProcess
from gpuschedd.selftest import checks
from gpuschedd.selftest.checks import Beside, Held, Report
from gpuschedd.selftest.findings import Finding
from gpuschedd.selftest.hold import nodes_opened
from gpuschedd.selftest.host import ListedGpu, Listing, SmiFailed, listed_gpu, why_some_are_left_out
from gpuschedd.selftest.jobs import report_in

GIB, MIB = 2**30, 2**20
UUID = "GPU-11111111-2222-4333-8444-555555555555"
GPU = GpuView(index=0, uuid=UUID, minor=0, model="Card", total_bytes=48 * GIB, used_bytes=0)
OK_GPU = replace(GPU, state="ok", foreign_bytes=0)
UNIT = StatusResult(
    *("0.1.0", "system", "pid1", 1, 0.0, "NVML", 2, 2, "/var/lib/gpuschedd/gpuschedd.sqlite3"),
    *(0, 0, 1),
)
OWN_NODE = {"nvidia0": "", "nvidia1": "EPERM"}
REPORT = Report(
    pid=77, visible="0", granted=UUID, uuids=(UUID.removeprefix("GPU-"),), nodes=OWN_NODE
)
USE = GpuUseView(gpu_uuid=UUID, peak_bytes=GIB, peak_source="driver")
JOB = JobView(job_id=5, state=JobState.COMPLETED, gpu_uuids=(UUID,), gpu_uses=(USE,))
HELD = Held(OK_GPU, replace(OK_GPU, used_bytes=GIB), JOB, REPORT, GIB)


def with_use(**changes: Any) -> Held:
    return replace(HELD, job=replace(JOB, gpu_uses=(replace(USE, **changes),)))


def with_nodes(**nodes: str) -> Held:
    return replace(HELD, report=replace(REPORT, nodes=nodes))


def result_of(finding: Finding) -> str:
    return finding.result.value


# --- the inventory --------------------------------------------------------------------------------


SLICE = replace(OK_GPU, index=100, uuid="MIG-11111111-2222-4333-8444-000000000001")
LISTED = listed_gpu(f"0, {UUID}, Card, 49152, Enabled, [N/A], 570.1")


def inventory(*gpus: GpuView, listed: Listing, why: str = "") -> tuple[str, str]:
    (found,) = checks.inventory(gpus, listed, why)
    return result_of(found), found.reason


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (replace(LISTED, index=7), "index of"),
        (replace(LISTED, name="Other"), "name of"),
        (replace(LISTED, total_mib=49151), "memory in MiB of"),
        (replace(LISTED, uuid="GPU-9"), f"GPU 0 ({UUID}) is the daemon's alone"),
        (replace(LISTED, uuid="GPU-9"), "(GPU-9) is nvidia-smi's alone"),
    ],
)
def test_an_inventory_that_differs_fails_and_says_in_what(listed: ListedGpu, words: str) -> None:
    result, reason = inventory(OK_GPU, listed=Listing((listed,)))
    assert result == "failed"
    assert words in reason


def test_an_inventory_that_agrees_is_ok() -> None:
    """What one of the two does not tell is no difference; nor is a GPU that both have lost."""
    assert inventory(OK_GPU, listed=Listing((LISTED,)))[0] == "ok"
    untold = replace(LISTED, total_mib=None)
    lost = replace(OK_GPU, uuid="GPU-9", state="lost")
    assert inventory(OK_GPU, lost, listed=Listing((untold,)))[0] == "ok"


@pytest.mark.parametrize("uuid", ["GPU-9", SLICE.uuid])
def test_what_was_drained_after_it_was_taken_out_is_no_difference(uuid: str) -> None:
    taken_out = replace(OK_GPU, uuid=uuid, state="drained", used_bytes=None)
    assert inventory(OK_GPU, taken_out, listed=Listing((LISTED,)))[0] == "ok"
    read = replace(taken_out, used_bytes=0)
    assert inventory(OK_GPU, read, listed=Listing((LISTED,)))[0] == "failed"


def test_a_gpu_that_is_missing_here_fails_unless_it_was_left_out() -> None:
    other = replace(LISTED, uuid="GPU-9", index=1)
    both = Listing((LISTED, other))
    assert inventory(OK_GPU, listed=both)[0] == "failed"
    assert inventory(OK_GPU, listed=both, why="`gpus` in x") == (
        "ok",
        "1 as nvidia-smi lists them, 1 left out by `gpus` in x",
    )


def test_slices_stand_for_their_gpu_and_are_nvidia_smis_too() -> None:
    parent = replace(LISTED, is_sliced=True)
    assert inventory(SLICE, listed=Listing((parent,), (SLICE.uuid,)))[0] == "ok"
    assert inventory(SLICE, listed=Listing((parent,)))[0] == "failed"


# --- the device filter ----------------------------------------------------------------------------


def test_a_filter_that_lets_another_gpu_through_fails() -> None:
    found = checks.device_filter(with_nodes(nvidia0="", nvidia1="", nvidia2="EPERM"), UNIT)
    assert (result_of(found), found.reason) == (
        "failed",
        "job 5 could open /dev/nvidia1, not granted",
    )


def test_a_filter_that_closes_the_jobs_own_gpu_fails() -> None:
    found = checks.device_filter(with_nodes(nvidia0="EPERM", nvidia1="EPERM"), UNIT)
    assert result_of(found) == "failed"
    assert "its own /dev/nvidia0: EPERM" in found.reason
    assert result_of(checks.device_filter(with_nodes(nvidia1="EPERM", nvidia2="EPERM"), UNIT)) == (
        "failed"
    )


def test_a_filter_that_holds_is_ok() -> None:
    found = checks.device_filter(HELD, UNIT)
    assert (result_of(found), found.reason) == ("ok", "/dev/nvidia0 alone, of 2")


@pytest.mark.parametrize(
    ("held", "status", "words"),
    [
        (HELD, replace(UNIT, mode="user"), "a convention"),
        (HELD, replace(UNIT, launch="direct"), "direct launch"),
        (with_nodes(), UNIT, "no /dev/nvidia*"),
        (with_nodes(nvidia0=""), UNIT, "no other GPU's node"),
        (replace(HELD, meanwhile=replace(OK_GPU, minor=None)), UNIT, "minor number"),
        (with_nodes(nvidia0="", nvidia1="EACCES"), UNIT, "not by a filter: /dev/nvidia1: EACCES"),
    ],
)
def test_where_no_filter_can_be_tried_it_is_skipped(
    held: Held, status: StatusResult, words: str
) -> None:
    found = checks.device_filter(held, status)
    assert result_of(found) == "skipped"
    assert words in found.reason


def test_nodes_are_opened_and_their_errors_named(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").symlink_to("nowhere")
    (tmp_path / "nvidiactl").touch()
    assert nodes_opened(tmp_path) == {"nvidia0": "", "nvidia1": "ENOENT"}


# --- the sandbox ----------------------------------------------------------------------------------


def sandbox(
    gpus: tuple[GpuView, ...] = (OK_GPU,), problem: str | None = None, status: StatusResult = UNIT
) -> Finding:
    return checks.sandbox(status, gpus, problem, Listing())


def test_a_unit_that_reads_its_gpus_is_ok() -> None:
    assert result_of(sandbox()) == "ok"


@pytest.mark.parametrize(
    ("gpus", "problem", "words"),
    [
        ((), "no driver: Driver Not Loaded", "Driver Not Loaded"),
        ((OK_GPU,), "the driver does not answer", "does not answer"),
        ((replace(OK_GPU, state="unread", reason="no permission"),), None, "no permission"),
        ((replace(OK_GPU, used_bytes=None),), None, "GPU 0"),
        ((replace(OK_GPU, stale=True),), None, "GPU 0"),
    ],
)
def test_a_unit_that_does_not_read_its_gpus_fails(
    gpus: tuple[GpuView, ...], problem: str | None, words: str
) -> None:
    found = sandbox(gpus, problem)
    assert result_of(found) == "failed"
    assert words in found.reason


def test_a_unit_that_sees_no_gpu_where_nvidia_smi_has_one_fails() -> None:
    assert result_of(checks.sandbox(UNIT, (), None, Listing((LISTED,)))) == "failed"
    assert result_of(checks.sandbox(UNIT, (), None, Listing())) == "skipped"


def test_without_a_unit_there_is_no_sandbox_to_try() -> None:
    assert result_of(sandbox(status=replace(UNIT, mode="user"))) == "skipped"
    assert result_of(sandbox(status=replace(UNIT, launch="direct"))) == "skipped"


# --- whose memory it is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (with_use(peak_bytes=None, peak_source="none"), "none of its processes"),
        (with_use(peak_source="device"), "by device"),
        (replace(HELD, job=replace(JOB, gpu_uses=())), "by nothing"),
        (with_use(peak_bytes=GIB // 2), "of which 512 MiB"),
        (
            replace(HELD, meanwhile=replace(OK_GPU, foreign_bytes=GIB, reason="pid 9 of bob (x)")),
            "counted as foreign while job 5 held 1 GiB: pid 9 of bob (x)",
        ),
    ],
)
def test_memory_that_is_not_seen_as_the_jobs_fails(held: Held, words: str) -> None:
    found = checks.own_process(held)
    assert result_of(found) == "failed"
    assert words in found.reason


def test_foreign_memory_of_before_is_no_fault_of_the_jobs() -> None:
    before = replace(OK_GPU, foreign_bytes=GIB)
    assert result_of(checks.own_process(replace(HELD, before=before, meanwhile=before))) == "ok"


@pytest.mark.parametrize(
    ("peak", "result"), [(GIB - 1, "failed"), (GIB, "ok"), (3 * GIB, "ok"), (3 * GIB + 1, "failed")]
)
def test_a_peak_of_the_accounts_is_what_was_allocated_and_a_context(peak: int, result: str) -> None:
    assert result_of(checks.peak(with_use(peak_bytes=peak), True)) == result


@pytest.mark.parametrize(("accounting", "result"), [(True, "failed"), (False, "skipped")])
def test_a_peak_without_accounts_fails_where_they_are_on(accounting: bool, result: str) -> None:
    assert result_of(checks.peak(with_use(peak_source="sampled"), accounting)) == result


def test_a_peak_that_is_a_lower_bound_is_no_verdict() -> None:
    held = with_use(peak_source="at-least")
    assert result_of(checks.peak(held, True)) == "skipped"
    assert result_of(checks.own_process(held)) == "ok"


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, granted="GPU-other"),
        replace(REPORT, uuids=()),
        replace(REPORT, uuids=("99999999-2222-4333-8444-555555555555",)),
        replace(REPORT, uuids=(*REPORT.uuids, "99999999-2222-4333-8444-555555555555")),
    ],
)
def test_an_identity_on_which_job_and_cuda_differ_fails(report: Report) -> None:
    assert result_of(checks.identity(replace(HELD, report=report))) == "failed"


BESIDE = Beside(
    gpu=replace(OK_GPU, foreign_bytes=300 * MIB, reason="pid 9 of bob (python3) with 256 MiB"),
    job=replace(JOB, gpu_uses=()),
    pid=9,
    user="bob",
    allocated=256 * MIB,
    report=replace(REPORT, pid=9),
)


def test_a_foreign_process_that_is_named_is_ok() -> None:
    assert result_of(checks.foreign_process(BESIDE)) == "ok"


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (replace(BESIDE, gpu=OK_GPU), "the daemon says: nothing"),
        (replace(BESIDE, user="eve"), "pid 9 of eve held 256 MiB"),
        (replace(BESIDE, pid=99), "pid 99 of bob held 256 MiB"),
        (replace(BESIDE, job=JOB), "1 GiB of it were charged to job 5"),
        (replace(BESIDE, report=Report()), "it said nothing"),
        (replace(BESIDE, report=replace(REPORT, error="cuInit failed")), "cuInit failed"),
    ],
)
def test_a_foreign_process_that_is_unseen_misnamed_or_charged_to_a_job_fails(
    beside: Beside, words: str
) -> None:
    found = checks.foreign_process(beside)
    assert result_of(found) == "failed"
    assert words in found.reason


def test_where_owners_are_hidden_a_foreign_process_is_known_by_its_memory() -> None:
    """As the system's daemon answers who is no admin on a `private` host."""
    process, who = GpuProcess(9, 1, 256 * MIB), ForeignProcess(9, 1000, "bob", "python3")
    told = told_of([Foreign(process, who, 256 * MIB)], (), hides_owners=True)
    beside = replace(BESIDE, gpu=replace(BESIDE.gpu, reason=told.text))
    found = checks.foreign_process(beside)
    assert result_of(found) == "ok"
    assert found.reason.startswith("a process that is not named (private)")
    less = replace(beside, gpu=replace(beside.gpu, foreign_bytes=255 * MIB))
    assert result_of(checks.foreign_process(less)) == "failed"
    charged = replace(beside, job=JOB)
    assert result_of(checks.foreign_process(charged)) == "failed"


@pytest.mark.parametrize(
    ("state", "cause", "result"),
    [
        (JobState.OUT_OF_MEMORY, Cause.CUDA_OOM, "ok"),
        (JobState.OUT_OF_MEMORY, Cause.HOST_OOM, "failed"),
        (JobState.FAILED, Cause.EXIT, "failed"),
        (JobState.TIMEOUT, Cause.TIME_LIMIT, "failed"),
    ],
)
def test_only_an_oom_of_the_gpu_is_one(state: JobState, cause: Cause, result: str) -> None:
    job = replace(JOB, state=state, cause=cause.value)
    assert result_of(checks.out_of_memory(job, REPORT, 49 * GIB)) == result


# --- what others write ----------------------------------------------------------------------------


def test_a_name_with_a_comma_and_figures_that_are_not_told_are_read() -> None:
    found = listed_gpu("3, GPU-1, Card, with comma, [N/A], [N/A], Enabled, 570.1")
    assert (found.name, found.total_mib, found.accounting, found.is_sliced) == (
        "Card, with comma",
        None,
        None,
        True,
    )


@pytest.mark.parametrize("row", ["", "No devices were found", "x, GPU-1, n, 1, On, Off, 5"])
def test_an_answer_of_another_form_is_refused(row: str) -> None:
    with pytest.raises(SmiFailed, match="answered"):
        listed_gpu(row)


@pytest.mark.parametrize(
    "said", ["", "warning\n", '{"pid": 1', "{broken}\n", '{"pid": 1}', "[1]\n", "{}\n"]
)
def test_an_output_without_a_whole_report_is_none(said: str) -> None:
    assert report_in(said) == Report()


def test_a_report_is_found_behind_what_others_say() -> None:
    assert report_in('a warning\n{"pid": 4, "unknown": 1, "uuids": ["a"]}\n').uuids == ("a",)


@pytest.mark.parametrize(
    ("command", "environment", "config", "why"),
    [
        ("gpuschedd\0--gpus\0" + "1\0", "", "", "the daemon's command line"),
        ("gpuschedd\0--set\0gpus=[1]\0", "", "", "the daemon's command line"),
        ("gpuschedd\0--config\0{config}\0", "", "a = 1\ngpus = [1]\n", "`gpus` in {config}"),
        ("gpuschedd\0--config\0{config}\0", "", "[limits]\ngpus = 1\n", ""),
        (
            "gpuschedd\0--config\0{config}\0",
            "A=b\0CUDA_VISIBLE_DEVICES=1\0",
            "",
            "CUDA_VISIBLE_DEVICES of the daemon",
        ),
    ],
)
def test_who_left_gpus_out_is_named(
    tmp_path: Path, command: str, environment: str, config: str, why: str
) -> None:
    file, place = tmp_path / "config.toml", tmp_path / "1"
    file.write_text(config)
    place.mkdir()
    (place / "cmdline").write_text(command.format(config=file))
    (place / "environ").write_text(environment)
    status = replace(UNIT, mode="user")
    assert why_some_are_left_out(status, tmp_path) == why.format(config=file)
