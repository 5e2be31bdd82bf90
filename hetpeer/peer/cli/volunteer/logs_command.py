"""`hetpeer logs`: show the log of this machine's volunteer, running or not."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import HomeOption, home_of, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hetpeer.peer.process.log_files import LogLine

LOOK_S = 0.3


def logs(
    *,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Show new messages as they come, until Ctrl-C.")
    ] = False,
    count: Annotated[
        int, typer.Option("-n", "--lines", min=0, max=100_000, help="Number of messages, the newest.")
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, as in the file.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Show the log of this machine's volunteer, running or not.

    With --home DIR of a run directory: of its reliable peer.
    """
    from contextlib import closing

    from hetpeer.peer.process.log_files import LogReader

    with closing(LogReader(home_of(home))) as reader:
        _show(reader.last(count), as_json)
        while follow:
            time.sleep(LOOK_S)
            _show(reader.news(), as_json)


def _show(entries: Iterable[LogLine], as_json: bool) -> None:
    colours = not plain(sys.stdout)
    for entry in entries:
        for line in (entry.raw,) if as_json else entry.lines(colours=colours):
            print(line)
    sys.stdout.flush()
