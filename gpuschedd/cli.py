"""What people type: `gpuschedd` and its subcommands."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

from gpusched_client import __version__, paths
from gpusched_client.errors import GpuschedError
from gpusched_client.terms import Launch
from gpuschedd.config.toml import ConfigError, changed_keys
from gpuschedd.config.values import host
from gpuschedd.daemon import Options, read_config, run
from gpuschedd.exits import EX_CONFIG
from gpuschedd.system import install
from gpuschedd.system.accounts import unknown_names


class _Path(click.Path):
    """A path that is named: an empty one, of a variable that is not set, would be another place."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("it is empty; name a path, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


class _Group(click.Group):
    """Imports what brings machinery of its own when that is typed: the daemon keeps none of it."""

    apart: ClassVar = {
        "replay": ("gpuschedd.replay.command", "replay"),
        "selftest": ("gpuschedd.selftest.command", "selftest"),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.apart])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.apart:
            return super().get_command(ctx, cmd_name)
        module, name = self.apart[cmd_name]
        command: click.Command = getattr(import_module(module), name)
        return command


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="gpuschedd")
@click.option("--system", is_flag=True, help="Serve every local user; system paths.")
@click.option(
    "--launch",
    type=click.Choice([Launch.PID1.value, Launch.DIRECT.value]),
    help="How jobs are started: by PID 1 (with --system), or by the daemon itself.",
)
@click.option("--socket", "socket_path", type=_Path(), help="Where to listen.")
@click.option("--state-dir", type=_Path(), help="Database and job directories.")
@click.option("--config", "config_path", type=_Path(), help="TOML file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option("--simulate", metavar="HOST", help='Simulated GPUs: "4x24G", "2x80G+2x24G".')
@click.option("--gpus", metavar="LIST", help="Only these GPUs: indices or UUIDs, by commas.")
@click.option("--private", is_flag=True, help="Your own daemon, though this host has the system's.")
@click.option("--no-exec", is_flag=True, help="Jobs hold their GPUs for their limit, run nothing.")
@click.pass_context
def cli(
    context: click.Context,
    system: bool,
    launch: str | None,
    socket_path: Path | None,
    state_dir: Path | None,
    config_path: Path | None,
    overrides: tuple[str, ...],
    simulate: str | None,
    gpus: str | None,
    no_exec: bool,
    private: bool,
) -> None:
    """The GPU scheduler daemon: who runs next on this host's GPUs."""
    if context.invoked_subcommand is not None:
        return
    if config_path is not None:
        _check_is_there(config_path)
    if not (system or private or socket_path is not None):
        _check_is_alone()
    extra = list(overrides)
    if simulate is not None:
        _check_host(simulate)
        extra.append(f'simulate="{simulate}"')
    if gpus is not None:
        if not gpus.strip(", "):
            _refuse(f"--gpus: {gpus!r} names no GPU; leave it out for all")
        names = [name if name.isdecimal() else f'"{name}"' for name in gpus.split(",") if name]
        extra.append(f"gpus=[{','.join(names)}]")
    if no_exec:
        extra.append("exec_jobs=false")
    try:
        options = Options(
            is_system=system,
            launch=Launch(launch) if launch else Launch.PID1 if system else Launch.DIRECT,
            socket=socket_path or Path(paths.socket_path(system)),
            state_dir=(state_dir or Path(paths.state_dir(system))).absolute(),
            config=config_path or Path(paths.config_path(system)),
            overrides=tuple(extra),
        )
    except paths.NoHome as error:
        _refuse(f"{error}: --socket, --state-dir and --config")
    if private and options.socket == Path(paths.socket_path(system)):
        click.echo(
            f"gpuschedd: clients take the system's daemon where there is one; for this one "
            f"export {paths.SOCKET_ENV}={options.socket}",
            err=True,
        )
    sys.exit(run(options))


def _check_host(text: str) -> None:
    if not text.strip():
        _refuse(f"--simulate: {text!r} is no host; write 4x24G, or leave it out for the real GPUs")
    try:
        host(text)
    except ValueError as error:
        _refuse(f"--simulate: {error}")


def _check_is_alone() -> None:
    """Two daemons would plan the same GPUs, and nobody could say which one a client asks."""
    if os.path.lexists(paths.SYSTEM_SOCKET):
        _refuse(
            f"this host has a system daemon ({paths.SYSTEM_SOCKET}), which gsub and gq ask; "
            "--private starts your own beside it"
        )


def _refuse(text: str) -> NoReturn:
    click.echo(f"gpuschedd: {text}", err=True)
    sys.exit(EX_CONFIG)


@cli.command("check-config")
@click.option("--system", is_flag=True, help="As `gpuschedd --system` would read it.")
@click.argument("file", required=False, type=_Path())
@click.pass_context
def check_config(context: click.Context, system: bool, file: Path | None) -> None:
    """Read FILE (the configuration in use) and say what is wrong with it.

    Without FILE and --system: your own, and the system's too where you have none.
    """
    daemon = context.find_root().params  # `gpuschedd --system check-config` says it as well
    system = system or daemon["system"]
    for named in (file, daemon["config_path"]):
        if named is not None:
            _check_is_there(named)
    systems = Path(paths.SYSTEM_CONFIG)
    try:
        own = Path(paths.config_path(system))
    except paths.NoHome:
        own = systems
    path = file or daemon["config_path"] or own
    found = [path]
    if path == own and not path.exists() and systems.exists():
        found.append(systems)
    good = [_check_config(each, system, daemon["overrides"]) for each in found]
    sys.exit(0 if all(good) else EX_CONFIG)


def _check_is_there(path: Path) -> None:
    """One that is named is meant: without it all would be at its default, limits and users too."""
    if not path.exists():
        _refuse(f"{path}: no such file; leave it out for the one in use")


def _check_config(path: Path, system: bool, overrides: tuple[str, ...]) -> bool:
    """Say what is set, or what is wrong and how to mend it; whether it is good."""
    is_system = system or path == Path(paths.SYSTEM_CONFIG)
    options = Options(is_system, Launch.DIRECT, Path(), Path(), path, overrides)
    try:
        found = read_config(options)
    except (ConfigError, GpuschedError) as error:
        click.echo(f"gpuschedd: {error}", err=True)
        return False
    changed = changed_keys(
        read_config(replace(options, config=Path(os.devnull), overrides=())), found
    )
    state = "is good" if path.exists() else "is missing, which is good: all is at its default"
    click.echo(f"{path} {state}; it sets {', '.join(changed) or 'nothing'}")
    if is_system:
        for text in unknown_names(found.names, found.admin_group):
            click.echo(f"note: {text}")
    return True


cli.add_command(install.cli, "install")


if __name__ == "__main__":
    cli()
