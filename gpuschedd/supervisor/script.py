"""The submitted script: a file in our directory that its user may read, while the job runs.

It is never the user's own: whoever owns a file may change it, link it elsewhere and keep it.
Reading is granted by an access control list, and nobody links what he may not write where the
kernel protects hard links (`fs.protected_hardlinks`; systemd sets it).
"""

from __future__ import annotations

import errno
import os
import pwd
import struct

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
    """The script as a file in our directory; None where there is none."""
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
            if spec.system and spec.uid != os.geteuid():
                _let_read(fd, spec.uid)
    finally:
        os.close(dir_fd)
    return os.fsencode(f"{spec.scripts_dir}/{spec.label}")


# acl(5), as the kernel takes it: a version, then tag, permissions and id of each entry.
_ACL = "system.posix_acl_access"
_ACL_VERSION, _NOBODY, _READ = 2, 0xFFFFFFFF, 4
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20


def _let_read(fd: int, uid: int) -> None:
    """That user alone, beside root."""
    entries = (
        *((_OWNER, _READ, _NOBODY), (_USER, _READ, uid), (_GROUP, 0, _NOBODY)),
        *((_MASK, _READ, _NOBODY), (_OTHERS, 0, _NOBODY)),
    )
    rows = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(fd, _ACL, struct.pack("<I", _ACL_VERSION) + rows)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # A file system without such lists: the user's own group, which most have to themselves.
        try:
            group = pwd.getpwuid(uid).pw_gid
        except KeyError:
            raise OSError(errno.EPERM, f"uid {uid} has no account") from error
        os.fchown(fd, -1, group)
        os.fchmod(fd, 0o440)


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
