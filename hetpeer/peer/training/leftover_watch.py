"""Leftovers through the DHT: shows what we keep for unknown holders, and asks for what others keep for us.

The task board names senders. To ask one is to introduce ourselves to it; it then sends what it keeps
(docs/protocol.md, leftovers). A holder looks at the board while it has nothing to do in a step; one that came
into the step while it ran looks at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from hetpeer.averaging.effects import StepId
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import MAX_IDS, NOTE_TTL_S, LeftoverIds, TaskBoard, TaskNote, board_shard

LOOK_S = 0.5
IDLE_S = 2.0
"""Seconds without work after which a holder that was in the step from its beginning looks, and between two
looks.
"""

_log = logging.getLogger(__name__)


class Keeper(Protocol):
    """A volunteer, as far as leftovers are concerned."""

    @property
    def step(self) -> StepId | None:
        """The step in progress."""

    @property
    def place(self) -> tuple[int, int] | None:
        """The blocks that it holds."""

    @property
    def is_idle(self) -> bool:
        """Whether it takes part in a step and has nothing to do there."""

    @property
    def partners(self) -> Collection[str]:
        """Volunteers that take part in the step in progress."""

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Border → ids that it keeps for a holder that it does not know."""


class Asker(Protocol):
    """Asks senders on behalf of the keeper."""

    def ask(self, sender: str, found: LeftoverIds) -> None:
        """`sender` shows work for us: introduce us."""


class LeftoverWatch:
    """Posts and looks for `keeper`, whose peer id is `me`. Microbatches of the run have ids below `ids`."""

    def __init__(self, me: str, board: TaskBoard, keeper: Keeper, asker: Asker, ids: int) -> None:
        self._me = me
        self._ids = ids
        self._board = board
        self._keeper = keeper
        self._asker = asker
        self._shown: dict[int, TaskNote] = {}
        """Shard → our note there."""
        self._shown_at = 0.0
        self._idle_since: float | None = None

    async def watch_forever(self) -> None:
        """Post and look until cancelled. A DHT that does not answer is asked again at the next turn."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._show(clock())
                await self._look(clock())
            except RemoteError as error:
                _log.debug("the task board: %s", error)

    async def _show(self, now: float) -> None:
        """Post what is left over here, when it changes and before it expires."""
        notes = self._notes()
        for shard in self._shown.keys() - notes.keys():
            await self._board.post(shard, self._shown[shard].model_copy(update={"leftovers": ()}))
        if notes and (notes != self._shown or now - self._shown_at > NOTE_TTL_S / 2):
            self._shown_at = now
            for shard, note in notes.items():
                _log.info("leftovers of step %d on the board: %s", note.step, note.leftovers)
                await self._board.post(shard, note)
        self._shown = notes

    def _notes(self) -> dict[int, TaskNote]:
        step = self._keeper.step
        if step is None:
            return {}
        shards: dict[int, list[LeftoverIds]] = {}
        for border, ids in sorted(self._keeper.leftovers().items()):
            shards.setdefault(board_shard(border), []).append(LeftoverIds(border=border, ids=ids[:MAX_IDS]))
        return {
            shard: TaskNote(term=step.line.term, view=step.line.view, step=step.number, leftovers=tuple(left))
            for shard, left in shards.items()
        }

    async def _look(self, now: float) -> None:
        """While we have nothing to do: ask those who keep work for our blocks."""
        step, place = self._keeper.step, self._keeper.place
        if step is None or place is None or not self._keeper.is_idle:
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        if not step.entry and now - self._idle_since < IDLE_S:
            return
        self._idle_since = now
        board = await self._board.read(range(*place))
        if self._keeper.step != step:
            return  # it ended while we read
        partners = self._keeper.partners  # anybody may post there
        for sender, notes in board.items():
            if sender == self._me or sender not in partners:
                continue
            for note in notes:
                if (note.term, note.view, note.step) == (*_line(step), step.number):
                    self._ask(sender, note, place)

    def _ask(self, sender: str, note: TaskNote, place: tuple[int, int]) -> None:
        for found in note.leftovers:
            ids = tuple(dict.fromkeys(number for number in found.ids if number < self._ids))
            if ids and place[0] <= found.border < place[1]:
                self._asker.ask(sender, LeftoverIds(border=found.border, ids=ids))


def _line(step: StepId) -> tuple[int, int]:
    return step.line.term, step.line.view
