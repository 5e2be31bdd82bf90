"""Better plans for a running swarm, from the volunteers' adverts: proposals for the coordinator. Pure.

Adverts are claims: a volunteer that lies about its speed makes the run slower, but not its results wrong; one
that lies about its memory cannot hold what it is given and leaves, and its cluster is dissolved as by any
death. An advert names only the four slowest links in use; `RememberedLinks` adds those of earlier adverts.
Clusters of a grouped run are in cluster_formation.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.moves import MovePromise, cost_factor, demand, measured_step_s
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.planned_seats import PlannedSeats
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.peer.planning.advert_lines import may_carry_more
from hetpeer.peer.planning.asked_lines import Hope, line_of
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.stages.pipeline.place_memory import choose
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner, PlanChange
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.stakes import Stakes

HORIZON = 200
"""Steps within which a change must pay."""


class RememberedLinks:
    """The last note of every line between peers that are still there."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], LinkNote] = {}
        """(sender, the end of the receiver's id) → what it carries."""

    def add(self, sender: str, note: LinkNote) -> None:
        """Remember a line that was measured when it was asked for."""
        self._notes[sender, note.to] = note

    def __call__(self, adverts: Mapping[str, Advert]) -> dict[str, Advert]:
        """`adverts` by peer id, each with all lines that it has named.

        A line that was measured is not known any less because short bundles went over it since.
        """
        ends = {peer[-8:] for peer in adverts}
        known = dict(self._notes)
        for peer, advert in adverts.items():
            for note in advert.links:
                if note.rate and not _says_less(note, known.get((peer, note.to))):
                    known[peer, note.to] = note
        self._notes = {pair: note for pair, note in known.items() if pair[0] in adverts and pair[1] in ends}
        own: dict[str, list[LinkNote]] = {peer: [] for peer in adverts}
        for (sender, _), note in self._notes.items():
            own[sender].append(note)
        return {
            peer: advert.model_copy(update={"links": tuple(own[peer])}) for peer, advert in adverts.items()
        }


def _says_less(note: LinkNote, old: LinkNote | None) -> bool:
    """Whether `note` is of bundles too short to show the line, and `old` is not."""
    if old is None or may_carry_more(old):
        return False
    return may_carry_more(note) and note.rate <= old.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Places of all volunteers: `layouts` of the clusters in use, `seats` peer → its cluster and blocks.

    `backups` are those of them that take part in no step.
    """

    layouts: tuple[tuple[Range, ...], ...]
    seats: Mapping[str, tuple[int, Range]]
    backups: frozenset[str] = frozenset()

    @classmethod
    def of(cls, members: Membership, *, only_worked: bool = True) -> Seating:
        """The present places, as the coordinator has them, of volunteers that have worked at their place.

        Anybody can claim a place and leave again; `only_worked` False: such volunteers count as well.
        """
        seats = {
            v.peer: (v.cluster, v.place)
            for v in members.volunteers.values()
            if v.place is not None and (v.worked or not only_worked)
        }
        clusters = max((cluster for cluster, _ in seats.values()), default=-1) + 1
        layouts = tuple(members.layout(cluster) for cluster in range(clusters))
        return cls(layouts=layouts, seats=seats, backups=members.backups & seats.keys())

    @property
    def working(self) -> dict[str, tuple[int, Range]]:
        """Seats of those that take part in steps."""
        return {peer: seat for peer, seat in self.seats.items() if peer not in self.backups}

    def holds_all(self, blocks: int) -> bool:
        """Whether each of `blocks` blocks has a holder."""
        return {block for _, place in self.working.values() for block in range(*place)} >= set(range(blocks))

    @property
    def whole(self) -> set[int]:
        """Clusters at all of whose places somebody works."""
        taken = set(self.working.values())
        return {
            cluster
            for cluster, layout in enumerate(self.layouts)
            if all((cluster, place) in taken for place in layout)
        }


def comparable(history: History, since: int) -> bool:
    """Whether a gain can be judged: the last move has settled, and steps after `since` were measured."""
    settled = not history.moves or history.moves[-1].result is not None
    return settled and measured_step_s(history, since) is not None


def stakes(history: History, steps: int, since: int) -> Stakes:
    """The stakes of a move in a run of `steps` steps, by its log: as measured, and as promises were kept.

    `since`: the step under way when the swarm changed last.
    """
    left = max(steps - history.version - 1, 0)  # the step under way is not shortened
    return Stakes(
        steps=min(left, HORIZON),
        measured_s=measured_step_s(history, since),
        costs=cost_factor(history.moves),
        demand=demand(history.moves, history.version),
    )


def proposal(
    manifest: Manifest,
    adverts: Mapping[str, Advert],
    seating: Seating,
    stakes: Stakes,
    *,
    seed: int,
    on: Callable[[], bool],
    hope: Hope | None = None,
    lost: Collection[int] | None = None,
    leaves: Mapping[str, float] = MappingProxyType({}),
) -> Arrangement | None:
    """The best arrangement found while `on` is true, with its promise; None if the present division is better
    or a volunteer's speed is unknown.

    `lost`: clusters that were complete before a volunteer was lost (None: all). Lines that nobody measured
    carry what is estimated, and more by its error as far as there is `hope`, since they are measured before
    the move; without any they carry less by it. `leaves`: peer → expected departures an hour, as far as known
    (log/departure_counts.py).
    """
    if not seating.seats:
        return None
    try:
        found = inventory(
            manifest, {peer: adverts[peer] for peer in seating.seats if peer in adverts}, leaves
        )
        named = devices_in(found.document(), "what the volunteers say")
    except LocalError:
        return None
    peers = found.peers
    if set(peers) != set(seating.seats):
        return None
    devices = as_measured(named.devices)
    carries = devices.bandwidth * _hoped(peers, found.doubt, hope)
    devices = replace(devices, bandwidth=carries)
    work = named.of(of_manifest(manifest, manifest.training.microbatches))
    held = [(0, 0) if peer in seating.backups else seating.seats[peer][1] for peer in peers]
    lines = _lines(seating, peers)
    living = IncrementalPlanner(
        devices,
        work,
        held,
        lines,
        stakes,
        seed=seed,
        measured=found.measured,
        lost=lost,
    )
    change = living.run(on)
    if change is None:
        return None
    arrangement = _arrangement(change, peers, seating, manifest.layouts, work, devices)
    return replace(arrangement, promise=_promise(stakes, living.before_s, change))


def _hoped(peers: Sequence[str], doubt: NDArray[np.float64], hope: Hope | None) -> NDArray[np.float64]:
    """Factors of the estimated rates between `peers`; `doubt`: 1 + error."""
    if hope is None:
        return 1.0 / doubt
    asked = [[line_of(a, b) not in hope.in_vain for b in peers] for a in peers]
    return np.where(asked, 1.0 + hope.errors * (doubt - 1.0), 1.0 / doubt)


def _promise(stakes: Stakes, before_s: float, change: PlanChange) -> MovePromise:
    """The promise of `change` to a swarm whose step takes `before_s` by the model."""
    runs, after_s = math.isfinite(before_s), change.plan.total_s
    present_s = stakes.present_s(before_s)
    return MovePromise(
        before_s=present_s if runs else None,
        after_s=present_s - stakes.gain_s(before_s, after_s) if runs else after_s,
        moving_s=change.moving_s,
        costs=stakes.costs,
        blocks=change.moved,
    )


def as_measured(devices: Devices) -> Devices:
    """The devices without time between GPU, main memory and disk, which measured speeds contain."""
    free = tuple(replace(beside, pcie=math.inf, disk_rate=math.inf) for beside in devices.beside)
    return replace(devices, beside=free)


def _lines(seating: Seating, peers: Sequence[str]) -> list[list[tuple[int | None, Range]]]:
    """The peers that work at each place of each cluster; no places if there are none."""
    working = seating.working
    taken = {working[peer]: number for number, peer in enumerate(peers) if peer in working}
    used = {cluster for cluster, _ in taken}
    return [
        [(taken.get((cluster, place)), place) for place in layout] if cluster in used else []
        for cluster, layout in enumerate(seating.layouts)
    ]


def _arrangement(
    change: PlanChange,
    peers: Sequence[str],
    seating: Seating,
    usual: Sequence[Sequence[Range]],
    work: StepDemand,
    devices: Devices,
) -> Arrangement:
    """The plan's pipelines, followed by clusters of the usual cut for volunteers that the plan leaves out.

    Those become backups. They stay where they are, or go where they have least to fetch. For one that no
    place fits, a copy of its present cluster is added.
    """
    layouts: list[tuple[Range, ...]] = []
    seats: dict[str, tuple[int, Range]] = {}
    for pipeline in change.plan.pipelines:
        layout = tuple(pairwise(pipeline.cuts))
        seats |= {peers[d]: (len(layouts), place) for d, place in zip(pipeline.devices, layout, strict=True)}
        layouts.append(layout)
    begun, working = len(layouts), frozenset(seats)
    for device, peer in enumerate(peers):
        if peer in seats:
            continue
        taken = set(seats.values())
        free = [
            (c, place) for c in range(begun, len(layouts)) for place in layouts[c] if (c, place) not in taken
        ]
        if not free:
            layouts.append(tuple((begin, end) for begin, end in usual[len(layouts) % len(usual)]))
            free = [(len(layouts) - 1, place) for place in layouts[-1]]
        cluster, held = seating.seats[peer]
        offered = devices.offered(device)
        fitting = [seat for seat in free if seat[1] == held or choose(work.place(*seat[1]), offered).fits]
        if not fitting:
            layouts.append(seating.layouts[cluster])
            fitting = [(len(layouts) - 1, held)]
        new = {seat: len(set(range(*seat[1])).difference(range(*held))) for seat in fitting}
        seats[peer] = min((blocks, seat[0] != cluster, seat) for seat, blocks in new.items())[2]
    return Arrangement(layouts, seats, backups=frozenset(seats) - working)


def to_seats(seats: PlannedSeats, members: Membership) -> Arrangement | None:
    """Move volunteers to their seats in the plan that is in force, and make those without one backups.

    None if all is so already, or cannot be so now. Nobody becomes a backup before those that have a seat hold
    all blocks.
    """
    if seats.plan is None:
        return None
    moves, present = seats.moves(), Seating.of(members)
    taken = {**present.seats, **moves}
    spared = frozenset(peer for peer in taken if members.volunteers[peer].planned is None)
    if members.uncovered({peer: place for peer, (_, place) in taken.items() if peer not in spared}):
        spared = present.backups & spared
    if not moves and spared == present.backups:
        return None
    clusters = range(max(cluster for cluster, _ in taken.values()) + 1)
    layouts = [members.layout(cluster) for cluster in clusters]
    found = Arrangement(layouts, taken, backups=spared, plan=seats.plan.id)
    return found if found.fault(members.blocks) is None else replace(found, backups=frozenset())
