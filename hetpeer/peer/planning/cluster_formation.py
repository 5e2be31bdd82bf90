"""Clusters for the volunteers of a grouped run, from what they advertise. Pure.

Memory, speed, uplink, latency and links are those of adverts (swarm_inventory.py). `formation` divides those
that wait, `recut` some living clusters as well. A cluster has fewer stages where machines have the memory;
see stages/planning/swarms/{clusters,cluster_recuts}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.grouped.recut import Recut
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import Advert
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.replan import as_measured
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.stages.planning.swarms.cluster_recuts import ClusterRecut
from hetpeer.stages.planning.swarms.cluster_recuts import recut as divided_anew
from hetpeer.stages.planning.swarms.clusters import Clusters, divided
from hetpeer.stages.planning.swarms.pipeline_cuts import PlannedPipeline
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand

GAIN = 1.1
"""Least batches a second after a division of living clusters, over those before it."""
PAUSE_S = 60.0
"""Seconds in which retiring clusters train nothing, besides the fetch of their new blocks."""


@dataclass(frozen=True, slots=True)
class FoundFormation:
    """A formation, and the model's figures for it."""

    formation: Formation
    clusters: Clusters


@dataclass(frozen=True, slots=True)
class FoundRecut:
    """A new division of living clusters, and the model's figures before and after it."""

    recut: Recut
    found: ClusterRecut


@dataclass(frozen=True, slots=True)
class _Advertised:
    """Volunteers, as devices of the planner."""

    peers: tuple[str, ...]
    devices: Devices
    work: StepDemand

    def formation(self, lines: Iterable[PlannedPipeline], among: Iterable[str]) -> Formation:
        """Clusters of these lines; those `among` that are in none are spared."""
        clusters = [
            [(self.peers[d], place) for d, place in zip(one.devices, pairwise(one.cuts), strict=True)]
            for one in lines
        ]
        seated = {peer for seats in clusters for peer, _ in seats}
        return Formation(clusters=clusters, spared=frozenset(among) - seated)

    def pays(self, found: ClusterRecut, left: int) -> bool:
        """Whether `left` batches take less time after a new division, with the move to it."""
        fetches = [
            self.work.state[begin:end].sum() / self.devices.uplink[device]
            for one in found.new
            for device, (begin, end) in zip(one.devices, pairwise(one.cuts), strict=True)
        ]
        before, after = found.before.batches_per_s, found.after.batches_per_s
        return bool(left / before - left / after > PAUSE_S + max(fetches, default=0.0))


def _advertised(
    manifest: Manifest, adverts: Mapping[str, Advert], peers: Collection[str]
) -> _Advertised | None:
    """The volunteers `peers`; None if one has not advertised its speed yet."""
    try:
        asked = {peer: adverts[peer] for peer in peers if peer in adverts}
        found = inventory(manifest, asked, beside=adverts)
        named = devices_in(found.document(), "what the volunteers say")
    except LocalError:
        return None
    if set(found.peers) != set(peers):
        return None
    work = named.of(of_manifest(manifest, manifest.training.microbatches))
    return _Advertised(found.peers, as_measured(named.devices), work)


def formation(
    manifest: Manifest,
    adverts: Mapping[str, Advert],
    waiting: Collection[str],
    *,
    seed: int,
    on: Callable[[], bool],
) -> FoundFormation | None:
    """The best clusters found for the `waiting` volunteers while `on` is true.

    None if they cannot hold the model together, or if one has not advertised its speed yet. Raises ValueError
    for a run that is not of mode `grouped`.
    """
    known = _advertised(manifest, adverts, waiting)
    clusters = None if known is None else divided(known.devices, known.work, seed, on)
    if known is None or clusters is None:
        return None
    return FoundFormation(known.formation(clusters.plan.pipelines, waiting), clusters)


def recut(
    manifest: Manifest,
    adverts: Mapping[str, Advert],
    standing: Mapping[int, Mapping[str, Range]],
    waiting: Collection[str],
    *,
    left: int,
    seed: int,
    on: Callable[[], bool],
) -> FoundRecut | None:
    """The best new division found of some clusters while `on` is true, if it pays in the `left` batches.

    `standing`: living cluster → its volunteers and their blocks; those with replicas are left as they are.
    None if nothing is worth it, or if a volunteer has not advertised its speed yet. Raises ValueError as
    `formation`.
    """
    lines = {
        number: sorted(places.items(), key=lambda one: one[1])
        for number, places in sorted(standing.items())
        if len(set(places.values())) == len(places)
    }
    peers = [*waiting, *(peer for line in lines.values() for peer, _ in line)]
    known = _advertised(manifest, adverts, peers) if len(lines) > 1 else None
    if known is None:
        return None
    places = [
        ([known.peers.index(peer) for peer, _ in line], [0, *(end for _, (_, end) in line)])
        for line in lines.values()
    ]
    found = divided_anew(known.devices, known.work, places, seed, on)
    if found is None or found.gain < GAIN or not known.pays(found, left):
        return None
    numbers = list(lines)
    retiring = frozenset(numbers[at] for at in found.retiring)
    among = {*waiting, *(peer for number in retiring for peer, _ in lines[number])}
    return FoundRecut(Recut(retiring=retiring, formation=known.formation(found.new, among)), found)
