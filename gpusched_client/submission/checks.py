"""Whether a job will find what it needs, looked up as the job will: PATH, directory, uid.

What could only be told at the start, hours later, is told at submit. Reads the file system; must
not talk to a daemon. How commands are found is that of gpuschedd/supervisor/program.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from gpusched_client.errors import Invalid
from gpusched_client.submission.programs import (
    SHELL_WORDS,
    SHELLS,
    command_behind,
    interpreter_for,
    is_wrapper,
    script_argument,
)
from gpusched_client.submission.script import (
    BYTE_ORDER_MARK,
    interpreter_words,
    is_shells,
    refuse_carriage_return,
)
from gpusched_client.terms import fill_pattern, printable
from gpusched_client.wire.submit_messages import JobRequest

DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
DEFAULT_OUTPUT = b"gsub-%j.out"
SAMPLE_ID = 4242  # stands for the id that the job will get
_INTERPRETERS_MAX = 4  # the kernel's, of scripts whose interpreter is a script
_HEAD_BYTES = 4096
_ELF = b"\x7fELF"
_PT_INTERP = 3


def check_request(request: JobRequest) -> None:
    """Raise Invalid, with the cure, where the job could not start or write its output."""
    _check_directory(request.cwd)
    _Program(request).check()
    _Logs(request).check()


def shown(word: bytes) -> str:
    """A path or word in a message."""
    return printable(word)


def _check_directory(cwd: bytes) -> None:
    try:
        mode = os.stat(cwd).st_mode
    except OSError as error:
        cure = "make it first" if error.errno in (2, 20) else "name another with -D"
        if b"$" in cwd:
            cure = "a $ is not expanded here; write it out, or as ~/"
        raise Invalid(
            f"directory {shown(cwd)}: {_reason(error)}; {cure}", {"path": "cwd"}
        ) from error
    if not stat.S_ISDIR(mode):
        raise Invalid(f"{shown(cwd)} is not a directory; name one with -D", {"path": "cwd"})
    if not _may(cwd, os.X_OK):
        raise Invalid(f"you may not enter the directory {shown(cwd)}", {"path": "cwd"})


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _may(path: bytes, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _head(path: bytes) -> bytes:
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(_HEAD_BYTES) if is_file else b""
    except OSError:
        return b""


def _open_at_once(path: str | bytes, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO has no writer yet


# --------------------------------------------------------------------------------- programs


class _Program:
    """What the job executes: found along PATH, with the interpreters behind it."""

    def __init__(self, request: JobRequest) -> None:
        self._request = request
        self._cwd = request.cwd
        self._path = request.environment.get(b"PATH", DEFAULT_PATH)

    def check(self) -> None:
        request = self._request
        if request.script is not None:
            source = request.script_path or b"the script"
            self._check_first_line(request.script, source)
            if is_shells(request.script):
                self._check_text(request.script, source)
        elif request.shell is not None:
            self._check_text(request.shell, b"the shell line")
        elif request.argv is not None:
            self._check_command(request.argv)

    def _check_command(self, argv: tuple[bytes, ...]) -> None:
        if argv[0] in SHELL_WORDS:
            raise self._missing(argv)
        program = self.find(argv[0])
        if program is None:
            raise self._missing(argv)
        self._check_program(program)
        name, rest = os.path.basename(argv[0]), argv[1:]
        if name == b"env":
            if behind := self._check_env(rest, b"env"):
                self._check_command(behind)
        elif is_wrapper(name):
            if behind := command_behind(name, rest):
                self._check_command(behind)
        elif script := script_argument(name, rest):
            self._check_script_argument(name, script)

    def find(self, command: bytes) -> bytes | None:
        """The file that is executed: the first that may be; else the first that is there."""
        there: bytes | None = None
        for path in self._candidates(command):
            if os.path.isfile(path) and _may(path, os.X_OK):
                return path
            if there is None and os.path.exists(path):
                there = path
        return there if b"/" in command else None

    def _candidates(self, command: bytes) -> Iterator[bytes]:
        places = [b""] if b"/" in command else self._path.split(b":")
        for place in places:
            yield os.path.normpath(os.path.join(self._cwd, place, command))

    def _missing(self, argv: tuple[bytes, ...]) -> Invalid:
        from gpusched_client.submission.cures import cure_of

        return _refused(cure_of(argv, self._cwd, self._path))

    def _check_program(self, path: bytes) -> None:
        if os.path.isdir(path):
            raise _refused(f"{shown(path)} is a directory; name a program in it")
        if not os.path.isfile(path):
            raise _refused(f"{shown(path)} is no file that can be executed; name a program")
        if not _may(path, os.X_OK):
            from gpusched_client.submission.cures import not_executable

            raise _refused(not_executable(path))
        self._check_executable(path)

    def _check_executable(self, path: bytes, depth: int = 0) -> None:
        """Follow first lines to what the kernel can run."""
        head = _head(path)
        if head.startswith(_ELF):
            loader = _elf_loader(path)
            if loader is not None and not os.path.exists(loader):
                raise _refused(
                    f"{shown(path)} needs {shown(loader)}, which is not here: it is a program for "
                    "another system"
                )
        elif head.startswith(b"#!"):
            self._check_first_line(head, path, depth)
        elif head.startswith(BYTE_ORDER_MARK + b"#!"):
            raise _refused(
                f"{shown(path)} begins with a byte order mark, so that its first line is not seen; "
                f"remove it: sed -i '1s/^\\xef\\xbb\\xbf//' {shown(path)}"
            )
        elif b"\0" in head[:256] and not _has_foreign_formats():
            raise _refused(f"{shown(path)} is no program that this host can run")
        elif b"\0" not in head[:256] and (interpreter := interpreter_for(path)):
            raise _refused(
                f"{shown(path)} has no #! line, so that a shell would run it; write "
                f"{interpreter} {shown(path)}, or give it one"
            )

    def _check_first_line(self, content: bytes, source: bytes, depth: int = 0) -> None:
        refuse_carriage_return(content, shown(source))
        words = interpreter_words(content)
        if not words:
            return  # a shell runs it
        interpreter = os.path.join(self._cwd, words[0])
        if not os.path.exists(interpreter):
            raise _refused(
                f"{shown(source)}: its interpreter {shown(words[0])} does not exist; mend its "
                "first line"
            )
        if not os.path.isfile(interpreter) or not _may(interpreter, os.X_OK):
            raise _refused(
                f"{shown(source)}: its interpreter {shown(words[0])} cannot be executed; mend its "
                "first line"
            )
        if os.path.basename(words[0]) == b"env" and len(words) > 1:
            # Without -S all that follows env is one word.
            split = words[1].startswith((b"-S", b"--split-string"))
            rest = words[1].split() if split else [words[1]]
            self._check_env(rest, source)
        elif depth < _INTERPRETERS_MAX:
            self._check_executable(interpreter, depth + 1)

    def _check_env(
        self, words: list[bytes] | tuple[bytes, ...], source: bytes
    ) -> tuple[bytes, ...]:
        """The command behind env with its words, where that is plain to see."""
        left = list(words)
        while left:
            word = left.pop(0)
            if word in (b"-S", b"-v", b"--"):
                continue
            if word == b"-u" and left and left[0] != b"PATH":
                del left[0]
                continue
            if word.startswith(b"-S"):
                word = word[2:]
            if word.startswith(b"-"):
                return ()  # -i, -C: the place may be another
            if b"=" in word:
                if word.startswith(b"PATH="):
                    return ()
                continue
            if self.find(word) is None:
                raise _refused(
                    f"{shown(source)}: {shown(word)} is not in PATH; name what is, or activate its "
                    "environment first"
                )
            return (word, *left)
        return ()

    def _check_text(self, content: bytes, source: bytes) -> None:
        """A shell takes the CR of a Windows file as a part of the last word of each line."""
        if b"\r\n" not in content:
            return
        number = content[: content.index(b"\r\n")].count(b"\n") + 1
        raise _refused(
            f"line {number} of {shown(source)} ends in CR, as files from Windows do: the shell "
            "takes it as a part of the word before; run dos2unix on it, or sed -i 's/\\r$//'"
        )

    def _check_script_argument(self, name: bytes, word: bytes) -> None:
        """`python3 train.py`: the file that the interpreter will look for."""
        path = os.path.join(self._cwd, word)
        is_shell = name in SHELLS
        if not os.path.exists(path) and not (is_shell and self.find(word) is not None):
            from gpusched_client.submission.cures import nearest_file

            near = nearest_file(path)
            hint = f"; did you mean {near}?" if near else f"; it runs in {shown(self._cwd)}"
            raise _refused(f"{shown(name)} will not find {shown(word)}{hint}")
        if is_shell and os.path.isfile(path):
            self._check_text(_head(path), word)


def _refused(text: str) -> Invalid:
    return Invalid(f"{text} (--no-check submits it all the same)", {"path": "argv"})


def _has_foreign_formats() -> bool:
    """Whether the kernel is told how to run programs of other systems."""
    try:
        return bool(set(os.listdir("/proc/sys/fs/binfmt_misc")) - {"register", "status"})
    except OSError:
        return False


def _elf_loader(path: bytes) -> bytes | None:
    """The loader that an ELF program of 64 bits names; None where it names none or is not read."""
    import struct

    head = _head(path)
    if len(head) < 64 or head[4:6] != b"\x02\x01" or _has_foreign_formats():
        return None
    offset, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    for index in range(count):
        start = offset + index * size
        if start + 56 > len(head):
            return None
        kind, at, length = (
            *struct.unpack_from("<I", head, start),
            *struct.unpack_from("<Q", head, start + 8),
            *struct.unpack_from("<Q", head, start + 32),
        )
        if kind == _PT_INTERP and at + length <= len(head):
            return head[at : at + length].rstrip(b"\0")
    return None


# ------------------------------------------------------------------------------------- logs


class _Logs:
    """Where the output goes, as it will be opened: as this user, in the job's directory."""

    def __init__(self, request: JobRequest) -> None:
        self._request = request

    def check(self) -> None:
        """Raise Invalid where a log cannot be opened."""
        request = self._request
        self._check_log("output", request.output or DEFAULT_OUTPUT)
        if request.error is not None:
            self._check_log("error", request.error)

    def _check_log(self, what: str, pattern: bytes) -> None:
        if b"$" in pattern:
            raise self._cannot(what, pattern, "a $ is not expanded here; write it out, or as ~/")
        filled = self._filled(pattern)
        path = os.path.join(self._request.cwd, filled)
        if path.startswith((b"/dev/std", b"/dev/fd/", b"/proc/self/", b"/dev/tty")):
            if what == "output" or path != b"/dev/stdout":
                raise self._cannot(what, pattern, "the job has no terminal; name a file")
            return
        try:
            found = os.stat(path)
        except FileNotFoundError:
            self._check_parent(what, pattern, os.path.realpath(path))
        except OSError as error:
            raise self._cannot(what, pattern, f"{_reason(error)}; name another file") from error
        else:
            self._check_file(what, pattern, path, found.st_mode)

    def _filled(self, pattern: bytes) -> bytes:
        import pwd

        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            user = str(os.geteuid())
        name, host = self._request.name or "job", os.uname().nodename
        return fill_pattern(pattern, job_id=SAMPLE_ID, name=name, user=user, host=host)

    def _check_parent(self, what: str, pattern: bytes, path: bytes) -> None:
        parent = os.path.dirname(path)
        if path.endswith(b"/") or pattern.endswith(b"/"):
            raise self._cannot(what, pattern, "it is a directory; name a file in it")
        if not os.path.isdir(parent):
            pattern_of_parent = os.path.dirname(pattern)
            cure = f"mkdir -p {shown(os.path.dirname(pattern) or parent)}"
            if b"%" in pattern_of_parent:
                cure = "no directories are made for a job; let % stand in the file's name alone"
            raise self._cannot(what, pattern, f"{shown(parent)} is no directory; {cure}")
        if not _may(parent, os.W_OK | os.X_OK):
            why = f"you may not write into {shown(parent)}; name another place with -o"
            raise self._cannot(what, pattern, why)
        if len(os.path.basename(path)) > 255:
            raise self._cannot(what, pattern, "its name is longer than 255 bytes")

    def _check_file(self, what: str, pattern: bytes, path: bytes, mode: int) -> None:
        if stat.S_ISDIR(mode):
            raise self._cannot(what, pattern, "it is a directory; name a file in it")
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            raise self._cannot(what, pattern, "it is neither a file nor a FIFO nor a device")
        if not _may(path, os.W_OK):
            raise self._cannot(what, pattern, "you may not write to it; name another file")

    def _cannot(self, what: str, pattern: bytes, why: str) -> Invalid:
        return Invalid(f"{what} {shown(pattern)}: {why}", {"path": what})
