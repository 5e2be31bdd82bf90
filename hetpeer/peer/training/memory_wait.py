"""Bundles that wait until the arena has room to write or to decode them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from hetpeer.averaging.effects import StepId
from hetpeer.peer.transport.worker_posts import Answer
from hetpeer.stages.ipc.arena import ArenaFullError

LATE_S = 0.05
"""Seconds between two tries."""

Try = Callable[[], Answer | None]
"""Sends or decodes a bundle, or raises ArenaFullError with nothing done. Returns what is left to wait for."""


class MemoryWait:
    """Tries again what found no room. `start` runs what a try returns, `spawn` runs a task."""

    def __init__(self, start: Callable[[Answer | None], None], spawn: Callable[[Answer], object]) -> None:
        self._start = start
        self._spawn = spawn
        self._unsent: deque[tuple[StepId, Try]] = deque()
        self._undecoded: list[tuple[StepId, Try]] = []

    def send(self, step: StepId, out: Try) -> None:
        """Call `out`, which sends a bundle, behind those that wait already."""
        if self._unsent or not self._goes(out):
            self._unsent.append((step, out))
            if len(self._unsent) == 1:
                self._spawn(self._send_late())

    async def _send_late(self) -> None:
        while self._unsent:
            await asyncio.sleep(LATE_S)
            while self._unsent and self._goes(self._unsent[0][1]):
                self._unsent.popleft()

    def decode(self, step: StepId, into: Try) -> None:
        """Call `into`, which decodes a tensor.

        No tensor waits for another: one farther from the loss could wait for one nearer to it.
        """
        if not self._goes(into):
            self._undecoded.append((step, into))
            if len(self._undecoded) == 1:
                self._spawn(self._decode_late())

    async def _decode_late(self) -> None:
        while self._undecoded:
            await asyncio.sleep(LATE_S)
            self._undecoded = [late for late in self._undecoded if not self._goes(late[1])]

    def _goes(self, attempt: Try) -> bool:
        try:
            self._start(attempt())
        except ArenaFullError:
            return False
        return True

    def end_step(self, step: StepId) -> None:
        """Drop what waits of `step`, by our name for it or by others'."""
        self._unsent = deque(late for late in self._unsent if late[0] != step)
        self._undecoded = [late for late in self._undecoded if late[0] != step]
