"""Microbatches that every holder failed: who failed, and when that halts the run.

Pure. Nobody can see whether another peer's device is broken. So holders of a block that fail make room for
others first. The run halts when enough different holders have failed there, or nobody else has come to try
(docs/trust.md, "What cannot be computed").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetpeer.averaging.messages import MAX_TEXT
from hetpeer.bootstrap.state.effects import CoordinatorConfig

ENOUGH = 3
"""Different holders that must fail before the microbatch is to blame."""
MOVES = 2
"""Waits of `move_s` until a volunteer is moved: the run rolls back after the first."""
ALONE = 3
"""Number of times a place must be free for others in vain, when nobody else is expected."""
IDLE = 3
"""Rests double this many times at most."""
LONE = 1
"""`ALONE` if nobody else took part in the run in this term: its owner waits to hear what is wrong."""


def room_s(config: CoordinatorConfig) -> float:
    """Seconds that a failed holder's place is free for others: until one is moved there and has its state."""
    return MOVES * config.move_s + config.sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMicrobatch:
    """Microbatch `id` of `batch` that all `holders` of all `blocks` have failed; `what`: what they report."""

    batch: int
    id: int
    blocks: tuple[int, ...]
    holders: tuple[str, ...]
    times: int
    step: int
    what: str

    @property
    def why(self) -> str:
        """The failure in one line."""
        return f"microbatch {self.id} of step {self.step} failed {self.times} times: {self.what}"[:MAX_TEXT]


class Failures:
    """Failures of one term. `elsewhere`: whether another cluster of the run can be given the same batch."""

    def __init__(self, elsewhere: Callable[[], bool] | None = None) -> None:
        self._elsewhere = elsewhere
        self._failed: dict[tuple[int, int], tuple[float, set[str]]] = {}
        """(batch, block) → since when, and holders that failed it there."""
        self._met: set[str] = set()
        """Volunteers that have taken part; two are remembered at most."""
        self.resting: dict[str, float] = {}
        """Peers that make room for others at their blocks → until when."""
        self._excused_to = -math.inf
        self._idle: Counter[str] = Counter()
        """Peer → how often nothing was computed with it."""

    def are_final(self, failure: FailedMicrobatch, room_s: float, now: float, *, replaceable: bool) -> bool:
        """Note `failure`. Returns whether it is final. `replaceable`: others can take over in `room_s` s."""
        fewest = ENOUGH if replaceable or (self._elsewhere is not None and self._elsewhere()) else 2
        rooms = LONE if len(self._met) == 1 and self._elsewhere is None else ALONE
        final = False
        for block in failure.blocks:
            since, failed = self._failed.setdefault((failure.batch, block), (now, set()))
            failed |= set(failure.holders)
            final = final or len(failed) >= fewest or now - since >= rooms * room_s
        return final

    def met(self, peer: str) -> None:
        """Note that `peer` takes part."""
        if len(self._met) < 2:
            self._met.add(peer)

    def committed(self, batch: int) -> None:
        """Forget failures of `batch`: it could be computed."""
        self._failed = {where: known for where, known in self._failed.items() if where[0] != batch}

    # ── who makes room ──────────────────────────────────────────────────────────────────────────────────────

    def rest(self, peers: Iterable[str], seconds: float, now: float) -> None:
        """Give `peers` nothing for this many seconds."""
        self.resting |= dict.fromkeys(peers, now + seconds)

    def idle(self, peers: Iterable[str], seconds: float, now: float) -> None:
        """Let `peers` rest, twice as long each time: nothing was computed where all of them are needed."""
        for peer in peers:
            self.rest([peer], seconds * 2 ** min(self._idle[peer], IDLE), now)
            self._idle[peer] += 1

    def excuse(self, pause_s: float, now: float) -> None:
        """Postpone all rests by `pause_s`, for which nothing ran until `now`; each cluster may call it."""
        if now <= self._excused_to:
            return
        self._excused_to = now
        self.resting = {peer: until + pause_s for peer, until in self.resting.items()}
        self._failed = {where: (since + pause_s, who) for where, (since, who) in self._failed.items()}

    def wake(self, now: float) -> bool:
        """Whether a rest has ended by now."""
        left = {peer: until for peer, until in self.resting.items() if now < until}
        woken, self.resting = len(left) < len(self.resting), left
        return woken
