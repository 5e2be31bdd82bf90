"""Who could not compute what nobody else could be given: whose word that is, and when it ends the run (docs/trust.md, "What cannot be computed").

Pure. Nobody can see whether somebody else's device has failed. So whoever holds a block, and fails, has to make room for others first; the run is in trouble when enough
different ones have failed there, or nobody else has come to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetpeer.bootstrap.decisions import CoordinatorConfig

MAX_FAILURES = 3
"""A microbatch that all who hold some block have failed, so often in all, is not given to them any more. Who says it of the same one more often is not listened to."""
ENOUGH = 3
"""So many different ones, and it is the microbatch's doing."""
MOVES = 2
"""Until somebody is moved: the run goes back for it, and waits as long again."""
ALONE = 3
"""So often the place of who has failed was free for as long as others need, and nobody else is expected."""


def room_s(config: CoordinatorConfig) -> float:
    """How long the place of who has failed is free for others, in seconds: until one of them is moved there, and has its state."""
    return MOVES * config.move_s + config.sync_s


@dataclass(frozen=True, slots=True)
class Failure:
    """All `holders` of `block` have failed a microbatch of `batch`; `why` says which, how often, and what they say of it."""

    batch: int
    block: int
    holders: tuple[str, ...]
    why: str


class Failures:
    """Those of one reign. `elsewhere`: whether others can be given the same batch, far from whoever fails it here."""

    def __init__(self, elsewhere: Callable[[], bool] = lambda: False) -> None:
        self._elsewhere = elsewhere
        self._failed: dict[tuple[int, int], tuple[float, set[str]]] = {}
        """Batch and block → since when, and who has failed it there."""
        self._rests: dict[str, float] = {}
        """Who is to make room for others → until when."""

    def are_final(self, failure: Failure, room_s: float, now: float, *, replaceable: bool) -> bool:
        """Note `failure`. Whether nothing else is to be tried; `replaceable`: somebody can be put where they were, within `room_s`."""
        since, failed = self._failed.setdefault((failure.batch, failure.block), (now, set()))
        failed |= set(failure.holders)
        others = replaceable or self._elsewhere()
        enough = len(failed) >= ENOUGH or (len(failed) > 1 and not others)
        return enough or now - since >= ALONE * room_s

    def committed(self, batch: int) -> None:
        """It could be computed."""
        self._failed = {where: known for where, known in self._failed.items() if where[0] != batch}

    # ── who makes room ───────────────────────────────────────────────────────────────────────────────────────────

    def rest(self, peers: Iterable[str], seconds: float, now: float) -> None:
        """`peers` are not given anything for so long."""
        self._rests |= dict.fromkeys(peers, now + seconds)

    def rests(self, peer: str) -> bool:
        """Whether others are to come where `peer` could not compute."""
        return peer in self._rests

    def excuse(self, pause_s: float) -> None:
        """We did not run for so long: nobody could come."""
        self._rests = {peer: until + pause_s for peer, until in self._rests.items()}
        self._failed = {where: (since + pause_s, who) for where, (since, who) in self._failed.items()}

    def wake(self, now: float) -> bool:
        """Whether somebody has rested by now."""
        left = {peer: until for peer, until in self._rests.items() if now < until}
        woken, self._rests = len(left) < len(self._rests), left
        return woken
