"""The command line `hetpeer`: global options, the commands, and how errors reach the user.

An error is one line on stderr and a stable exit status; -vv shows the traceback. Each command imports what it
needs when it runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from hetpeer.dht.base.errors import HetpeerError, LocalError
from hetpeer.peer.cli import options
from hetpeer.peer.cli.author import (
    amend_command,
    audit_command,
    export_command,
    init_command,
    inspect_command,
    invite_command,
)
from hetpeer.peer.cli.swarm import (
    bootstrap_command,
    dashboard_command,
    demo_command,
    plan_command,
    simulate_command,
    status_command,
    trace_command,
)
from hetpeer.peer.cli.volunteer import (
    bench_command,
    config_command,
    doctor_command,
    id_command,
    join_command,
    logs_command,
    pause_command,
    service_command,
    top_command,
)
from hetpeer.peer.process.console import tell

_log = logging.getLogger("hetpeer")

app = typer.Typer(
    name="hetpeer",
    help="Train one model together on home machines.",
    epilog="docs/errors.md explains each error code (HP-…), docs/cli.md each command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: drawing boxes around it takes a third of its time
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    join_command,
    pause_command,
    config_command,
    service_command,
    status_command,
    top_command,
    logs_command,
    doctor_command,
    bench_command,
    dashboard_command,
    plan_command,
    simulate_command,
    bootstrap_command,
    invite_command,
    init_command,
    amend_command,
    audit_command,
    export_command,
    inspect_command,
    demo_command,
    trace_command,
    id_command,
):
    command.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"hetpeer {version('hetpeer')}")
        raise typer.Exit


@app.callback()
def _global_options(
    *,
    verbose: Annotated[
        int,
        typer.Option("-v", "--verbose", count=True, show_default=False, help="Show more messages; -vv: all."),
    ] = 0,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show errors only.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    options.configure_logging(verbose, quiet)


def run() -> None:
    """Console entry point; always ends in SystemExit."""
    # Otherwise torch's threads spin while they wait and take the cores from the swarm's other processes: on
    # two busy
    # cores a step takes ten times as long. Read when torch is loaded, inherited by every child.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with _quiet_pipes():
            app(prog_name="hetpeer")
    except Exception as error:  # noqa: BLE001 - a user must never see a bare traceback
        known = next(_hetpeer_errors(error), None) or _unexpected(error)
        tell(known.line())
        _log.debug("the traceback", exc_info=error)
        sys.exit(known.exit_code)


def _hetpeer_errors(error: BaseException) -> Iterator[HetpeerError]:
    """`error` itself, or the errors inside the group that a TaskGroup made of it."""
    if isinstance(error, HetpeerError):
        yield error
    elif isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _hetpeer_errors(inner)


def _unexpected(error: Exception) -> LocalError:
    return LocalError(
        "HP-SYS-000",
        f"unexpected {type(error).__name__}: {error}".rstrip(": \n"),
        why="this is probably a bug in hetpeer",
        fix="run the command again with -vv and report its output",
    )


@contextlib.contextmanager
def _quiet_pipes() -> Iterator[None]:
    """Treat a closed pipe (`hetpeer … | head`) as a normal end; otherwise the interpreter complains
    at exit.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    run()
