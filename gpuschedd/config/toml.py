"""The configuration file: typed TOML, every key known, every refusal with its line and cure.

Reads one file and `--set` overrides; decides nothing.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gpuschedd.config import values
from gpuschedd.config.keys import Config, Limits, UserLimits

CONFIG_BYTES_MAX = 256 * 1024


class ConfigError(Exception):
    """A file or a value that cannot be used; the text names line, value and cure."""


_UNIT_ENDINGS = ("_per_h", "_bytes", "_s")


def toml_name(field_name: str) -> str:
    """The key in the file: the field's name without its unit."""
    for ending in _UNIT_ENDINGS:
        if field_name.endswith(ending):
            return field_name.removesuffix(ending)
    return field_name


def load(
    path: Path,
    overrides: Iterable[str] = (),
    base: Config | None = None,
    *,
    others_may: int = 0o777,
) -> Config:
    """The configuration in path (a missing file is an empty one) with KEY=VALUE overrides on top.

    `others_may`: the mode bits that its group and all others may have; with any limit on them the
    owner must be root or this user. Raises ConfigError.
    """
    text = _read(path, others_may)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    config: Config = _merge(base or Config(), table, _Where(str(path), text))
    for override in overrides:
        config = _override(config, override)
    return config


def _read(path: Path, others_may: int) -> str:
    try:
        # A FIFO in its place would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_file(path, os.fstat(file.fileno()), others_may)
            return file.read(CONFIG_BYTES_MAX + 1).decode("utf-8-sig")
    except FileNotFoundError:
        if others_may != 0o777:
            _check_place(path, others_may)  # who may write there has taken it away
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}); save it as UTF-8") from error


def _check_file(path: Path, found: os.stat_result, others_may: int) -> None:
    """Refuse what is too large, and what others could have written: it decides for root."""
    if stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path}: is not a file; put a file in its place")
    if found.st_size > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path}: {found.st_size} bytes; the limit is {CONFIG_BYTES_MAX}")
    if others_may == 0o777:
        return
    _check_place(path, others_may)
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: belongs to uid {found.st_uid}, who could change it; chown it to "
            f"{'root' if os.geteuid() == 0 else 'yourself'}"
        )
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077 & ~others_may:
        raise ConfigError(
            f"{path}: others may write it (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w {path}"
        )


def _check_place(path: Path, others_may: int) -> None:
    """Refuse a directory on the way in which others could put another file in its place."""
    # Of a link both the place where it lies and the one that it leads to.
    for directory in (*path.absolute().parents, *path.resolve().parents):
        try:
            found = directory.stat()
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.geteuid()) and not others_may & 0o020:
            raise ConfigError(
                f"{path}: {directory} belongs to uid {found.st_uid}, who could replace it; chown "
                f"it to {'root' if os.geteuid() == 0 else 'yourself'}"
            )
        if mode & 0o022 & ~others_may and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"{path}: others may write {directory} (mode {mode:o}), and so replace it; "
                f"chmod go-w {directory}"
            )


_Path = tuple[str, ...]  # the tables around a key, and the key
_LINE = re.compile(r"""\s*(?P<open>\[*)\s*(?P<key>("[^"]*"|'[^']*'|[\w.\s-])+?)\s*[=\]]""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


@dataclass(frozen=True, slots=True)
class _Where:
    """Finds the line of a key, for messages."""

    source: str
    text: str

    def line_of(self, path: _Path) -> str:
        table: _Path = ()
        for number, line in enumerate(self.text.splitlines(), start=1):
            found = _LINE.match(line)
            if found is None:
                continue
            here = tuple(one or two or bare for one, two, bare in _PART.findall(found["key"]))
            if found["open"]:
                table, here = here, ()
            if (*table, *here)[: len(path)] == path:
                return f"{self.source}:{number}"
        return self.source


def _dotted(path: _Path) -> str:
    return ".".join(path)


def _merge(section: Any, table: Mapping[str, Any], where: _Where, above: _Path = ()) -> Any:
    """section with the table's values; unknown keys and bad values raise ConfigError."""
    known = _known(section)
    changes: dict[str, Any] = {}
    for key, value in table.items():
        item = known.get(key)
        if item is None and isinstance(section, Limits) and isinstance(value, dict):
            own = _merge(UserLimits(), value, where, (*above, key))
            changes["users"] = (*changes.get("users", section.users), (str(key), own))
            continue
        if item is None:
            path = (*above, key)
            raise ConfigError(
                f"{where.line_of(path)}: unknown key {_dotted(path)}; {_meant(key, known)}"
            )
        changes[item.name] = _value(getattr(section, item.name), item, value, where, (*above, key))
    return replace(section, **changes)


def _meant(key: str, known: Iterable[str]) -> str:
    """The cure of an unknown key: the section it belongs to, or what is known here."""
    default = Config()
    for name in (item.name for item in fields(default)):
        section = getattr(default, name)
        if is_dataclass(section) and key in _known(section):
            return f"it is written {name}.{key}"
    return f"known here: {', '.join(sorted(known))}"


def _known(section: Any) -> dict[str, Any]:
    """The fields of a section by their TOML names."""
    hidden = {"users"} if isinstance(section, Limits) else set()
    return {toml_name(item.name): item for item in fields(section) if item.name not in hidden}


def _value(current: Any, item: Any, value: Any, where: _Where, path: _Path) -> Any:
    """One value, parsed by its field; nested tables recurse."""
    try:
        if is_dataclass(current):
            if not isinstance(value, dict):
                raise ValueError("must be a table")
            return _merge(current, value, where, path)
        if item.name in ("shares", "billing"):
            return _weights(value, where, path)
        return item.metadata["parse"](value)
    except ValueError as error:
        raise _bad_value(where, path, value, error) from error


def _bad_value(where: _Where, path: _Path, value: Any, error: ValueError) -> ConfigError:
    return ConfigError(f"{where.line_of(path)}: {_dotted(path)} = {value!r}: {error}")


def _weights(value: Any, where: _Where, path: _Path) -> tuple[tuple[str, float], ...]:
    """An ordered table of name = number >= 0; the first match wins."""
    if not isinstance(value, dict):
        raise ValueError("must be a table of name = number")
    number = values.number(0, 1e9)
    weights: list[tuple[str, float]] = []
    for name, weight in value.items():
        try:
            weights.append((name, number(weight)))
        except ValueError as error:
            raise _bad_value(where, (*path, name), weight, error) from error
    return tuple(weights)


def _override(config: Config, text: str) -> Config:
    """One --set KEY=VALUE; VALUE is TOML, or a bare text."""
    key, separator, raw = text.partition("=")
    if not separator:
        raise ConfigError(f"--set {text}: must be KEY=VALUE, such as scheduling.backfill=off")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    table: Any = value
    for part in reversed(key.strip().split(".")):
        table = {part: table}
    merged: Config = _merge(config, table, _Where(f"--set {key}", ""))
    return merged


def with_limits(config: Config, default_s: float, most_s: float) -> Config:
    """The configuration with other time limits for jobs: what system mode begins from."""
    scheduling = replace(config.scheduling, default_time_limit_s=default_s, max_time_limit_s=most_s)
    return replace(config, scheduling=scheduling)


def changed_keys(before: Any, after: Any, prefix: str = "") -> tuple[str, ...]:
    """The TOML names of the keys whose values differ."""
    changed: list[str] = []
    for item in fields(before):
        old, new = getattr(before, item.name), getattr(after, item.name)
        name = prefix + toml_name(item.name)
        if is_dataclass(old):
            changed += changed_keys(old, new, f"{name}.")
        elif old != new:
            changed.append(name)
    return tuple(changed)
