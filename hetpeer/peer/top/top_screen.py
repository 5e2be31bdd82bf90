"""The live view: what the daemon says over its control socket, once a second, and three keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
from rich.text import Text
from textual.app import App
from textual.widgets import Footer, Static

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest, VolunteerStatus
from hetpeer.peer.limits import nvml
from hetpeer.peer.top.top_text import lines
from hetpeer.peer.web.machine_load import LoadMeter, MachineLoad

LOOK_S = 1.0


class Top(App):  # type: ignore[misc] # textual is an extra, and nothing of it is known here
    """Live view of the daemon that runs from `home`. Errors are shown, and the next look asks again."""

    TITLE = "hetpeer"
    BINDINGS: ClassVar[list[Any]] = [
        ("q", "quit", "Quit"),
        ("p", "tell('pause')", "Pause"),
        ("r", "tell('resume')", "Resume"),
    ]

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        self._machine: tuple[int, LoadMeter] | None = None
        self._asking = asyncio.Lock()
        self.shown = ""
        """The text on the screen."""

    def compose(self) -> Any:
        """The text, and which keys there are."""
        yield Static(id="view")
        yield Footer()

    async def on_mount(self) -> None:
        """Look now, and then once a second."""
        self.set_interval(LOOK_S, self.look)
        await self.look()

    async def look(self) -> None:
        """Ask for the status, unless a request is under way."""
        if not self._asking.locked():
            await self.action_tell("status")

    async def action_tell(self, do: Literal["status", "pause", "resume"]) -> None:
        """Ask for that, and show what comes of it."""
        async with self._asking:
            try:
                standing = await asyncio.to_thread(ask, self._home, ControlRequest(do=do))
                gpus = await asyncio.to_thread(nvml.loads)
                found = "\n".join(lines(standing, self._load(standing.figures), gpus))
            except LocalError as error:
                found = error.line()
        self.shown = found
        self.query_one("#view", Static).update(Text(found))

    def _load(self, figures: VolunteerStatus | None) -> MachineLoad | None:
        """Load of the machine and of the daemon's processes since the last look; None if it has just
        ended.
        """
        if figures is None:
            return None
        try:
            if self._machine is None or self._machine[0] != figures.pid:
                self._machine = figures.pid, LoadMeter(self._home, figures.pid)
            return self._machine[1].look()
        except (psutil.Error, OSError):  # it has just ended
            self._machine = None
            return None
