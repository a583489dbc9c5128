"""Style as a test: import arrows, purity of the core, one owner for each edge, the docs."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "gpusched_client"
DAEMON = ROOT / "gpuschedd"
CORE = DAEMON / "core"
SUPERVISOR = DAEMON / "supervisor"

CORE_MAY_IMPORT = ("gpusched_client.terms", "gpusched_client.errors", "gpusched_client.units")
IMPURE = frozenset(
    {
        *("asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random"),
        *("secrets", "select", "shutil", "signal", "socket", "sqlite3", "subprocess", "sys"),
        *("tempfile", "threading", "time", "uuid", "pynvml", "msgpack", "click"),
    }
)
#: module -> the only files that may import it.
OWNERS = {
    "sqlite3": {
        *(f"gpuschedd/store/{name}.py" for name in ("database", "writer", "history")),
        *(f"gpuschedd/store/{name}.py" for name in ("queries", "rows", "columns", "census")),
        *(f"gpuschedd/store/{name}.py" for name in ("checks", "retention", "schema", "upgrade")),
    },
    "pynvml": {"gpuschedd/gpu/nvidia/library.py"},
    "subprocess": {
        *(f"gpuschedd/run/launchers/{name}.py" for name in ("direct", "forking", "systemd")),
        "gpuschedd/system/install.py",
        "gpuschedd/gpu/nvidia/child_process.py",
        "gpuschedd/selftest/host.py",
    },
}
#: The supervisor stands alone, without the package around it.
CLOCK_OWNERS = {
    "gpuschedd/system/clock.py",
    "gpuschedd/supervisor/life.py",
    "gpuschedd/supervisor/syscalls.py",
}
CLOCK_READINGS = frozenset(
    {
        *(("time", name) for name in ("time", "time_ns", "clock_gettime", "clock_gettime_ns")),
        *(("datetime", name) for name in ("now", "utcnow", "today")),
        ("date", "today"),
    }
)


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, by its dotted name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", _sources(CLIENT), ids=_shown)
def test_the_client_never_imports_the_daemon(path: Path) -> None:
    """It must start fast and be installable alone in spirit."""
    assert [name for name in _imports(path) if name.split(".")[0] == "gpuschedd"] == []


@pytest.mark.parametrize("path", _sources(CORE), ids=_shown)
def test_the_core_is_pure_and_looks_only_at_the_words(path: Path) -> None:
    """No clock, no I/O, nothing of the daemon around it."""
    for name in _imports(path):
        assert name.split(".")[0] not in IMPURE, f"{_shown(path)} imports {name}"
        if name.startswith("gpusched_client"):
            assert name.startswith(CORE_MAY_IMPORT) or name == "gpusched_client", name
        if name.startswith("gpuschedd"):
            assert name.startswith("gpuschedd.core"), f"{_shown(path)} imports {name}"


@pytest.mark.parametrize("module", sorted(OWNERS))
def test_each_edge_has_one_owner(module: str) -> None:
    """Who else needs it asks the owner."""
    users = {
        _shown(path)
        for path in _sources(DAEMON)
        if any(name.split(".")[0] == module for name in _imports(path))
    }
    assert users <= OWNERS[module]


def _clock_readings(path: Path) -> Iterator[str]:
    """Where a file asks for wall or boot time; the monotonic clock is for own deadlines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in CLOCK_READINGS:
                yield f"line {node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names = {(str(node.module), alias.name) for alias in node.names}
            yield from (f"line {node.lineno}: {name}" for _, name in names & CLOCK_READINGS)


def test_one_module_reads_the_clock() -> None:
    """Tests can give the daemon another time only where it has one place to ask."""
    found = [
        f"{_shown(path)}, {reading}"
        for path in _sources(DAEMON)
        if _shown(path) not in CLOCK_OWNERS
        for reading in _clock_readings(path)
    ]
    assert found == []


def _calls_of(path: Path, name: str) -> list[ast.Call]:
    """Where a file calls what has this name, however it got at it."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if _name_of(call.func) == name]


def _name_of(called: ast.expr) -> str | None:
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else None


def test_pools_of_threads_are_made_in_one_place() -> None:
    """There all threads exist from the start: one that grows fails where no thread can be made."""
    makers = {_shown(path) for path in _sources(DAEMON) if _calls_of(path, "ThreadPoolExecutor")}
    assert makers == {"gpuschedd/system/threads.py"}


def test_what_the_loop_does_in_threads_has_such_a_pool() -> None:
    """asyncio.to_thread, and look-ups of names, use the loop's own: by default one that grows."""
    given = [
        (_shown(path), [_name_of(each.func) for each in call.args if isinstance(each, ast.Call)])
        for path in _sources(DAEMON)
        for call in _calls_of(path, "set_default_executor")
    ]
    assert given == [("gpuschedd/daemon.py", ["started_pool"])]


@pytest.mark.parametrize("path", _sources(SUPERVISOR), ids=_shown)
def test_the_supervisor_needs_the_standard_library_and_its_own_folder_alone(path: Path) -> None:
    """It runs with -I -S: nothing else is there, or may be."""
    for name in _imports(path):
        package = name.split(".")[0]
        assert package in sys.stdlib_module_names or name.startswith("gpuschedd.supervisor."), name


@pytest.mark.parametrize("path", _sources(SUPERVISOR), ids=_shown)
def test_the_supervisor_imports_nothing_late(path: Path) -> None:
    """Its files may be replaced once it holds the claim. So no function imports."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if _is_function(node)]
    inside = [child for function in functions for child in ast.walk(function)]
    assert [node for node in inside if isinstance(node, ast.Import | ast.ImportFrom)] == []


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def test_the_package_around_the_supervisor_imports_nothing() -> None:
    """Each start of a supervisor runs it."""
    assert list(_imports(DAEMON / "__init__.py")) == []


def test_every_module_of_the_supervisor_ends_with_the_same_version() -> None:
    """By it a start tells files of several versions, and one that was cut. __main__ compares."""
    modules = [path for path in _sources(SUPERVISOR) if path.name != "__main__.py"]
    last = {path.read_text().splitlines()[-1] for path in modules}
    assert len(last) == 1
    (line,) = last
    assert re.fullmatch(r"RECORD_VERSION = \d+", line)
    assert f"\n{line}\n" in (SUPERVISOR / "__main__.py").read_text()


def test_one_module_takes_the_stat_of_a_process_apart() -> None:
    """The name in it may hold anything: its fields are counted from the last parenthesis."""
    readers = {_shown(path) for path in _sources(DAEMON) if 'rindex(b")")' in path.read_text()}
    assert readers == {"gpuschedd/supervisor/procfs.py"}


@pytest.mark.parametrize("path", _sources(DAEMON) + _sources(CLIENT), ids=_shown)
def test_a_module_opens_with_what_it_owns(path: Path) -> None:
    """One docstring a module, one for each public class and function."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{_shown(path)} has no docstring"


def _commands() -> dict[str, click.Command]:
    """Every command and subcommand by the words that are typed."""
    from gpusched_client.commands.gcancel import cli as gcancel
    from gpusched_client.commands.gctl import cli as gctl
    from gpusched_client.commands.gq import cli as gq
    from gpusched_client.commands.gsub import cli as gsub
    from gpusched_client.commands.simjob import cli as simjob
    from gpuschedd.cli import cli as daemon

    named: dict[str, click.Command] = {"gsub": gsub, "gq": gq, "gcancel": gcancel, "gctl": gctl}
    named |= {"gpuschedd": daemon, "gpusched-simjob": simjob}
    return dict(_with_subcommands(named.items()))


def _with_subcommands(
    named: Iterable[tuple[str, click.Command]],
) -> Iterator[tuple[str, click.Command]]:
    for name, command in named:
        yield name, command
        if isinstance(command, click.Group):
            inner = [(f"{name} {word}", each) for word, each in command.commands.items()]
            yield from _with_subcommands(inner)


@pytest.mark.parametrize("name", sorted(_commands()))
def test_every_command_and_option_is_in_a_readme(name: str) -> None:
    """What people can type, people can read about: users' commands in README, operators' beside."""
    readme = (ROOT / "README.md").read_text() + (ROOT / "systemd" / "README.md").read_text()
    assert name.split()[-1] in readme, name
    for parameter in _commands()[name].params:
        if isinstance(parameter, click.Option):
            longest = max(parameter.opts, key=len)
            assert re.search(rf"(?<![\w-]){re.escape(longest)}(?![\w-])", readme), (
                f"{name} {longest} is in no README"
            )


def test_no_path_of_a_machine_and_no_open_end() -> None:
    """Nothing in the tree depends on where it was written, and nothing waits to be done."""
    words = re.compile("/" + "work/|TO" + "DO|FIX" + "ME|XX" + "X|NotImplemented" + "Error")
    found = [
        f"{_shown(path)}: {match[0]}"
        for folder in (DAEMON, CLIENT, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples")
        for path in _sources(folder)
        for match in words.finditer(path.read_text())
    ]
    assert found == []
