"""Who could not compute what nobody else could be given: whose word that is, and when it ends the run (docs/trust.md, "What cannot be computed").

Pure. Nobody can see whether somebody else's device has failed. So whoever holds a block, and fails, has to make room for others first; the run is in trouble when enough
different ones have failed there, or nobody else has come to try.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hetpeer.bootstrap.state.effects import CoordinatorConfig
from hetpeer.stages.pipeline.routes import Roster, cheapest_path

MAX_FAILURES = 3
"""A microbatch that all who hold some block have failed, each equally often, and so often in all, is not given to them any more. Who says it of the same one more often is not listened to."""
ENOUGH = 3
"""So many different ones, and it is the microbatch's doing."""
MOVES = 2
"""Until somebody is moved: the run goes back for it, and waits as long again."""
ALONE = 3
"""So often the place of who has failed was free for as long as others need, and nobody else is expected."""
IDLE = 3
"""With whom nothing was computed so often rests no longer each time."""
LONE = 1
"""The same where nobody else has been there at all in this reign: whoever runs it waits to hear what is wrong, and there is nobody whose work ends with it."""


def room_s(config: CoordinatorConfig) -> float:
    """How long the place of who has failed is free for others, in seconds: until one of them is moved there, and has its state."""
    return MOVES * config.move_s + config.sync_s


@dataclass(frozen=True, slots=True)
class FailedMicrobatch:
    """All `holders` of each of `blocks` have failed a microbatch of `batch`; `why` says which, how often, and what they say of it."""

    batch: int
    blocks: tuple[int, ...]
    holders: tuple[str, ...]
    why: str


class FailureReports:
    """What is said to have failed in one step."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[str, str]]] = {}
        """Microbatch → who said that it failed, and who is to blame: itself, or who had sent what it could not use; empty: somebody who has left."""

    def hears(self, microbatch: int, peer: str) -> bool:
        """Whether `peer` has not said it too often."""
        return [reporter for reporter, _ in self._known.get(microbatch, ())].count(peer) < MAX_FAILURES

    def add(self, microbatch: int, peer: str, culprit: str) -> None:
        """`peer` says that it failed, and blames `culprit`."""
        self._known.setdefault(microbatch, []).append((peer, culprit))

    def forget(self, left: Collection[str]) -> None:
        """Those who have `left` may come back, and try again."""
        for microbatch, known in self._known.items():
            self._known[microbatch] = [report for report in known if report[0] not in left]

    def _own(self, microbatch: int) -> Counter[str]:
        """Who has failed it by its own word → how often."""
        return Counter(peer for peer, culprit in self._known[microbatch] if peer == culprit)

    def times(self, microbatch: int) -> int:
        """How often it failed, but for what others are blamed for."""
        return self._own(microbatch).total()

    def who_else(self, microbatch: int, roster: Roster, blocks: int) -> Roster:
        """Who of `roster` can do it, through all `blocks`: those whom nobody blames, else those who have failed it themselves least often."""
        own, blamed = self._own(microbatch), {culprit for _, culprit in self._known[microbatch]}
        often = [
            {peer for peer, times in own.items() if times >= least} for least in range(1, MAX_FAILURES + 1)
        ]
        for out in (blamed, *often):
            others = {peer: place for peer, place in roster.items() if peer not in out}
            if cheapest_path(others, 0, blocks, {}) is not None:
                return others
        return roster

    def nobody_can(self, microbatch: int, roster: Roster) -> tuple[int, ...]:
        """Blocks all of whose holders have failed it, by their own word, and have had tries enough."""
        own, found = self._own(microbatch), []
        for block in {block for peer in own.keys() & roster.keys() for block in range(*roster[peer])}:
            times = [own[peer] for peer, (begin, end) in roster.items() if begin <= block < end]
            if min(times) * len(times) >= MAX_FAILURES:
                found.append(block)
        return tuple(sorted(found))


class Failures:
    """Those of one reign. `elsewhere`, in a run of several pipelines: whether others can be given the same batch, far from whoever fails it here."""

    def __init__(self, elsewhere: Callable[[], bool] | None = None) -> None:
        self._elsewhere = elsewhere
        self._failed: dict[tuple[int, int], tuple[float, set[str]]] = {}
        """Batch and block → since when, and who has failed it there."""
        self._met: set[str] = set()
        """Who has taken part; of several two are enough to know."""
        self._rests: dict[str, float] = {}
        """Who is to make room for others → until when."""
        self._excused_to = -math.inf
        self._idle: Counter[str] = Counter()
        """With whom nothing was computed → how often."""

    def are_final(self, failure: FailedMicrobatch, room_s: float, now: float, *, replaceable: bool) -> bool:
        """Note `failure`. Whether nothing else is to be tried; `replaceable`: somebody can be put where they were, within `room_s`."""
        fewest = ENOUGH if replaceable or (self._elsewhere is not None and self._elsewhere()) else 2
        rooms = LONE if len(self._met) == 1 and self._elsewhere is None else ALONE
        final = False
        for block in failure.blocks:
            since, failed = self._failed.setdefault((failure.batch, block), (now, set()))
            failed |= set(failure.holders)
            final = final or len(failed) >= fewest or now - since >= rooms * room_s
        return final

    def met(self, peer: str) -> None:
        """`peer` takes part from now on."""
        if len(self._met) < 2:
            self._met.add(peer)

    def committed(self, batch: int) -> None:
        """It could be computed."""
        self._failed = {where: known for where, known in self._failed.items() if where[0] != batch}

    # ── who makes room ──────────────────────────────────────────────────────────────────────────────────────

    def rest(self, peers: Iterable[str], seconds: float, now: float) -> None:
        """`peers` are not given anything for so long."""
        self._rests |= dict.fromkeys(peers, now + seconds)

    def idle(self, peers: Iterable[str], seconds: float, now: float) -> None:
        """Nothing was computed where all of `peers` are needed, and nobody knows by whom: they rest, each time twice as long."""
        for peer in peers:
            self.rest([peer], seconds * 2 ** min(self._idle[peer], IDLE), now)
            self._idle[peer] += 1

    def rests(self, peer: str) -> bool:
        """Whether others are to come where `peer` could not compute."""
        return peer in self._rests

    def excuse(self, pause_s: float, now: float) -> None:
        """We did not run for so long until `now`: nobody could come. All clusters of a run say so."""
        if now <= self._excused_to:
            return
        self._excused_to = now
        self._rests = {peer: until + pause_s for peer, until in self._rests.items()}
        self._failed = {where: (since + pause_s, who) for where, (since, who) in self._failed.items()}

    def wake(self, now: float) -> bool:
        """Whether somebody has rested by now."""
        left = {peer: until for peer, until in self._rests.items() if now < until}
        woken, self._rests = len(left) < len(self._rests), left
        return woken
