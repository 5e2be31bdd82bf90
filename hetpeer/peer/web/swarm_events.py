"""Events and speed of a swarm while it is watched, from the differences between one status and the next.
Pure.

Everything kept here is bounded, however long somebody watches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.log.loss_curves import Curve
from hetpeer.dht.base.errors import short_id
from hetpeer.peer.limits.amounts import blocks_text, counted
from hetpeer.peer.watching.swarm_status import PeerRow, SwarmStatus

MAX_EVENTS = 200
GRACE_S = 15.0
"""Seconds that an advert may be missing before its peer counts as lost: an unstored one is sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmEvent:
    """One line of the list of events."""

    time: float
    """Seconds since 1970."""
    text: str
    grave: bool = False
    """Whether the run stops or rolls back because of it."""


class SwarmEvents:
    """The events and the speed curve that a series of statuses gives."""

    def __init__(self) -> None:
        self.events: deque[SwarmEvent] = deque(maxlen=MAX_EVENTS)
        """Oldest first."""
        self.speed = Curve()
        """Tokens (or samples) a second over seconds since 1970."""
        self._present: dict[str, tuple[PeerRow, float]] = {}
        """Peer id → (its last row, when it was seen)."""
        self._before: SwarmStatus | None = None

    def add(self, status: SwarmStatus) -> None:
        """Add the changes since the last status. The first status gives no events."""
        first = self._before is None
        changes = [*self._peers(status), *self._run(status)]
        if not first:
            self.events.extend(changes)
        self.speed.add(status.time, status.swarm.tokens_per_second)
        self._before = status

    def _peers(self, status: SwarmStatus) -> Iterator[SwarmEvent]:
        """Peers that joined, took blocks, left or were lost since the last status."""
        for row in status.peers:
            known = self._present.get(row.peer)
            self._present[row.peer] = (row, status.time)
            if known is None:
                yield SwarmEvent(time=status.time, text=f"{called(row)} joined ({row.role})")
            elif known[0].blocks != row.blocks and row.blocks is not None:
                yield SwarmEvent(time=status.time, text=f"{called(row)} took {blocks_text(*row.blocks)}")
        for peer, (row, seen) in list(self._present.items()):
            if peer in status.left or status.time - seen > GRACE_S:
                del self._present[peer]
                how = "left" if peer in status.left else "was lost"
                yield SwarmEvent(time=status.time, text=f"{called(row)} {how}")

    def _run(self, status: SwarmStatus) -> Iterator[SwarmEvent]:
        """Changes of the run since the last status: state, roll-back, leftovers."""
        before = self._before
        if before is None:
            return
        if _doing(status) != _doing(before):
            why = f": {status.reason}" if status.reason else ""
            waiting = status.state == "waiting"
            yield SwarmEvent(time=status.time, text=f"the run is {_doing(status)[0]}{why}", grave=waiting)
        if status.progress.step < before.progress.step and status.swarm.coordinator:
            text = f"back from step {before.progress.step} to step {status.progress.step}"
            yield SwarmEvent(time=status.time, text=text, grave=True)
        left, were = _left_over(status), _left_over(before)
        if left and not were:
            microbatches = counted(left, "microbatch", "microbatches")
            text = f"{microbatches} wait for a volunteer that can compute them"
            yield SwarmEvent(time=status.time, text=text)
        elif were and not left:
            yield SwarmEvent(time=status.time, text="the unfinished work is done")


def called(row: PeerRow) -> str:
    """The peer's name, or its short id."""
    return row.name or short_id(row.peer)


def _doing(status: SwarmStatus) -> tuple[str, str]:
    """State and reason, with `reducing` shown as `training`: each step has it, so it is no event."""
    return "training" if status.state == "reducing" else status.state, status.reason


def _left_over(status: SwarmStatus) -> int:
    rows: Sequence[int] = [row.microbatches for row in status.leftovers]
    return sum(rows)
