"""Parts shared by all commands: verbosity, logging to stderr, plain or rich output, running a coroutine.

Nothing heavy is imported here: `hetpeer --help` must answer at once.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO, TypeVar

import typer

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError
from hetpeer.peer.process.console import JsonFormatter, PlainFormatter, show_from

if TYPE_CHECKING:
    from hetpeer.peer.arrival.destinations import Destination
    from hetpeer.peer.control.control_messages import DaemonStatus

T = TypeVar("T")

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Folder with the state of this peer (default: $HETPEER_HOME, else ~/.local/state/hetpeer).",
    ),
]
BootstrapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        metavar="ADDR",
        help="Address of any peer, like /ip4/…/tcp/…/p2p/Qm…, or an invite; repeatable.",
    ),
]
InvitesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INVITE",
        show_default=False,
        help="Link to the run, hetpeer://…, as hetpeer invite prints it.",
    ),
]
DashboardOption = Annotated[
    str,
    typer.Option(
        "--dashboard",
        metavar="[HOST:]PORT",
        envvar="HETPEER_DASHBOARD",
        help="Where to serve the dashboard and the metrics; off: nowhere. [default: 127.0.0.1:8787, else any "
        "free port]",
        show_default=False,
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="The run directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_WORDS: Final = {
    "int": "N",
    "int range": "N",
    "float": "X",
    "float range": "X",
    "float,float": "X X",
    "str": "TEXT",
    "path": "PATH",
}
"""Typer's name of a type → what stands for the value of such an option in the help."""
_ONLY_CHECK: Final = "hetpeer: do not begin"
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def configure_logging(verbose: int, quiet: bool) -> None:
    """Log to stderr: warnings, with -v information, with -vv everything, with -q errors only.

    `LOG_FORMAT=json` makes each line one JSON object.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("LOG_FORMAT", "").lower() == "json"
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter(colours=not plain(sys.stderr)))
    level = logging.ERROR if quiet else _LEVELS[min(verbose, len(_LEVELS) - 1)]
    handler.setLevel(level)  # a daemon's log has more
    show_from(level)
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler], force=True)
    logging.getLogger("hetpeer").setLevel(level)
    logging.captureWarnings(capture=True)  # Python's own, mostly of torch about torch
    logging.getLogger("py.warnings").setLevel(logging.WARNING if level == logging.DEBUG else logging.ERROR)


_REGISTERED: Final[Mapping[str, str]] = {
    "{update rules}": "averaging.optim.update_rules:UPDATE_RULES",
    "{codecs}": "stages.links.codec:codec_names",
    "{reduce codecs}": "stages.links.codec:reduce_codec_names",
    "{sparse codecs}": "stages.links.codec:sparse_codec_names",
    "{admission policies}": "bootstrap.run.admission_policies:ADMISSION_POLICIES",
    "{placement policies}": "bootstrap.state.placement_policies:PLACEMENT_POLICIES",
}
"""Mark in a help text → source of its names, loaded at the call only, because registries load pydantic."""


def command_of(part: Callable[..., Any] | typer.Typer) -> Any:
    """The command of a function, or the group of commands of a `Typer`."""
    if isinstance(part, typer.Typer):
        group = typer.main.get_group(part)
        for one in group.commands.values():
            _complete_help(one)
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command()(part)
    command = typer.main.get_command(alone)
    _complete_help(command)
    return command


def _complete_help(command: Any) -> None:
    """Fill registered names into help texts; a word stands for a value, not the name of its Python type."""
    for param in command.params:
        if "{" in (text := getattr(param, "help", None) or ""):
            param.help = _filled(text)
        if param.param_type_name == "argument":
            param.display_type_rich = lambda **_: None  # its own name says it
        elif param.metavar is None and not param.is_flag and not param.count:
            kind = param.display_type(typer.Context(command)).strip("<>")
            param.metavar = _WORDS.get(kind, kind)  # choices are shown as they are


def _filled(text: str) -> str:
    """A help text with its marks, like {admission policies}, replaced by the registered names."""
    for mark, where in _REGISTERED.items():
        if mark in text:
            module, _, name = where.partition(":")
            known = getattr(importlib.import_module(f"hetpeer.{module}"), name)
            names = (
                "; ".join(f"{one}: {kind.describe}" for one, kind in known.items())
                if isinstance(known, dict)
                else ", ".join(known())
            )
            text = text.replace(mark, names)
    return text


def check(function: Callable[..., Any], arguments: Sequence[str]) -> Mapping[str, Any]:
    """Check `arguments` as the command of `function` does before it begins; returns its parameters.

    Raises a usage error, or `LocalError`. The command asks `only_checked` before it begins.
    """
    command = command_of(function)
    with command.make_context(f"hetpeer {command.name}", list(arguments)) as context:
        context.meta[_ONLY_CHECK] = True
        command.invoke(context)
        return dict(context.params)


def only_checked(context: typer.Context) -> bool:
    """Whether the command was called by `check`, and must not begin."""
    return _ONLY_CHECK in context.meta


def parse_duration(text: str) -> float:
    """Seconds of `1h30m`, `45m`, `2d`, `90s`. Raises a usage error."""
    from hetpeer.peer.control.control_messages import LONGEST_PAUSE_S
    from hetpeer.peer.limits.amounts import duration

    try:
        seconds = duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if seconds > LONGEST_PAUSE_S:
        raise typer.BadParameter(f"{text!r} is longer than a year")
    return seconds


def plain(stream: TextIO) -> bool:
    """Whether lines without colour or movement belong on this stream."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def together(invites: list[str] | None, bootstrap: list[str] | None) -> list[str]:
    """Invites and addresses in one list."""
    return [*(invites or ()), *(bootstrap or ())]


def asked(texts: list[str] | None, home: Path | None, run: str = "") -> Destination:
    """The swarm to ask: by the addresses and invites given, else by the volunteer that runs here, else the
    run joined last.

    Raises `LocalError` HP-ADDR-001, HP-ADDR-002, HP-ADDR-003; HP-CTL-001 where `home` is a run directory that
    nobody serves.
    """
    from hetpeer.peer.arrival.destinations import back_to, destination

    here = None if texts or run else standing_here(home)
    if here is None and home is not None and not texts and (home / "manifest.hetpeer").exists():
        from hetpeer.peer.control.control_client import not_running

        raise not_running(home, f"that is a run directory that nobody serves: hetpeer bootstrap {home} does")
    nearby = here.addresses if here is not None else ()
    goal = destination(texts or nearby, run)
    return goal if goal.addresses else back_to(home_of(home), run)


def joined_by(texts: list[str], home: Path, run: str = "", *, near: bool = False) -> Destination:
    """The run to join: by the addresses and invites given, else the run joined last, or `run`.

    Remembered addresses do not count as given. `near`: without a run joined before, one of the local network
    will do. Raises `LocalError` HP-ADDR-001, HP-ADDR-002, HP-ADDR-003.
    """
    from hetpeer.peer.arrival.destinations import Destination, back_to, destination

    named = destination(texts, run)
    if named.addresses:
        return named
    try:
        return Destination((), back_to(home, run).run)
    except LocalError:
        if not near:
            raise
        return named


def need_lan() -> None:
    """Raises `LocalError` HP-SYS-006 where the extra `lan` is not installed."""
    if importlib.util.find_spec("zeroconf") is None:
        raise LocalError(
            "HP-SYS-006",
            "searching the local network is not installed",
            why="it needs the package zeroconf, which nothing else does",
            fix="pip install 'hetpeer[lan]', or leave --lan (network.lan) out",
            exit_code=ExitCode.CONFIG,
        )


def home_of(home: Path | None) -> Path:
    """`home` if it is given, else this peer's default home."""
    from hetpeer.peer.process.home import default_home

    return home or default_home()


def standing_here(home: Path | None) -> DaemonStatus | None:
    """Status of the daemon that runs from `home`; None if none answers."""
    from hetpeer.peer.control.control_client import ask
    from hetpeer.peer.control.control_messages import ControlRequest

    try:
        return ask(home_of(home), ControlRequest(do="status"))
    except LocalError as error:
        logging.getLogger(__name__).debug("%s", error)
        return None


async def watching(look: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Call `look` every `every_s` seconds, also after an error, which is shown. Never returns."""
    import asyncio

    while True:
        try:
            await look()
        except HetpeerError as error:
            print(error.line(), file=sys.stderr)
        await asyncio.sleep(every_s)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on uvloop. Ctrl-C and SIGTERM cancel it for a clean end with exit status 130 or 143."""
    import asyncio

    import uvloop

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(ExitCode.TERMINATED) from None


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Let the body remove what it has begun on Ctrl-C, SIGTERM and SIGHUP; exit status 130 or 143.

    The signal arrives in the body as a KeyboardInterrupt. Further ones are ignored until the body has ended.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    got: list[int] = []

    def end(number: int, _frame: object) -> None:
        got.append(number)
        if len(got) == 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(
            ExitCode.INTERRUPTED if got[:1] == [signal.SIGINT] else ExitCode.TERMINATED
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
