"""Which jobs are meant: `7`, `1-3,7`, `@` (my last one), `@~1` (the one before).

Pure; whose jobs are "mine" is asked through a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from gpusched_client.errors import Invalid, NotFound
from gpusched_client.wire.limits import IDS_MAX

NAMED_IDS_MAX = 100_000
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_RECENT = re.compile(r"@(?:~(\d{1,4}))?", re.ASCII)

Recent = Callable[[int], list[int]]
"""Gives my newest n job ids, newest last."""


def parse_ids(words: Iterable[str], recent: Recent) -> tuple[int, ...]:
    """The ids that the words name, each once, in the order of naming. Raises Invalid, NotFound."""
    ids: dict[int, None] = {}
    for word in words:
        for part in word.split(","):
            ids.update(dict.fromkeys(_ids_of(part.strip(), recent)))
            if len(ids) > NAMED_IDS_MAX:
                raise Invalid(f"more than {NAMED_IDS_MAX} jobs; name fewer at once")
    return tuple(ids)


def _ids_of(part: str, recent: Recent) -> Iterable[int]:
    back = _RECENT.fullmatch(part)
    if back is not None:
        return [_recent_id(int(back[1] or 0), recent)]
    match = _RANGE.fullmatch(part)
    if match is None:
        raise Invalid(f"{part!r} is no job; write 7, 1-3,7, @ (my last job) or @~1 (before it)")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise Invalid(f"{part!r} is no range of jobs; ids begin at 1 and the smaller comes first")
    if last - first >= NAMED_IDS_MAX:
        raise Invalid(f"{part!r} names more than {NAMED_IDS_MAX} jobs; name fewer at once")
    return range(first, last + 1)


def _recent_id(back: int, recent: Recent) -> int:
    if back >= IDS_MAX:
        raise Invalid(f"@~{back} is too far back; the limit is @~{IDS_MAX - 1}")
    mine = recent(back + 1)
    if len(mine) <= back:
        raise NotFound(f"@~{back}: you have {len(mine)} jobs on record")
    return mine[-1 - back]
