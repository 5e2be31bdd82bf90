"""Shares of a step's work for each volunteer: its speed, link costs, and issue limits.

Pure. All but the limits rests on volunteers' claims. A false claim gives a volunteer more or less work than
it should have and slows the run; it cannot change which microbatches count, as the exact cover decides that.

Routes prefer fast links and links within a cluster, since planners put neighbours into one cluster
(docs/planning.md). A link to another cluster that was not measured costs as much as one more microbatch at a
mean peer (`leaving`): a route uses it only if the load of the peers is that uneven.

Issue limits bound the harm of a volunteer that takes ids and does not do them. Many such ids make a step wait
for two stall timeouts. A few do not: the last ids of a step are handed out a second time without a stall. A
handful is that number of ids (`few`), and limits are counted in handfuls a step:

- Nobody has a limit at first, and nobody has one where no other volunteer holds the block.
- A volunteer that counts less than half of the ids that were taken from it in a step gets half a handful, the
  next time a quarter, and so on. If others on the way of such an id count nothing in the step, it is theirs.
  Less than one handful is saved up: an eighth means every eighth step.
- What a volunteer with less than one handful has not counted when half of the step is done, others get as
  well. So it costs the step next to no time to try it again.
- Each id that it counts raises its limit, until that no longer binds. How deep the next fall is recovers
  slowly, so alternating good and bad steps gains nothing.

This is additive increase, multiplicative decrease, as in TCP (Chiu and Jain, 1989; Jacobson, 1988).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from types import MappingProxyType

from hetpeer.bootstrap.state.membership import PLAIN, BlockDemand
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.stages.pipeline.routes import SLIGHT, LinkCosts, Roster
from hetpeer.stages.planning.swarms.plan_inputs import Compression

MOST = 100.0
"""No volunteer is taken to be more than this many times as fast as the median."""
LIGHTEST = 0.01
"""Least weight of a block, relative to the median: work without matrix products takes time, too."""
FIRST = 0.5
"""Handfuls a step after the first fault."""
DECREASE = 0.5
LEAST = 2.0**-10
"""Least part of a handful a step: a volunteer that has improved is noticed some day."""
INCREASE = 0.5
"""Rise of the limit, in ids, for each id that is counted."""
FORGIVEN = 2.0 ** (1 / 32)
"""Factor by which the next fall is less deep after each good step."""
HEDGED = 0.05
"""Last ids of a step, as a share of all, that are handed out twice when they take too long."""
MAX_PEERS = 1024
"""Peers that are remembered; older ones begin again without a limit."""


def rates(ready: Collection[VolunteerState], costs: Sequence[BlockDemand]) -> dict[str, float]:
    """Volunteer → blocks per second, forward and back, on average over its place.

    If it has trained, from its reported times. Otherwise from its speed in rehearsal or matrix products,
    scaled by the median ratio of those that have trained. If nobody has, the numbers are only good for
    comparing.
    """
    usual = median(cost.flops for cost in costs) or 1.0
    guessed, said = {}, {}
    for volunteer in ready:
        begin, end = volunteer.place or (0, 1)
        flops = fmean(max(cost.flops, LIGHTEST * usual) for cost in costs[begin:end])
        guessed[volunteer.peer] = max(volunteer.flops_per_second, 1.0) / flops
        if volunteer.computing:
            said[volunteer.peer] = (end - begin) / volunteer.computing
    slower = median(said[peer] / guessed[peer] for peer in said) if said else 1.0
    found = {peer: said.get(peer, slower * rate) for peer, rate in guessed.items()}
    limit = MOST * median(found.values()) if found else 0.0
    return {peer: min(rate, limit) for peer, rate in found.items()}


def link_costs(
    ready: Collection[VolunteerState],
    speeds: Mapping[str, float],
    compression: Compression = PLAIN,
    targets: Mapping[str, float] = MappingProxyType({}),
    *,
    mixed: bool = False,
) -> LinkCosts:
    """Costs of links between `ready` volunteers, in block times of the fastest by `speeds`.

    A link takes the time of its bundle after `compression`; an adaptive codec aims at the sender's `targets`
    in seconds. `mixed`: leaving the cluster costs next to nothing. Spot checks find a liar by what it sends
    to several others, so routes must meet many.
    """
    peers = {volunteer.peer for volunteer in ready}
    fastest = max(speeds.values(), default=1.0)
    trained = any(volunteer.computing for volunteer in ready)
    seconds: dict[tuple[str, str], float] = {}
    for volunteer in ready:
        for peer, took in volunteer.links.items():
            if trained and took and peer in peers:
                carried = _carried_s(took, compression, targets.get(volunteer.peer, 0.0)) * fastest
                for pair in ((volunteer.peer, peer), (peer, volunteer.peer)):  # the way back
                    seconds[pair] = seconds.get(pair, 0.0) + carried
    price = leaving({v.peer: v.place for v in ready if v.place is not None}, speeds, mixed=mixed)
    return LinkCosts({v.peer: v.cluster for v in ready}, seconds, price, mixed=mixed)


def leaving(roster: Roster, speeds: Mapping[str, float], *, mixed: bool = False) -> float:
    """Cost of an unmeasured link to another cluster, in the fastest's block times; `mixed`: next to none."""
    fastest = max(speeds.values(), default=1.0)
    more = [fastest / speeds[peer] * (end - begin) ** 2 for peer, (begin, end) in roster.items()]
    return SLIGHT if mixed or not more else max(SLIGHT, fmean(more))


def _carried_s(took: float, compression: Compression, target: float) -> float:
    """Seconds of a bundle that takes `took` uncompressed."""
    least = took / min(compression.forward, compression.backward)
    if not compression.adaptive:
        return least
    return max(least, min(took, target)) if target else took


# ── separated pairs ───────────────────────────────────────────────────────────────────────────────────────


def shunned(ready: Collection[VolunteerState]) -> set[frozenset[str]]:
    """Pairs of `ready` volunteers that do not work with each other for now.

    A volunteer that shuns most holders of the blocks next to its own counts as shunning all of them.
    Otherwise it could choose who sees what it sends.
    """
    pairs = set[frozenset[str]]()
    for one in ready:
        for side in _beside(one, ready) if one.shuns else ():
            named = one.shuns & side
            pairs |= {frozenset((one.peer, peer)) for peer in (side if 2 * len(named) > len(side) else named)}
    return pairs


def _beside(one: VolunteerState, others: Iterable[VolunteerState]) -> tuple[set[str], set[str]]:
    """Peers with the blocks before those of `one`, and peers with the blocks behind them."""
    begin, end = one.place or (0, 0)
    before, behind = set[str](), set[str]()
    for other in others:
        first, last = other.place or (0, 0)
        if other is not one:
            before |= {other.peer} if first < begin <= last else set()
            behind |= {other.peer} if first <= end < last else set()
    return before, behind


# ── issue limits ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Allowance:
    handfuls: float = 0.0
    """Handfuls a step."""
    saved: float = 0.0
    falls_to: float = FIRST
    """Handfuls after the next fault."""


class IssueLimits:
    """Limits of one term."""

    def __init__(self) -> None:
        self.limited: dict[str, _Allowance] = {}
        """Peers that have a limit."""

    def limits(self, peers: Collection[str], ids: int) -> dict[str, int]:
        """Peer with a limit → most ids of a step of `ids` that begins with `peers`.

        Those with less than one handful share one between them. Otherwise two that have saved up for the same
        step would hold up more than its end can absorb.
        """
        found, tried = dict[str, int](), 0
        for peer, one in self.limited.items():
            if peer not in peers:
                continue
            one.saved = min(one.saved + one.handfuls, max(one.handfuls, 1.0))
            found[peer] = int(one.saved * few(ids)) if one.saved >= 1.0 else 0
            if one.handfuls < 1.0:
                found[peer] *= tried + found[peer] <= few(ids)
                tried += found[peer]
            one.saved -= found[peer] / few(ids)
        return found

    def judge(self, taken: Mapping[str, int], counted: Mapping[str, int], ids: int) -> None:
        """Adapt limits after a step of `ids`; `taken`, `counted`: peer → ids stuck there, ids it counts."""
        for peer, number in taken.items():
            if number > 2 * counted.get(peer, 0):
                self._fall(peer)
        for peer, number in counted.items():
            if number and peer in self.limited and taken.get(peer, 0) <= 2 * number:
                self._rise(peer, number, ids)

    def _fall(self, peer: str) -> None:
        one = self.limited.setdefault(peer, _Allowance())
        one.handfuls, one.saved = one.falls_to, 0.0
        one.falls_to = max(one.falls_to * DECREASE, LEAST)
        if len(self.limited) > MAX_PEERS:
            del self.limited[next(iter(self.limited))]

    def _rise(self, peer: str, counted: int, ids: int) -> None:
        one = self.limited[peer]
        one.handfuls = min(one.handfuls + INCREASE * counted / few(ids), ids / few(ids))
        one.falls_to = min(one.falls_to * FORGIVEN, FIRST)
        if one.handfuls * few(ids) >= ids and one.falls_to >= FIRST:
            del self.limited[peer]


def few(microbatches: int) -> int:
    """Undone ids that count as the last of a step of this many microbatches."""
    return max(1, int(HEDGED * microbatches))
