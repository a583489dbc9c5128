"""What a benchmark found: `name: value` lines, and its section of benchmarks/README.md.

A figure that has an aim says what is missing. With --write the section between the script's
markers is replaced by a table of all figures, with host, load and date: none is typed by hand.
"""

from __future__ import annotations

import argparse
import os
import platform
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
README = Path(__file__).with_name("README.md")


@dataclass(frozen=True)
class Figure:
    """One thing measured `len(values)` times, in `unit`; its median is what counts."""

    name: str
    unit: str
    values: tuple[float, ...]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """Of all values."""
        return median(self.values)

    @property
    def aim(self) -> str:
        """What it should be, and by how much it is not; empty without an aim."""
        if self.at_most is not None:
            missed = self.median - self.at_most
            text = f"at most {number(self.at_most)}"
        elif self.at_least is not None:
            missed = self.at_least - self.median
            text = f"at least {number(self.at_least)}"
        else:
            return ""
        return f"{text}: {'reached' if missed <= 0 else f'{number(missed)} missing'}"

    @property
    def line(self) -> str:
        """For a terminal."""
        count = len(self.values)
        spread = f" ({number(min(self.values))} to {number(max(self.values))}, n {count})"
        aim = f"; {self.aim}" if self.aim else ""
        return f"{self.name}: {number(self.median)} {self.unit}{spread if count > 1 else ''}{aim}"

    @property
    def row(self) -> str:
        """For the table."""
        least, middle, most = (number(pick(self.values)) for pick in (min, median, max))
        cells = (self.name, self.unit, least, middle, most, str(len(self.values)), self.aim)
        return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """Three digits that count, whole ones in full."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


@dataclass
class Report:
    """The figures of one script, printed as they come."""

    script: str  # its file's name: `start` for start.py
    words: str  # what it measures, for the section
    option: str = ""  # of the script, where it answers two questions
    began_load: float = field(default_factory=lambda: os.getloadavg()[0])
    _figures: list[Figure] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)
    _blocks: list[str] = field(default_factory=list)

    def figure(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> Figure:
        """Take and print one."""
        found = Figure(name, unit, tuple(values), at_most, at_least)
        self._figures.append(found)
        print(found.line, flush=True)
        return found

    def note(self, text: str) -> None:
        """Say what is no figure: a peer that is not installed, what was left out and why."""
        self._notes.append(text)
        print(text, flush=True)

    def block(self, lines: Sequence[str]) -> None:
        """Take and print a table of its own form."""
        self._blocks.append("\n".join(["```", *lines, "```"]))
        print(*lines, sep="\n", flush=True)

    def finish(self, *, write: bool) -> None:
        """The last line, and the section where it is asked for."""
        print(f"host: {host()}, load {self._load}", flush=True)
        if write:
            README.write_text(with_section(README.read_text(), self.key, self.section()))

    @property
    def key(self) -> str:
        """What its markers say."""
        return f"{self.script} {self.option}".strip()

    @property
    def _load(self) -> str:
        return f"{self.began_load:.1f} before and {os.getloadavg()[0]:.1f} after"

    def section(self) -> str:
        """Markdown, without the markers."""
        title = f"## `{f'python benchmarks/{self.script}.py {self.option}'.strip()}`"
        day = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        parts = [title, *([self.words] if self.words else [])]
        parts.append(f"{day}; {host()}; load {self._load}.")
        if self._figures:
            head = "| what | unit | min | median | max | n | aim |\n|---|---|---|---|---|---|---|"
            parts.append("\n".join([head, *(figure.row for figure in self._figures)]))
        parts += self._blocks
        if self._notes:
            parts.append("\n".join(f"- {text}" for text in self._notes))
        return "\n\n".join(parts)


def host() -> str:
    """What the figures were measured on."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {memory_gib:.0f} GiB, Linux {platform.release()}"
    return f"{cores} cores of {machine}, {versions}"


def with_section(document: str, key: str, section: str) -> str:
    """The document with the section of that key replaced, or added at the end."""
    begin, end = (f"<!-- {word} {key} -->" for word in ("begin", "end"))
    block = f"{begin}\n{section}\n{end}"
    if begin not in document:
        return f"{document.rstrip()}\n\n{block}\n"
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{README}: {begin} has no {end}"
    return f"{before}{block}{after}"


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all scripts have in common."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite the section of README.md")
    return parser


def main() -> None:
    """`report.py SCRIPT [OPTION..]`: the section of a script that only prints."""
    script, *words = sys.argv[1:]
    report = Report(script, "", option=" ".join(words))
    command = [sys.executable, str(README.with_name(f"{script}.py")), *words]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    report.block(printed.rstrip().splitlines())
    report.finish(write=True)


if __name__ == "__main__":
    main()
