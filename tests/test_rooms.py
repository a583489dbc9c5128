"""The shape of the code as a test: arrows between the folders, sizes, one name a thing, who writes.

The folders are the rooms; each looks down the list and never up. A newcomer who knows the list
knows where a matter can be and what it can touch.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WORDS = frozenset({"terms", "errors", "units"})
#: Room of the daemon -> the rooms that it may look into, and what of the client.
DAEMON_ARROWS: dict[str, tuple[str, frozenset[str]]] = {
    "main": ("cli", frozenset()),
    "cli": (
        "daemon exits logs api run gpu jobs store config core replay selftest system supervisor",
        WORDS | {"paths", ""},
    ),
    "daemon": (
        "exits logs api run gpu jobs store config core system supervisor",
        WORDS | {"paths", ""},
    ),
    "exits": ("run store config system", WORDS),
    "logs": ("jobs", WORDS),
    "api": ("run gpu jobs store config core system supervisor", WORDS | {"wire", ""}),
    "run": ("gpu jobs store config core system supervisor", WORDS),
    # Simulated GPUs are what client programs claim: the format of a claim is the client's.
    "gpu": ("jobs store config core system supervisor", WORDS | {"simulation"}),
    "jobs": ("store config core system supervisor", WORDS | {"wire"}),
    "store": ("core system supervisor", WORDS),
    "config": ("core system supervisor", WORDS),
    "replay": ("core", WORDS),
    # A client of the daemon's like any other: it looks at what users are told, not at State.
    "selftest": (
        "supervisor",
        WORDS | {"client", "wire", "output", "paths", "simulation", ""},
    ),
    "core": ("", WORDS),
    "system": ("supervisor", WORDS | {"paths"}),
    "supervisor": ("", frozenset()),
}
#: Room of the client -> the rooms that it may look into.
CLIENT_ARROWS = {
    "commands": "client administration submission output wire simulation paths terms errors units",
    "client": "administration submission wire paths terms errors units",
    "administration": "wire terms errors units",
    "output": "wire terms errors units",
    "submission": "wire terms errors units",
    "wire": "terms errors units paths",
    "simulation": "",
    "paths": "",
    "units": "errors",
    "errors": "",
    "terms": "errors",
}

MODULE_LINES_MAX = 400  # of code: no blank, no comment, no docstring
PUBLIC_METHODS_MAX = 20
METHODS_MAX = 35
#: Larger ones, each with its reason; five in all.
EXCEPTIONS = {
    "gpuschedd/core/plan.py": "one pass is one thought: its steps share what they found out",
    "gpuschedd/core/plan.py:_Pass": "the same",
}

STATE_FOLDER = "gpuschedd/jobs/"
#: Rooms that serve any make of GPUs.
VENDOR_FREE = ("core", "jobs", "run", "store", "api")
VENDOR_WORDS = re.compile(r"nvml|nvidia|(?<![a-z])xid|(?<![a-z])mig(?![a-z])|cuda", re.I)
#: Enums whose members are words of the wire, and configuration keys: their names are public.
PUBLIC_OWNERS = frozenset({"Cause", "EventKind", "config"})


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def _imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever in it, by dotted names."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if _is_module(name) else node.module for name in names)


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def _part(name: str, package: str) -> str | None:
    """The room of `package` that a dotted name lies in, "" for itself; None: another package."""
    first, *rest = name.split(".")
    return None if first != package else (rest[0] if rest else "")


@pytest.mark.parametrize("room", sorted(DAEMON_ARROWS))
def test_a_room_of_the_daemon_looks_down_and_never_up(room: str) -> None:
    below, client = DAEMON_ARROWS[room]
    allowed = {room, *below.split()}
    wrong = [
        f"{_shown(path)} imports {name}"
        for path in _files("gpuschedd")
        if _room(path) == room
        for name in _imported(path)
        if (_part(name, "gpuschedd") or room) not in allowed
        or (_part(name, "gpusched_client") not in {None, *client})
    ]
    assert wrong == []


@pytest.mark.parametrize("room", sorted(CLIENT_ARROWS))
def test_a_room_of_the_client_looks_down_and_never_up(room: str) -> None:
    allowed = {room, "", *CLIENT_ARROWS[room].split()}
    wrong = [
        f"{_shown(path)} imports {name}"
        for path in _files("gpusched_client")
        if _room(path) == room
        for name in _imported(path)
        if _part(name, "gpusched_client") not in {None, *allowed}
    ]
    assert wrong == []


def test_each_file_lies_in_a_room_that_is_listed() -> None:
    rooms = {_room(path) for path in _files("gpuschedd")} - {"__init__"}
    assert rooms == set(DAEMON_ARROWS)
    assert {_room(path) for path in _files("gpusched_client")} - {"__init__"} == set(CLIENT_ARROWS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Lazy imports and those for types count as well: a circle is one matter in two files."""
    arrows: dict[str, set[str]] = {}
    for package in ("gpuschedd", "gpusched_client"):
        for path in _files(package):
            module = _shown(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found = set(_imported(path)) - {module}
            # A package's face re-exports what lies in it, and is imported with it.
            arrows[module] = {name for name in found if not module.startswith(f"{name}.")}
    assert _circle(arrows) is None


def _circle(arrows: dict[str, set[str]]) -> list[str] | None:
    """One circle, None where there is none."""
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str] | None:
        if module in way:
            return way[way.index(module) :]
        if module in done or module not in arrows:
            return None
        found = None
        for name in sorted(arrows[module]):
            found = found or walk(name, [*way, module])
        done.add(module)
        return found

    return next((found for module in sorted(arrows) if (found := walk(module, []))), None)


def _code_lines(path: Path) -> int:
    """Lines that hold code: no blank one, no comment, no docstring."""
    prose: set[int] = set()
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            first = node.body[0]
            prose |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in silent | {tokenize.ENDMARKER}:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def _oversized() -> Iterator[str]:
    for path in (*_files("gpuschedd"), *_files("gpusched_client")):
        if _code_lines(path) > MODULE_LINES_MAX:
            yield _shown(path)
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and _is_wide(node):
                yield f"{_shown(path)}:{node.name}"


def _is_wide(node: ast.ClassDef) -> bool:
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    methods += [part.name for part in node.body if isinstance(part, ast.AsyncFunctionDef)]
    public = [name for name in methods if not name.startswith("_")]
    return len(methods) > METHODS_MAX or len(public) > PUBLIC_METHODS_MAX


def test_modules_and_classes_stay_small_but_for_those_named() -> None:
    assert set(_oversized()) == set(EXCEPTIONS)
    assert len(EXCEPTIONS) <= 5


def _public_names(path: Path) -> Iterator[str]:
    """Classes and constants of a module that others may use."""
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = [part for target in targets for part in ast.walk(target)]
            found = [part.id for part in inner if isinstance(part, ast.Name)]
            names = [name for name in found if name.isupper() and len(name) > 1]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


@pytest.mark.parametrize("package", ["gpuschedd", "gpusched_client"])
def test_no_public_class_or_constant_is_defined_twice(package: str) -> None:
    """The supervisor stands apart: it imports nothing, so some facts are in it once more."""
    homes = defaultdict(list)
    for path in _files(package):
        if "supervisor" not in path.parts:
            for name in _public_names(path):
                homes[name].append(_shown(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def _writes_state(node: ast.AST) -> bool:
    """An assignment to an attribute of something that is called state, or to an item of one."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changers = {"update", "add", "append", "pop", "clear", "discard", "remove", "setdefault"}
        targets = [node.func.value] if node.func.attr in changers else []
    return any(_is_part_of_state(target) for target in targets)


def _is_part_of_state(target: ast.expr) -> bool:
    while isinstance(target, ast.Attribute | ast.Subscript):
        owner = target.value
        if isinstance(owner, ast.Attribute) and owner.attr == "state":
            return True
        if isinstance(owner, ast.Name) and owner.id == "state":
            return True
        target = owner
    return False


def test_nobody_outside_jobs_writes_state() -> None:
    """State is as of the last commit; who wants it changed sends a command. replay has its own."""
    wrong = [
        f"{_shown(path)}, line {getattr(node, 'lineno', 0)}"
        for path in _files("gpuschedd")
        if not _shown(path).startswith((STATE_FOLDER, "gpuschedd/replay/"))
        for node in ast.walk(_tree(path))
        if _writes_state(node)
    ]
    assert wrong == []


def _identifiers(node: ast.AST) -> Iterator[str]:
    """The names that a node brings, but for those that are the wire's or the configuration's."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.name for alias in node.names)
        yield getattr(node, "module", None) or ""
    elif isinstance(node, ast.Attribute):
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if name not in PUBLIC_OWNERS:
            yield node.attr


@pytest.mark.parametrize("room", VENDOR_FREE)
def test_no_make_of_gpus_is_named_outside_its_folder(room: str) -> None:
    """A second vendor is one folder and one line."""
    found = [
        f"{_shown(path)}: {name}"
        for path in _files("gpuschedd")
        if _room(path) == room
        for node in ast.walk(_tree(path))
        for name in _identifiers(node)
        if VENDOR_WORDS.search(name)
    ]
    assert found == []
