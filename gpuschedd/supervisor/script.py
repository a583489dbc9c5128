"""The submitted script: a file of the user's own in our directory, for as long as the job runs."""

from __future__ import annotations

import errno
import os

from gpuschedd.supervisor.records import open_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuschedd.supervisor.spec import Spec


def script_command(script: bytes, path: bytes, arguments: tuple[bytes, ...]) -> list[bytes]:
    """The interpreter's argv, as the kernel would build it from the first line."""
    line = script[:256].split(b"\n", 1)[0]
    words = line[2:].strip(b" \t\r").split(None, 1) if line.startswith(b"#!") else []
    return [*(words or [b"/bin/sh"]), path, *arguments]


def place_script(spec: Spec) -> bytes | None:
    """The script as a file of the user's own in our directory; None where there is none."""
    if spec.script is None:
        return None
    dir_fd = open_directory(spec.scripts_dir)
    try:
        found = os.fstat(dir_fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError(errno.EPERM, f"{spec.scripts_dir} is not ours alone")
        remove_script(dir_fd, spec.label)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(spec.label, flags, 0o400, dir_fd=dir_fd)
        with open(fd, "wb") as file:
            file.write(spec.script)
            if spec.system:
                os.fchown(fd, spec.uid, -1)
    finally:
        os.close(dir_fd)
    return os.fsencode(f"{spec.scripts_dir}/{spec.label}")


def remove_script(dir_fd: int, label: str) -> None:
    """Nothing happens where there is none."""
    try:
        os.unlink(label, dir_fd=dir_fd)
    except FileNotFoundError:
        pass


def clear_script(spec: Spec) -> None:
    """Remove what place_script placed; best effort."""
    if spec.script is None:
        return
    try:
        dir_fd = open_directory(spec.scripts_dir)
        remove_script(dir_fd, spec.label)
        os.close(dir_fd)
    except OSError:
        pass  # the daemon removes it with the directory


RECORD_VERSION = 1
