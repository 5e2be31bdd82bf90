"""Another division of the blocks for a swarm that works: from what its volunteers say of themselves to a proposal for the coordinator. Pure.

Adverts are claims: who lies about its speed gets other blocks than it should, and the run gets slower. What counts is not touched by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.bootstrap.state.core_config import IN_FLIGHT
from hetpeer.bootstrap.state.membership import Membership, Range
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.kademlia.adverts import Advert
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.stages.planning.swarms.incremental_plan import IncrementalPlanner, PlanChange
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand

HORIZON = 200
"""A change must pay within so many steps."""
DOUBT = 4.0
"""After each change that did not settle things, lines that nobody has measured are taken to be so many times slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Who is where: `layouts` of the clusters that somebody is in, `seats` peer → its cluster and blocks."""

    layouts: tuple[tuple[Range, ...], ...]
    seats: Mapping[str, tuple[int, Range]]

    @classmethod
    def of(cls, members: Membership) -> Seating:
        """As the coordinator has it now."""
        seats = {v.peer: (v.cluster, v.place) for v in members.volunteers.values() if v.place is not None}
        clusters = max((cluster for cluster, _ in seats.values()), default=-1) + 1
        return cls(layouts=tuple(members.layout(cluster) for cluster in range(clusters)), seats=seats)

    @property
    def whole(self) -> set[int]:
        """Clusters all of whose places somebody has."""
        taken = set(self.seats.values())
        return {
            cluster
            for cluster, layout in enumerate(self.layouts)
            if all((cluster, place) in taken for place in layout)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What to do, and why: seconds of a step as predicted before (infinite: nothing can run) and after, and of moving."""

    arrangement: Arrangement
    before_s: float
    after_s: float
    moving_s: float
    moved: int


def proposal(
    manifest: Manifest,
    adverts: Mapping[str, Advert],
    seating: Seating,
    *,
    steps_left: int,
    seed: int,
    on: Callable[[], bool],
    disappointed: int = 0,
    lost: Collection[int] | None = None,
) -> Proposal | None:
    """What is found while `on` is true; None if things had better stay as they are, or if somebody has not said yet what it can do. `lost`: the clusters that were whole before somebody has gone (None: all).

    Lines that nobody has measured are taken to be as fast as their ends, else nothing better would ever be found; after so many changes that followed from it, less and less.
    """
    if not seating.seats:
        return None
    try:
        found = inventory(manifest, {peer: adverts[peer] for peer in seating.seats if peer in adverts})
        named = devices_in(found.document(), "what the volunteers say")
    except LocalError:
        return None
    peers = found.peers
    if set(peers) != set(seating.seats):
        return None
    devices = named.devices
    guessed = devices.bandwidth / DOUBT**disappointed
    devices = replace(devices, bandwidth=np.where(found.measured, devices.bandwidth, guessed))
    work = named.of(of_manifest(manifest, manifest.training.microbatches))
    held = [seating.seats[peer][1] for peer in peers]
    lines = _lines(seating, peers)
    living = IncrementalPlanner(
        devices,
        work,
        held,
        lines,
        steps=min(steps_left, HORIZON),
        seed=seed,
        measured=found.measured,
        lost=lost,
    )
    change = living.run(on)
    if change is None:
        return None
    arrangement = _arrangement(change, peers, seating, manifest.layouts, work, devices)
    change = living.seated(change, [arrangement.seats[peer][1] for peer in peers])
    if not living.pays(change):
        return None
    return Proposal(
        arrangement=arrangement,
        before_s=living.before_s,
        after_s=change.plan.total_s,
        moving_s=change.moving_s,
        moved=change.moved,
    )


def _lines(seating: Seating, peers: Sequence[str]) -> list[list[tuple[int | None, Range]]]:
    """Who has each place of each cluster."""
    taken = {seat: number for number, peer in enumerate(peers) for seat in [seating.seats[peer]]}
    return [
        [(taken.get((cluster, place)), place) for place in layout]
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
    """The plan's pipelines, and behind them clusters of the usual cut for those whom it spares: they help where they are, or where they have least to fetch. For whom no place
    there is small enough there is one more like the cluster that it is in.
    """
    layouts: list[tuple[Range, ...]] = []
    seats: dict[str, tuple[int, Range]] = {}
    for pipeline in change.plan.pipelines:
        layout = tuple(pairwise(pipeline.cuts))
        seats |= {peers[d]: (len(layouts), place) for d, place in zip(pipeline.devices, layout, strict=True)}
        layouts.append(layout)
    begun = len(layouts)
    needed = work.memory + IN_FLIGHT * work.kept  # as places are offered to newcomers
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
        room = devices.memory[device]
        fitting = [seat for seat in free if seat[1] == held or needed[slice(*seat[1])].sum() <= room]
        if not fitting:
            layouts.append(seating.layouts[cluster])
            fitting = [(len(layouts) - 1, held)]
        new = {seat: len(set(range(*seat[1])).difference(range(*held))) for seat in fitting}
        seats[peer] = min((blocks, seat[0] != cluster, seat) for seat, blocks in new.items())[2]
    return Arrangement(layouts, seats)
