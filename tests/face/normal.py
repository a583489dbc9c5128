"""Answers without what no two runs have in common: times, processes, accounts, places, wording.

What is left (keys, types and all other values) is the face that scripts build on. A value that is
taken out leaves its type behind, so that text where a number was is still seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Sentences for people: their wording may change.
WORDS = frozenset(
    {
        *("text", "reason", "reasons", "warnings", "cause_detail", "problem", "problems"),
    }
)

#: Measured, or the account's, the process's or the release's own.
MEASURED = frozenset(
    {
        *("user", "uid", "pid", "version", "connections", "sample_age_s", "pass_s"),
        *("database_bytes", "disk_free_bytes", "cpu_user_s", "cpu_system_s", "max_rss_bytes"),
        *("gpu_seconds", "energy_j", "usage_gpu_s", "factor", "priority", "fair", "age"),
        *("max_rss_mib", "usage_gpu_hours"),
    }
)

#: The same, and null where nothing was measured yet.
MEASURED_PERHAPS = frozenset(
    {
        *("gpu_utilization", "utilization", "expected_run_median_error", "expected_by"),
        *("expected_run_s", "head_at_s", "head_expected_start_s", "patience_ends_at_s"),
        *("starts_by_guess", "heads_started", "heads_later_than_expected"),
    }
)

#: What jobs that nobody waited for used of a GPU: a sample came in time or did not.
SAMPLED = frozenset(
    {
        *("vram_peak_bytes", "vram_peak_source", "vram_verdict", "vram_next_bytes"),
        *("gpu_utilization", "gpu_seconds", "energy_j", "gpu_uses", "vram_peak_mib"),
    }
)

COMPLETING = "job_completing"
LINE_CHARS = 100
IDS = frozenset({"job_id", "job_ids", "jobs"})
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{3})?Z?")
_KINDS = {dict: "map", list: "array", str: "text", bytes: "bytes", type(None): "null"}
_KINDS |= {bool: "boolean", int: "integer", float: "float"}


def kind(value: object) -> str:
    """The type of a value, in the wire's words."""
    return _KINDS[type(value)]


class Normal:
    """Normalises answers of one scenario: job ids become the names its jobs were given."""

    def __init__(self, place: Path, names: Mapping[int, str], measured_jobs: Iterable[str]) -> None:
        """`measured_jobs`: those whose use of GPUs was waited for, and so is kept."""
        self.names = names
        self._place = str(place)
        self._measured_jobs = frozenset(measured_jobs)

    def value(self, value: Any, key: str = "") -> Any:
        """The same in every run of the scenario; keys in order, jobs of a list by their name."""
        if isinstance(value, Mapping):
            dropped = self._dropped(value)
            kept = sorted(name for name in value if name not in dropped)
            return {name: self.value(value[name], name) for name in kept}
        if isinstance(value, list):
            if key == "events":
                value = without_chance(value)
            items = [self.value(item, key) for item in value]
            return [_in_a_line(item) for item in items] if key == "events" else _listed(items)
        return self._scalar(value, key)

    def _dropped(self, mapping: Mapping[str, Any]) -> frozenset[str]:
        name = self.names.get(mapping.get("job_id", 0))
        return frozenset() if name in self._measured_jobs else SAMPLED

    def _scalar(self, value: Any, key: str) -> Any:
        if key in MEASURED_PERHAPS:
            return "<measured>"
        if value is None:
            return None
        if key in IDS and type(value) is int:
            return f"job {self.names.get(value, 'of no name')}"
        if key in WORDS | MEASURED or _is_measured(key, value):
            return f"<{kind(value)}>"
        if isinstance(value, str):
            return "<time>" if _TIME.fullmatch(value) else self.text(value)
        return value

    def text(self, value: str) -> str:
        """Without the directory of this run."""
        return value.replace(self._place, "<place>")


def without_facts(job: dict[str, Any]) -> dict[str, Any]:
    """A job without what its events carry: their own face has that, and some of it is chance."""
    if not job.get("events"):
        return job
    return {**job, "events": [{**event, "data": {}} for event in job["events"]]}


def without_chance(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One job's events, but COMPLETING only where it lasted: the daemon may see an end at once."""
    pairs = zip(events, [*events[1:], None], strict=True)
    return [event for event, after in pairs if event["kind"] != COMPLETING or after is None]


def _listed(items: list[Any]) -> list[Any]:
    """Jobs by their name, since they end in any order."""
    if items and all(isinstance(item, dict) and "job_id" in item for item in items):
        return sorted(items, key=lambda item: str(item["job_id"]))
    return items


def _in_a_line(event: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={item}" for name, item in event.items())


def _is_measured(key: str, value: object) -> bool:
    """Times and spans are, as far as they are no whole number that somebody asked for."""
    return isinstance(value, float) and key.endswith("_s")


class Shapes:
    """The types seen at each path of many values, and which keys were not always there."""

    def __init__(self, named: Mapping[str, str] = MappingProxyType({})) -> None:
        """`named`: a key that tells a map which has a name of its own, and that name."""
        self._named = named
        self._kinds: dict[str, set[str]] = {}
        self._maps: dict[str, int] = {}
        self._keys: dict[str, int] = {}

    def add(self, path: str, value: Any) -> None:
        """Take note of a value and all that is in it."""
        name = next((self._named[key] for key in self._named if _has(value, key)), None)
        self._kinds.setdefault(path, set()).add(name or kind(value))
        path = name or path
        if isinstance(value, dict):
            self._maps[path] = self._maps.get(path, 0) + 1
            for name, item in value.items():
                here = f"{path}.{name}"
                self._keys[here] = self._keys.get(here, 0) + 1
                self.add(here, item)
        elif isinstance(value, list):
            for item in value:
                self.add(f"{path}[]", item)

    def seen(self) -> dict[str, str]:
        """Path to types, as "integer, null"; "absent" for a key that its map can be without."""
        return {
            path: ", ".join(sorted(kinds | self._absent(path)))
            for path, kinds in sorted(self._kinds.items())
        }

    def _absent(self, path: str) -> set[str]:
        parent = path.rpartition(".")[0]
        is_key = path in self._keys
        return {"absent"} if is_key and self._keys[path] < self._maps[parent] else set()


def _has(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


@dataclass(frozen=True)
class Pattern:
    """A map by which others of its kind are told; a map is of its kind that has the key."""

    name: str
    key: str
    content: Mapping[str, Any]


def briefly(value: Any, patterns: Sequence[Pattern]) -> Any:
    """The same, but maps of a pattern's kind tell only what differs from it."""
    if isinstance(value, list):
        return [briefly(item, patterns) for item in value]
    if not isinstance(value, Mapping):
        return value
    for pattern in patterns:
        if pattern.key in value and value != pattern.content:
            return {f"as {pattern.name}, but": _differences(value, pattern.content)}
        if pattern.key in value:
            return f"as {pattern.name}"
    return {key: briefly(item, patterns) for key, item in value.items()}


def _differences(value: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: (value.get(key, "<absent>"), usual.get(key, "<absent>")) for key in {*usual, *value}
    }
    return {key: own for key, (own, other) in sorted(both.items()) if own != other}


def dumped(value: Any, indent: int = 0) -> str:
    """JSON for reading and for comparing line by line: what fits into a line stands in one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= LINE_CHARS or not isinstance(value, dict | list) or not value:
        return line
    inner = indent + 1
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {dumped(item, inner)}" for name, item in value.items()]
    else:
        parts = [dumped(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(" " * inner + part for part in parts)
    return f"{begin}\n{body}\n{' ' * indent}{end}"
