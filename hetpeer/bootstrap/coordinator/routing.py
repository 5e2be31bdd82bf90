"""Routes of a step's microbatches, and new routes for microbatches that got stuck.

Pure. routes.py finds the routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from zlib import crc32

from hetpeer.averaging.messages import Task
from hetpeer.stages.pipeline.routes import (
    LAST,
    Hop,
    LinkCosts,
    Roster,
    Route,
    assign_routes,
    meets,
    path_around,
    splice,
    stands,
)

BEEN, IDLE = 1e4, 5e3
"""Added cost of a peer each time an id got stuck there; and of one that counted nothing while others did, for
which each time costs IDLE_TIMES as much.
"""
IDLE_TIMES = 4
MIXED = 100.0
"""Random cost that spreads stuck ids over routes: some get past the peer that stops them and expose it. It is
another in each attempt: otherwise ids would go round the holders of all blocks in step, and could meet one of
several such peers each time.
"""
UNDER_WAY = 4
"""Ids of a peer that `share` leaves with it, since it may have begun them already."""


class Assignments:
    """Routes of a step's ids, and how often each was handed out.

    `roster` is the step's own: its changes are seen here. `undone` returns the ids that some block has not
    counted yet; `counted(block, id)` returns the holder that counts the id at the block, or None. `lines`:
    costs of links. `limits`: peer → most ids. `apart`: pairs of peers that cannot reach each other.
    """

    def __init__(
        self,
        ids: Iterable[int],
        roster: Roster,
        blocks: int,
        speeds: Mapping[str, float],
        undone: Callable[[], set[int]],
        counted: Callable[[int, int], str | None],
        lines: LinkCosts | None = None,
        limits: Mapping[str, int] = MappingProxyType({}),
        apart: Collection[frozenset[str]] = frozenset(),
    ) -> None:
        self._roster = roster
        self._blocks = blocks
        self._speeds = dict(speeds)
        self._fastest = max(speeds.values(), default=1.0)
        self._undone = undone
        self._counted = counted
        self._limits = limits
        self._routes = assign_routes(ids, roster, blocks, speeds, lines, limits, apart)
        self._taken: list[frozenset[str]] = []
        """Peers from which an id was taken, uncounted there; a set for each time that one was rerouted."""
        self._been = {i: Counter(hop.peer for hop in way) for i, way in self._routes.items()}
        """Id → how often it was sent to each peer."""
        self._attempts: dict[int, int] = {}
        self._stalled: set[int] = set()
        self._hedged: set[int] = set()
        self._apart = set(apart)
        """Pairs between which nothing passes."""

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._routes

    @property
    def taken(self) -> Counter[str]:
        """Peer → ids that were taken from it because it had not counted them."""
        return Counter(peer for peers in self._taken for peer in peers)

    def blamed(self, counted: Mapping[str, int]) -> Counter[str]:
        """Peer → ids that were taken from it and were most likely stuck there; `counted`: ids it counts.

        Nobody knows at which peer of its route an id was stuck. Where some of them count nothing in the whole
        step, it was at one of these: the others never got it, or have passed it on.
        """
        blame = Counter[str]()
        for peers in self._taken:
            blame.update({peer for peer in peers if not counted.get(peer)} or peers)
        return blame

    def tasks(self, ids: Iterable[int] | None = None) -> dict[str, tuple[Task, ...]]:
        """First hop → tasks of those of `ids` (default: all) that begin there."""
        found: dict[str, list[Task]] = {}
        for microbatch in sorted(self._routes if ids is None else ids):
            found.setdefault(self._routes[microbatch][0].peer, []).append(self._task(microbatch))
        return {first: tuple(tasks) for first, tasks in sorted(found.items())}

    def may_be_at(self, microbatch: int, peer: str) -> bool:
        """Whether this id may have come to `peer`: by one of its routes, or in place of a hop that has left.

        Senders also go around broken links without asking: that is not known here, and not waited for long.
        """
        begin, end = self._roster[peer]
        gaps = (hop for hop in self._routes[microbatch] if not stands(hop, self._roster))
        return peer in self._been[microbatch] or any(hop.begin < end and begin < hop.end for hop in gaps)

    def beginning_at(self, peers: Collection[str]) -> set[int]:
        """Ids whose first hop is one of `peers`."""
        return {i for i, route in self._routes.items() if route[0].peer in peers}

    def left_by(self, peer: str) -> set[int]:
        """Ids with `peer` on their route that nobody else counts at its blocks."""
        return {
            i
            for i, route in self._routes.items()
            for hop in route
            if hop.peer == peer
            and any(self._counted(block, i) in (None, peer) for block in range(hop.begin, hop.end))
        }

    def without_beginning(self) -> set[int]:
        """Ids whose first block had no holder when they were to be handed out."""
        return {i for i, route in self._routes.items() if not stands(route[0], self._roster)}

    def again(self, ids: Iterable[int], roster: Roster | None = None) -> dict[str, tuple[Task, ...]]:
        """Hand `ids` out again, around peers not in `roster` (default: the step's). First hop → its tasks.

        An id that nobody can begin is left out until a volunteer has entered.
        """
        roster = self._roster if roster is None else roster
        handed: list[int] = []
        concerned = sorted(self._routes.keys() & set(ids))
        if not concerned:
            return {}
        slow, cost = {peer: self._slow(peer) for peer in self._roster}, self._costs()
        for microbatch in concerned:
            before = self.route_taken(microbatch, roster)
            way = splice(before, roster, cost)
            if met := meets(way, self._apart):
                other = path_around(roster, self._blocks, cost, self._apart)
                way = other if other is not None and meets(other, self._apart) < met else way
            if stands(way[0], roster):
                for hop in set(way) - set(before):
                    cost[hop.peer] += slow[hop.peer] * (hop.end - hop.begin)
                self._goes(microbatch, way)
                self._attempts[microbatch] = self._attempts.get(microbatch, 0) + 1
                handed.append(microbatch)
        return self.tasks(handed)

    def route_taken(self, microbatch: int, roster: Roster | None = None) -> Route:
        """Planned route of `microbatch`, each hop's peer replaced by the holder that counted the id there.

        Used when the id is handed out again: a holder that counted it answers from the tensors that it kept.
        A hop is replaced only if one peer counted all its blocks and is in `roster` (default: the step's).
        """
        roster = self._roster if roster is None else roster
        taken = []
        for planned in self._routes[microbatch]:
            holders = {self._counted(block, microbatch) for block in range(planned.begin, planned.end)}
            holder = holders.pop() if len(holders) == 1 else None
            actual = planned if holder is None else planned._replace(peer=holder)
            taken.append(actual if stands(actual, roster) else planned)
        return tuple(taken)

    def share(self, newcomer: str, speed: float) -> dict[str, tuple[Task, ...]]:
        """Give `newcomer`, now on the roster, its part of the undone ids. Returns peer → tasks to tell it.

        It takes the last ids of the peer with the most work left for its speed, most likely not begun yet.
        This is advice, no new attempt (`Pipeline.assign`). An id's former and new first hop are told.
        """
        self._speeds[newcomer] = speed
        self._fastest = max(self._fastest, speed)
        held = {newcomer: self._roster[newcomer]}
        waiting: dict[str, list[tuple[int, Hop]]] = {}
        for microbatch in sorted(self._undone() & self._routes.keys()):
            for hop in self._routes[microbatch]:
                if hop.peer in self._roster and stands(hop._replace(peer=newcomer), held):
                    waiting.setdefault(hop.peer, []).append((microbatch, hop))
        told: dict[str, set[int]] = {}
        taken = len(waiting.pop(newcomer, ()))  # ids that were to pass it in its former session
        while waiting:
            busiest = max(waiting, key=lambda peer: (len(waiting[peer]) * self._slow(peer), peer))
            left = waiting[busiest]
            fair = (taken + 1) * self._slow(newcomer) < len(left) * self._slow(busiest)
            if not fair or len(left) <= UNDER_WAY:
                break
            microbatch, hop = left.pop()
            before = self._routes[microbatch]
            instead = tuple(hop._replace(peer=newcomer) if one == hop else one for one in before)
            way = splice(instead, self._roster, {})
            if meets(way, self._apart):
                continue
            self._on(microbatch, way)
            taken += 1
            if stands(way[0], self._roster):  # otherwise nobody can begin it yet
                for first in {before[0].peer, way[0].peer} & self._roster.keys():
                    told.setdefault(first, set()).add(microbatch)
        return {peer: tuple(map(self._task, sorted(ids))) for peer, ids in told.items()}

    def _task(self, microbatch: int) -> Task:
        return Task(id=microbatch, route=self._routes[microbatch], attempt=self._attempts.get(microbatch, 0))

    def _slow(self, peer: str) -> float:
        """Time of a block at `peer`, relative to the fastest peer."""
        return self._fastest / max(self._speeds.get(peer, 1.0), 1e-9)

    def _costs(self) -> dict[str, float]:
        """Peer of the roster → when it would be done with one more block."""
        return {
            peer: seconds + self._slow(peer) + LAST * (peer in self._limits)
            for peer, seconds in self._busy().items()
        }

    def _busy(self) -> dict[str, float]:
        """Peer of the roster → how long it is busy with all undone ids on its routes."""
        blocks = dict.fromkeys(self._roster, 0)
        for microbatch in self._undone() & self._routes.keys():
            for hop in self._routes[microbatch]:
                if hop.peer in blocks:
                    blocks[hop.peer] += hop.end - hop.begin
        return {peer: count * self._slow(peer) for peer, count in blocks.items()}

    def stuck(self, undone: set[int]) -> None:
        """`undone` made no progress for the stall timeout; ids stuck a second time take another route."""
        again, self._stalled = undone & self._stalled, undone
        for microbatch, way in self._detours(again).items():
            self._goes(microbatch, way)

    def tried(self, ids: set[int], most: int) -> set[int]:
        """Those of `ids` that pass a peer whose limit is `most` ids or less."""
        on_trial = {peer for peer, limit in self._limits.items() if limit <= most}
        return {i for i in ids & self._routes.keys() if on_trial & {hop.peer for hop in self._routes[i]}}

    def hedge(self, last: set[int]) -> set[int]:
        """Choose another route for `last`, once for each id. Returns the ids that have one."""
        fresh = last - self._hedged
        self._hedged |= fresh
        other = self._detours(fresh)
        for microbatch, way in other.items():
            self._goes(microbatch, way)
        return set(other)

    def part(self, one: str, other: str) -> set[int]:
        """Let nothing pass between these two any more. Returns the undone ids that were rerouted.

        Whichever is to blame: a peer that blames everybody ends alone.
        """
        pair = frozenset((one, other))
        if pair in self._apart:
            return set()
        self._apart.add(pair)
        cost, moved = self._costs(), set()
        for microbatch in sorted(self._undone() & self._routes.keys()):
            before = self._routes[microbatch]
            if not meets(before, {pair}):
                continue
            way = path_around(self._roster, self._blocks, cost, self._apart)
            if way is not None and meets(way, self._apart) < meets(before, self._apart):
                for hop in way:
                    cost[hop.peer] += self._slow(hop.peer) * (hop.end - hop.begin)
                self._on(microbatch, way)  # no peer on its route has held it up
                moved.add(microbatch)
        return moved

    def _goes(self, microbatch: int, way: Route) -> None:
        """Route `microbatch` along `way`; note the peers it is taken from, less those that have left."""
        before = self._routes[microbatch]
        count = {self._counted(block, microbatch) for hop in before for block in range(hop.begin, hop.end)}
        instead = {hop.peer for hop in before} - {hop.peer for hop in way} - count
        if left := instead & self._roster.keys():
            self._taken.append(frozenset(left))
        self._on(microbatch, way)

    def _on(self, microbatch: int, way: Route) -> None:
        self._routes[microbatch] = way
        self._been[microbatch].update(hop.peer for hop in way)

    def _detours(self, ids: set[int]) -> dict[int, Route]:
        """Id → another route, for those of the stuck `ids` that have one.

        It avoids peers of the id's earlier routes, all the more those that count nothing while others do.
        Small random costs spread the ids. It has no more links between `apart` peers than the latest route.
        """
        if not ids:
            return {}
        cost, idle = self._costs(), self._idle()
        found = {}
        for microbatch in sorted(ids):
            been, attempt = self._been[microbatch], self._attempts.get(microbatch, 0)
            price = {
                peer: cost[peer]
                + BEEN * been[peer] * (IDLE_TIMES if peer in idle else 1)
                + IDLE * (peer in idle)
                + MIXED * _chance(microbatch, peer, attempt)
                for peer in cost
            }
            way = path_around(self._roster, self._blocks, price, self._apart)
            before = self._routes[microbatch]
            if way not in (None, before) and meets(way, self._apart) <= meets(before, self._apart):
                found[microbatch] = way
        return found

    def _idle(self) -> set[str]:
        """Peers that count nothing at any of their blocks, although others count something there."""
        counted = {
            block: {self._counted(block, microbatch) for microbatch in self._routes}
            for block in range(self._blocks)
        }
        return {
            peer
            for peer, (begin, end) in self._roster.items()
            if all(peer not in counted[block] for block in range(begin, end))
            and any(counted[block] - {None} for block in range(begin, end))
        }


def _chance(microbatch: int, peer: str, attempt: int) -> float:
    """A pseudo-random number in [0, 1) for each triple, the same on every machine."""
    return crc32(f"{microbatch} {peer} {attempt}".encode()) / 2**32
