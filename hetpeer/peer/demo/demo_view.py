"""View of a running demo: one live picture on a terminal, plain lines elsewhere. Both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

STYLES = {"alive": "green", "done": "blue", "killed": "red", "failed": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The run at one moment. `volunteers` maps each name to a word of `STYLES`."""

    step: int
    steps: int
    loss: float | None
    eval_loss: float | None
    tokens_per_second: float
    rollbacks: int
    volunteers: Mapping[str, str]

    def line(self) -> str:
        """The picture as one line."""
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        evaluation = "" if self.eval_loss is None else f"  held-out {self.eval_loss:.4f}"
        speed = f"  {self.tokens_per_second:,.0f} tok/s" if self.tokens_per_second else ""
        back = f"  {self.rollbacks} roll-backs" if self.rollbacks else ""
        alive = sum(state == "alive" for state in self.volunteers.values())
        return f"step {self.step}/{self.steps}{loss}{evaluation}{speed}  {alive} alive{back}"


class DemoView(Protocol):
    """Output of a demo."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def show(self, picture: Picture) -> None:
        """Show the present state; may be called often."""


class PlainView:
    """A line for each event and for each committed step."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._step = 0

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def show(self, picture: Picture) -> None:
        if picture.step != self._step:
            self._step = picture.step
            self.say(picture.line())


class LiveView:
    """A progress bar and the volunteers, redrawn in place; events scroll above it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def show(self, picture: Picture) -> None:
        self._live.update(_drawing(picture))


@contextmanager
def opened(*, plain: bool, quiet: bool) -> Iterator[DemoView]:
    """The view for this terminal; when it closes, the last picture stays."""
    if plain or quiet:
        yield PlainView(quiet=quiet)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=8) as live:
        yield LiveView(live)


def _drawing(picture: Picture) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    volunteers = Table.grid(padding=(0, 3))
    volunteers.add_row(
        *(Text(f"● {name} {state}", style=STYLES[state]) for name, state in picture.volunteers.items())
    )
    bar = ProgressBar(total=picture.steps, completed=picture.step, width=60)
    return Group("", bar, Text(picture.line(), style="bold"), volunteers)
