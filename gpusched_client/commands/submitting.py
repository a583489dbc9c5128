"""The work of gsub once its words are understood: the request, its calls, what is said of it.

Needs no click. `options` are the values of gsub's options, by the names that gsub.py gives them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpusched_client.commands.answering import (
    EXIT_INTERRUPTED,
    note_done,
    print_err,
    print_out,
    tell_who_answered,
)
from gpusched_client.errors import Invalid
from gpusched_client.wire.job_options import OPTIONS, JobOption, describe_request

if TYPE_CHECKING:
    from gpusched_client.client import Client
    from gpusched_client.submission.script import Script
    from gpusched_client.wire.job_messages import JobView
    from gpusched_client.wire.submit_messages import JobRequest, SubmitResult

_WAIT_RECONNECT_S = 600.0


def request_of(script: Script | None, options: dict[str, Any], asked: dict[str, Any]) -> JobRequest:
    """What is submitted. `asked` are the keywords of job_request among the options."""
    from gpusched_client.submission.request import job_request
    from gpusched_client.terms import legal_name

    words = list(options["words"])
    command: dict[str, Any] = {"argv": words}
    name = options["name"]
    if options["line"] is not None:
        command = {"shell": options["line"]}
    elif script is not None:
        source = options["script_file"] or words.pop(0)
        name = name or ("script" if source == "-" else legal_name(source))
        if script.is_captured:
            path = script.path
            command = {"script": script.content, "script_path": path, "args": words}
        else:
            command = {"argv": [*script.place_command, *words]}
    else:
        from gpusched_client.submission.script import unread

        for warning in unread(words):
            print_err(f"gsub: {warning}")
    check = not options["no_check"]
    try:
        return job_request(**command, cwd=options["chdir"], check=check, **{**asked, "name": name})
    except Invalid as error:
        raise _in_our_words(error, options) from error


def _in_our_words(error: Invalid, options: dict[str, Any]) -> Invalid:
    """The same with the names of our options instead of the wire's fields."""
    path = str(error.data.get("path", ""))
    if not error.message.startswith(f"{path}: "):
        return error
    row = next((row for row in OPTIONS.values() if row.keyword == path), None)
    name = path if row is None else _flag_given(row, options)
    text = error.message.removeprefix(f"{path}: ")
    if row is not None and not options["gpus"] and "0 GPUs" in text:
        return Invalid(f"{name} needs a GPU; -g is 0", error.data)
    return Invalid(text if path.startswith("argv") else f"{name}: {text}", error.data)


def _flag_given(row: JobOption, options: dict[str, Any]) -> str:
    """The option that a message about this row's value names."""
    form = row.other_form
    if form is not None and options.get(form.keyword) is not None:
        return form.flag
    return row.longest_flag


# ------------------------------------------------------------------------------------- calls


def dry_run(request: JobRequest, options: dict[str, Any]) -> int:
    """Say what would happen."""
    from gpusched_client.client import Client
    from gpusched_client.output.json import json_text
    from gpusched_client.terms import printable
    from gpusched_client.wire.submit_messages import SubmitRequest

    with Client() as client:
        tell_who_answered("gsub", client)
        _warn_of_shared_logs(request, client)
        result = client.submit_request(SubmitRequest((request,), dry_run=True))
    _warn(result)
    if options["as_json"]:
        print_out(json_text({"would_start": result.would_start, "reasons": result.reasons}))
        return 0
    limit_s = result.time_limits_s[0] if result.time_limits_s else None
    print_out(f"Understood: {printable(describe_request(request, limit_s))}\n")
    _hint(result)
    for text in filter(None, result.would_start):
        print_out(f"Would start now on {printable(text)}\n")
    for text in filter(None, result.reasons):
        print_out(f"Would wait: {printable(text)}\n")
    return 0


def submit(request: JobRequest, options: dict[str, Any]) -> int:
    """One call, and with `wait` a second; the exit status."""
    from gpusched_client.client import Client
    from gpusched_client.wire.submit_messages import SubmitRequest

    with Client(reconnect_s=_WAIT_RECONNECT_S if options["wait"] else 30.0) as client:
        tell_who_answered("gsub", client)
        _warn_of_shared_logs(request, client)
        try:
            result = client.submit_request(SubmitRequest((request,)))
        except KeyboardInterrupt:
            print_err(
                "gsub: interrupted while submitting; `gq --me` shows whether the job is there"
            )
            return EXIT_INTERRUPTED
        job_id = result.job_ids[0]
        note_done(f"job {job_id} is submitted")
        _warn(result)
        if not (options["wait"] and options["as_json"]):
            _print_submitted(request, result, options)
        return _wait(client, job_id, options) if options["wait"] else 0


def _warn_of_shared_logs(request: JobRequest, client: Client) -> None:
    for warning in client.shared_logs(request):
        print_err(f"gsub: {warning}")


def _warn(result: SubmitResult) -> None:
    for warning in result.warnings:
        print_err(f"gsub: {warning}")


def _hint(result: SubmitResult) -> None:
    from gpusched_client.terms import printable

    for hint in result.hints:
        print_err(f"gsub: {printable(hint)}")


def _print_submitted(request: JobRequest, result: SubmitResult, options: dict[str, Any]) -> None:
    job_id = result.job_ids[0]
    if options["parsable"]:
        print_out(f"{job_id}\n")
        return
    limit_s = result.time_limits_s[0] if result.time_limits_s else None
    if options["as_json"]:
        from gpusched_client.output.json import json_text

        print_out(json_text({"job_id": job_id, "time_limit_s": limit_s, "name": request.name}))
    else:
        from gpusched_client.terms import printable

        print_out(f"Submitted job {job_id}: {printable(describe_request(request, limit_s))}\n")
        _hint(result)


def _wait(client: Client, job_id: int, options: dict[str, Any]) -> int:
    """Wait for the job's end and give its status; an interrupt leaves the job alone."""
    from gpusched_client.commands.report import exit_status
    from gpusched_client.errors import Unavailable
    from gpusched_client.output.json import json_text

    sys.stdout.flush()
    try:
        job = client.wait(job_id)
    except KeyboardInterrupt:
        print_err(f"gsub: job {job_id} goes on; `gq {job_id}` shows it, `gcancel {job_id}` ends it")
        return EXIT_INTERRUPTED
    except Unavailable as error:
        raise Unavailable(f"job {job_id} is submitted, but {error.message}") from error
    if options["as_json"]:
        print_out(json_text(job))
    _print_ended(job)
    return exit_status(job)


def _print_ended(job: JobView) -> None:
    import time

    from gpusched_client.output.text import gpu_or_reason
    from gpusched_client.terms import JobState

    if job.state is not JobState.COMPLETED:
        print_err(f"gsub: job {job.job_id} is {job.state}: {gpu_or_reason(job, time.time())}")
    elif job.cause_detail:  # what it left behind, or what its output shows
        print_err(f"gsub: job {job.job_id}: {job.cause_detail}")
