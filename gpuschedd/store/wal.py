"""SQLite's log as bytes: does it end where its last transaction ended, or at a damaged frame?

SQLite reads a log up to its first bad frame and forgets what lies behind. After a power cut that is
right: the last transaction may be there in parts, and nobody was told of it. But it was synced,
and acknowledged, where frames of a later transaction follow: those were written after that.
https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from operator import mul
from pathlib import Path

_HEADER, _FRAME_HEADER = 32, 24
_MAGIC = 0x377F0682  # the last bit: checksums over big-endian words
FRAMES_MAX = 2_048  # that are looked at, from the end: usually all, since there are 250
_WORD = 0xFFFFFFFF


def has_lost_frames(path: Path) -> bool:
    """Whether an acknowledged transaction lies behind, or at, a frame that SQLite refuses."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
            if len(header) < _HEADER:
                return False
            page_bytes = struct.unpack_from(">I", header, 8)[0]
            if page_bytes not in {2**power for power in range(9, 17)}:
                page_bytes = 4096  # the header itself is damaged
            size = _FRAME_HEADER + page_bytes
            frames = (path.stat().st_size - _HEADER) // size
            first = max(0, frames - FRAMES_MAX)
            before = header[-8:] if first == 0 else b""
            if first:
                file.seek(_HEADER + (first - 1) * size)
                before = file.read(size)[16:24]
            file.seek(_HEADER + first * size)
            read = (file.read(size) for _ in range(frames - first))
            return _is_cut_short(header, before, read)
    except FileNotFoundError:
        return False


def _is_cut_short(header: bytes, before: bytes, frames: Iterator[bytes]) -> bool:
    """Whether a good frame follows a commit that is, or comes after, a bad one."""
    is_big = bool(struct.unpack_from(">I", header)[0] & 1)
    is_sound = _checksum(header[:24], b"\0" * 8, is_big) == header[24:32]
    salts = header[16:24] if is_sound else b""
    bad = not is_sound
    after_commit = before_is_foreign_commit = False
    for frame in frames:
        salts = salts or frame[8:16]  # where the header is lost, its frames agree
        is_ours, is_commit = frame[8:16] == salts, frame[4:8] != b"\0\0\0\0"
        is_good = is_ours and _checksum(frame[:8] + frame[24:], before, is_big) == frame[16:24]
        # A frame of an earlier round of the log is no commit of this one, unless the next one goes
        # on from its checksum: then it is its salt that is damaged.
        if is_good and bad and (after_commit or before_is_foreign_commit):
            return True
        bad = bad or not is_good
        after_commit = after_commit or (bad and is_ours and is_commit)
        before_is_foreign_commit = is_commit and not is_ours
        before = frame[16:24]
    return False


def _checksum(content: bytes, before: bytes, is_big: bool) -> bytes:
    """SQLite's sum of 32-bit words, going on from the one before."""
    words = array("I", content)
    if is_big != (sys.byteorder == "big"):
        words.byteswap()
    first, second = struct.unpack(">II", before)
    # s0 += x0 + s1; s1 += x1 + s0, for each two words: a linear map, so that its powers times the
    # words give the same at the speed of C. They are Fibonacci's numbers.
    own, other = _factors(len(words))
    total0 = sum(map(mul, words, own)) + first * _fibonacci(len(words) - 1)
    total0 += second * _fibonacci(len(words))
    total1 = sum(map(mul, words, other)) + first * _fibonacci(len(words))
    total1 += second * _fibonacci(len(words) + 1)
    return struct.pack(">II", total0 & _WORD, total1 & _WORD)


_known: dict[int, tuple[list[int], list[int]]] = {}
_numbers = [0, 1]


def _fibonacci(index: int) -> int:
    """Modulo 2**32."""
    while len(_numbers) <= index:
        _numbers.append((_numbers[-1] + _numbers[-2]) & _WORD)
    return _numbers[index]


def _factors(words: int) -> tuple[list[int], list[int]]:
    """What each word counts in either sum."""
    if words not in _known:
        own = [_fibonacci(words - 1 - place) for place in range(words)]
        other = [_fibonacci(words - place) for place in range(words)]
        _known[words] = (own, other)
    return _known[words]
