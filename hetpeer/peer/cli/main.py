"""The command line `hetpeer`: global options, the commands, and how errors reach the user.

An error is one line on stderr and a stable exit status; -vv shows the traceback. A command's module is
imported when that command is called, and imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.dht.base.untrusted import plain_reason
from hetpeer.peer.cli import options
from hetpeer.peer.process.console import tell

_log = logging.getLogger("hetpeer")

UsageError: Any = typer.BadParameter.__mro__[1]
"""click's class, or that of typer's own copy of click."""

COMMANDS = {
    "join": ("volunteer.join_command:join", "Contribute this machine to a run."),
    "pause": ("volunteer.pause_command:pause", "Free this machine's processor and memory at once."),
    "resume": ("volunteer.pause_command:resume", "Continue after `hetpeer pause`."),
    "finish": ("volunteer.pause_command:finish", "Leave the run when the current step is done."),
    "stop": ("volunteer.pause_command:stop", "Leave the run now, like Ctrl-C."),
    "status": (
        "swarm.status_command:status",
        "Show a run's swarm: progress, peers, blocks, links, credit.",
    ),
    "logs": ("volunteer.logs_command:logs", "Show the log of this machine's volunteer, running or not."),
    "doctor": ("volunteer.doctor_command:doctor", "Check whether a volunteer would work on this machine."),
    "bench": ("volunteer.doctor_command:bench", "Measure the speed of this machine."),
    "dashboard": (
        "swarm.dashboard_command:dashboard",
        "Print the link to the dashboard of this machine's volunteer.",
    ),
    "plan": ("swarm.plan_command:plan", "Predict the step time of a running swarm."),
    "simulate": ("swarm.simulate_command:simulate", "Simulate a run in virtual time."),
    "bootstrap": ("swarm.bootstrap_command:bootstrap", "Serve a run to its volunteers."),
    "invite": ("author.invite_command:invite", "Print the invite to a run."),
    "init": ("author.init_command:init", "Make a run from a torch model and its data."),
    "amend": ("author.amend_command:amend", "Change who may take part in a run, and its reliable peers."),
    "audit": ("author.audit_command:audit", "Check that every microbatch was counted exactly once."),
    "watch": ("author.watch_command:watch", "Follow a run's training curve."),
    "export": ("author.export_command:export", "Write the weights of the newest checkpoint."),
    "generate": ("author.generate_command:generate", "Continue a text with the trained model."),
    "chat": ("author.generate_command:chat", "Talk with the trained model."),
    "inspect": ("author.inspect_command:inspect", "Show a run's settings and the cost of its model."),
    "demo": ("swarm.demo_command:demo", "Train a small model with a swarm on this machine."),
    "trace": ("swarm.trace_command:trace", "Merge the traces of a swarm into one file."),
    "config": (
        "volunteer.config_command:commands",
        "Show and change what hetpeer may use of this machine, and when.",
    ),
    "service": (
        "volunteer.service_command:commands",
        "Have systemd start hetpeer at login (user service).",
    ),
    "id": ("volunteer.id_command:commands", "Print this peer's id."),
}
"""Command → where its function or its group of commands is, below this package, and its line of the help."""


class CommandTable(TyperGroup):
    """The commands of COMMANDS, in that order. Only the one that is called is imported."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and _imported(name or ""), rest


def _imported(name: str) -> Any:
    module, _, part = COMMANDS[name][0].partition(":")
    return options.command_of(getattr(importlib.import_module(f"hetpeer.peer.cli.{module}"), part))


app = typer.Typer(
    name="hetpeer",
    cls=CommandTable,
    help="Train one model together on home machines.",
    epilog="docs/errors.md explains each error code (HP-…), docs/cli.md each command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: drawing boxes around it takes a third of its time
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    # Otherwise torch's threads spin while they wait and take the cores from the other processes: on two
    # busy cores a step takes ten times as long. Read when torch is loaded, inherited by every child.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with _quiet_pipes():
            sys.exit(app(prog_name="hetpeer", standalone_mode=False))
    except Exception as error:  # noqa: BLE001 - a user must never see a bare traceback
        known = next(_hetpeer_errors(error), None) or _wrong_usage(error) or _unexpected(error)
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


def _wrong_usage(error: Exception) -> LocalError | None:
    """HP-CLI-001 for a usage error; None for another error."""
    if not isinstance(error, UsageError):
        return None
    why, name = error.format_message(), error.ctx.command_path if error.ctx is not None else "hetpeer"
    if why.startswith("Usage: "):  # the whole help, for a group of commands without a command
        print(why, file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    return LocalError(
        "HP-CLI-001",
        f"{name} cannot be run like this",
        why=plain_reason(why).removeprefix("Invalid value: ").replace("Value error, ", "").rstrip("."),
        fix=f"{name} -h shows its arguments and options",
        exit_code=ExitCode.USAGE,
    )


def _unexpected(error: Exception) -> LocalError:
    return LocalError(
        "HP-SYS-000",
        f"unexpected {type(error).__name__}: {error}".rstrip(": \n"),
        why="this is probably a bug in hetpeer",
        fix="run the command again with -vv and report its output",
    )


@contextlib.contextmanager
def _quiet_pipes() -> Iterator[None]:
    """Treat a closed pipe (`hetpeer … | head`) as a normal end: the interpreter would complain at exit."""
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
