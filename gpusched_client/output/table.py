"""Aligned columns on a terminal of any width. Pure; knows no message."""

from __future__ import annotations

from collections.abc import Sequence

_LAST_COLUMN_CHARS_MIN = 12
_NAME_CHARS_MIN = 8


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    right: frozenset[str] = frozenset(),
) -> str:
    """Aligned columns; where `width` is given, the last column and the names are cut to fit."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(map(places, column)) for column in zip(*lines, strict=True)]
    gap = "  " if width is None else _fit(widths, headings, width)
    text_lines = []
    for line in lines:
        cells = [
            _cell(cell, widths[index], headings[index] in right) for index, cell in enumerate(line)
        ]
        text_lines.append(gap.join(cells).rstrip() + "\n")
    return "".join(text_lines)


def _fit(widths: list[int], headings: Sequence[str], width: int) -> str:
    """Shrink the widths towards `width` and give the gap: the last column first, then names."""
    gap = "  "
    left = width - sum(widths[:-1]) - len(gap) * (len(widths) - 1)
    if left < min(widths[-1], _LAST_COLUMN_CHARS_MIN):
        gap = " "
        left += len(widths) - 1
    missing = min(widths[-1], _LAST_COLUMN_CHARS_MIN) - left
    if missing > 0 and "NAME" in headings[:-1]:
        index = headings.index("NAME")
        taken = min(missing, max(0, widths[index] - _NAME_CHARS_MIN))
        widths[index] -= taken
        left += taken
    widths[-1] = min(widths[-1], max(left, _LAST_COLUMN_CHARS_MIN))
    return gap


def _cell(text: str, width: int, is_right: bool) -> str:
    taken = places(text)
    if taken > width:
        while taken > width - 3:
            taken, text = taken - places(text[-1]), text[:-1]
        text, taken = text + "...", taken + 3
    padding = " " * (width - taken)
    return padding + text if is_right else text + padding


def places(text: str) -> int:
    """Columns of a terminal that the text takes: CJK characters two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def cut(line: str, width: int | None) -> str:
    """A line that is no wider than the terminal."""
    return line if width is None or len(line) <= width else line[: width - 3] + "..."
