"""What happened in a swarm while somebody looked: events and its speed, from one status to the next. Pure.

A status says how things are; a person wants to know what changed. Everything here is bounded, however long somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.log.loss_curves import Curve
from hetpeer.peer.watching.swarm_status import PeerRow, SwarmStatus

MAX_EVENTS = 200
GRACE_S = 15.0
"""So long may the advert be missing of a peer that has not taken leave: one that was not stored comes again in a few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line for people."""

    time: float
    """Seconds since 1970."""
    text: str
    grave: bool = False
    """Whether the run stands still for it, or goes back."""


class Chronicle:
    """Told one status after the other."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        """The newest last."""
        self.speed = Curve()
        """Tokens (or samples) a second over seconds since 1970."""
        self._present: dict[str, tuple[PeerRow, float]] = {}
        """Peer id → how it was when it was seen last, and when."""
        self._before: SwarmStatus | None = None

    def add(self, status: SwarmStatus) -> None:
        """What is new since the status before; the first one is only how things are."""
        first = self._before is None
        changes = [*self._peers(status), *self._run(status)]
        if not first:
            self.events.extend(changes)
        self.speed.add(status.time, status.swarm.tokens_per_second)
        self._before = status

    def _peers(self, status: SwarmStatus) -> Iterator[Event]:
        for row in status.peers:
            known = self._present.get(row.peer)
            self._present[row.peer] = (row, status.time)
            if known is None:
                yield Event(time=status.time, text=f"{called(row)} came ({row.role})")
            elif known[0].blocks != row.blocks and row.blocks is not None:
                begin, end = row.blocks
                yield Event(time=status.time, text=f"{called(row)} took blocks {begin} to {end - 1}")
        for peer, (row, seen) in list(self._present.items()):
            if peer in status.left or status.time - seen > GRACE_S:
                del self._present[peer]
                yield Event(time=status.time, text=f"{called(row)} is gone")

    def _run(self, status: SwarmStatus) -> Iterator[Event]:
        before = self._before
        if before is None:
            return
        if _doing(status) != _doing(before):
            why = f": {status.reason}" if status.reason else ""
            waiting = status.state == "waiting"
            yield Event(time=status.time, text=f"the run is {_doing(status)[0]}{why}", grave=waiting)
        if status.progress.step < before.progress.step and status.swarm.coordinator:
            text = f"the run went back from step {before.progress.step} to {status.progress.step}"
            yield Event(time=status.time, text=text, grave=True)
        left, were = _left_over(status), _left_over(before)
        if left and not were:
            yield Event(time=status.time, text=f"{left} microbatches wait on the task board")
        elif were and not left:
            yield Event(time=status.time, text="what was left over is done")


def called(row: PeerRow) -> str:
    """What a peer is called: its name, or the end of its id."""
    return row.name or f"…{row.peer[-6:]}"


def _doing(status: SwarmStatus) -> tuple[str, str]:
    """Its state and the reason, for people: that a step is reduced now is no event."""
    return "training" if status.state == "reducing" else status.state, status.reason


def _left_over(status: SwarmStatus) -> int:
    rows: Sequence[int] = [row.microbatches for row in status.leftovers]
    return sum(rows)
