"""What a program said last: whether it failed of the OOM before it, or of something else later."""

from __future__ import annotations

import os
import re

from gpuschedd.supervisor.syscalls import signal

#: Uncaught exceptions and giving up, crashes as shells and runtimes tell them, panics, assertions;
#: in lower case. A panic's message may be on its next line.
LAST_WORDS = (
    rb"^(?:\[?(?:rank ?)?\d+\]?: ?)?(?:[\w.]*(?:error|exception|exit|interrupt)|fatal[a-z ]*|panic"
    rb"|\w+\.[\w.]*timeout(?:expired)?)(?::.*)?$"
    rb"|^(?:[^:\n]*: line \d+: +|\[\d+\]\+? +)?(?:\d+ +)?(?:segmentation fault|bus error"
    rb"|aborted|killed|illegal instruction|floating point exception|trace/breakpoint trap)"
    rb"(?::? ?\d+)?(?: *\(core dumped\).*| {2}.*)?$"
    rb"|^[^:\n]*: line \d+: .*: command not found$"
    rb"|^thread '.{0,200}' (?:\(\d+\) )?panicked at .*(?:\n(?!note: |stack backtrace).*)?"
    rb"|^terminate called .*$"
    rb"|^.{0,500}: assertion [`'].*failed\.?$"
    rb"|^(?:\*\*\* .+ \*\*\*.*|(?:free|malloc|realloc|munmap_chunk)\(\): .*|double free .*"
    rb"|corrupted (?:size|double).*)$"
    rb"|^.*\b(?:uncaught|received|caught) (?:signal )?(?:sig(?:segv|bus|fpe|ill|abrt)|\d+ \(seg).*$"
    rb"|^.* signal \d+ \(sig[a-z]+\) received .*$"
)

#: These are a program's own mistakes, whatever words are in their messages.
OWN_ERRORS = (
    rb"(?:\[?(?:rank ?)?\d+\]?: ?)?(?:(?:key|index|value|type|name|attribute|assertion|import"
    rb"|zerodivision|modulenotfound|filenotfound|permission|isadirectory|notadirectory"
    rb"|unicodedecode|recursion|syntax)error\b"
    rb"|panic: runtime error: (?!.*nil pointer)"
    rb"|terminate called .*'std::(?:out_of_range|invalid_argument|length_error|domain_error"
    rb"|logic_error|bad_variant_access|bad_optional_access|filesystem::))"
)
#: What running out of memory on a GPU never leads to: a name that is not found, a GPU or a kernel
#: that is wrong, data of a wrong size, and the failure of a tool that uses no GPU.
NEVER_OF_MEMORY = (
    rb"name or service not known|name resolution|name does not resolve|gaierror|no route to host"
    rb"|network is unreachable|certificate"
    rb"|device-side assert|no kernel image|invalid device (?:ordinal|function)"
    rb"|no cuda-capable device|driver version is insufficient|\becc error|out of bounds"
    rb"|index out of|out of range|divide by zero|division by zero|overflow"
    rb"|no such file or directory|permission denied|command not found|no space left"
    rb"|deadlock|concurrent map|shared memory \(shm\)"
    rb"|dataloader worker .*killed by signal: (?!terminated|aborted)"
    rb"|command [\[('\"]+(?:\S*/)?(?:git|nvidia-smi|ninja|make|cmake|gcc|g\+\+|cc|c\+\+|ld|nvcc"
    rb"|cp|mv|rm|ln|mkdir|cat|ls|id|which|hostname|lscpu|ldconfig|tar|unzip|zip|gzip|zstd|wget|curl"
    rb"|rsync|scp|ssh|aws|gsutil|gcloud|az|rclone|ffmpeg|ffprobe|sox|pip3?|conda|docker)['\" ,]"
)
#: SIGKILL is somebody's doing, or the host's: no process gets it because an allocation failed.
KILLED = rb"(?:[^:\n]*: line \d+: +|\[\d+\]\+? +)?(?:\d+ +)?killed\b"
#: What the death of one process of a job does to the others, and how the libraries on a GPU, and
#: those who load a model onto it, tell of its memory.
AFTERMATH = (
    rb"nccl|gloo|rccl|\bmpi\b|distributed|collective|communicator|(?<!reset by )peer|rank"
    rb"|root cause|engine|worker|childfailed|processraised|processexited|brokenprocesspool"
    rb"|systemexit|keyboardinterrupt|\(sigterm\)|\(sigint\)|cublas|cudnn|out of memory|outofmemory"
    rb"|alloc(?:at|\b)|(?:load|creat\w+)(?: \w+){0,2} (?:model|context)|poisonerror|recverror"
    rb"|senderror|any \{"
)
#: As the end of a program whose allocation just failed these belong to it; of one that went on
#: they are errors of their own: crashes, connections, other commands, whatever CUDA reports later.
UNCLEAR = (
    rb"calledprocess|non-zero|broken ?pipe|connect|eoferror|socket|timeout|timed out"
    rb"|cuda|hip error|launch failure|illegal (?:memory|instruction)|segmentation|sigsegv|sigbus"
    rb"|sigabrt|bus error|aborted|breakpoint trap|floating point|nil pointer|null|`none` value"
    rb"|assertion|terminate called|free\(\)|alloc\(\)|chunk\(\)|double free|corrupt|\*\*\*"
)
#: A host that an error names: that of a service elsewhere, which no OOM in this job can reach.
HOST = rb"(?:host=|host |https?://|server at |connecting to )['\"\[(]*([\w.:-]*\w)"
HERE = rb"(?:localhost|127\.|0\.0\.0\.0|::1)"

#: An exception out of the handling of another one belongs to it.
CHAINED = b"the above exception"
#: So says a program that gets over an OOM; advice what to try is none.
HANDLED = (
    rb"\bretry(?:ing)?\b(?! failed)|trying again|falling back|fallback|\bskipping\b|\bcontinuing\b"
    rb"|resum(?:ed|ing)\b|recover(?:ed|ing)\b"
    rb"|(?<!try )(?<!by )(?<!consider )\b(?:reduc|halv|lower|decreas|shrink)(?:ed|ing)\b"
)
#: Lines that show no progress: parts of traces and dumps, logs of libraries, words of failing.
NO_PROGRESS = (
    rb"\s|$|file \"|traceback |frame #\d|-{4,}|={4,}|for simplicity, jax|the stack trace below "
    rb"|bufferassignment |peak buffers|goroutine \d|note: |stack backtrace|wandb: |srun: "
    rb"|\[rank\d+\]:|\[[wief]\d* |[wef]\d{4} |\*\*\* |.*\.(?:cc|cpp|cu):\d+[\]: ]|.*\d%\|"
    rb"|.*(?:error|exception|fail|abort|unable|cannot|could not|couldn't|terminat|\bexit"
    rb"|\bkill|signal|memory|alloc|core dumped|what\(\))"
)
TRACEBACK = b"traceback (most recent call last)"
#: How the end of the main process counts that no shell put into words.
SILENT_DEATHS: dict[int, bytes] = {
    signal.SIGSEGV: b"segmentation fault",
    signal.SIGBUS: b"bus error",
    signal.SIGILL: b"illegal instruction",
    signal.SIGFPE: b"floating point exception",
    signal.SIGABRT: b"aborted",
    signal.SIGKILL: b"killed",
}


def failed_of_something_else(before: bytes, oom: bytes, after: bytes, signum: int | None) -> bool:
    """Whether an error behind the last OOM is the program's own; all in lower case.

    `oom` is the line that tells of it, `before` and `after` are what is around, and `signum` is
    what ended the main process. What an OOM leads to is no other failure: the end of the job's
    other processes, what is chained to it, a crash of what never looked whether it got the memory.
    """
    after += b"\n" + SILENT_DEATHS.get(signum or 0, b"")
    lines_count = not _are_lines_late(before)
    went_on, position = bool(re.search(HANDLED, oom)), 0
    for found in re.finditer(LAST_WORDS, after, re.MULTILINE):
        between = after[position : found.start()]
        position = found.end()
        went_on = (
            went_on
            or bool(re.search(HANDLED, between))
            or (lines_count and _shows_progress(between))
        )
        # All that came so far is of the OOM, and so is what is chained to it.
        if CHAINED not in between and not _is_of_oom(found[0], went_on):
            return True
    return False


def _is_of_oom(words: bytes, went_on: bool) -> bool:
    if re.match(OWN_ERRORS, words) or re.search(NEVER_OF_MEMORY, words) or re.match(KILLED, words):
        return False
    if re.search(AFTERMATH, words):
        return True
    return not went_on and bool(re.search(UNCLEAR, words)) and not _is_elsewhere(words)


def _is_elsewhere(words: bytes) -> bool:
    here = re.compile(HERE + b"|" + re.escape(os.uname().nodename.lower().encode()) + rb"\b")
    return any(not here.match(host) for host in re.findall(HOST, words))


def _are_lines_late(before: bytes) -> bool:
    """Whether lines behind the OOM may be from before it.

    What a program prints to a file is often written at its end, behind an uncaught exception. Then
    nothing but traces came in time.
    """
    begin = before.rfind(TRACEBACK)
    frames = before[begin:].split(b"\n")[1:]
    is_uncaught = begin >= 0 and all(line[:1].isspace() or not line for line in frames)
    return is_uncaught and not _shows_progress(before[:begin])


def _shows_progress(text: bytes) -> bool:
    return any(not re.match(NO_PROGRESS, line) for line in text.split(b"\n"))


RECORD_VERSION = 1
