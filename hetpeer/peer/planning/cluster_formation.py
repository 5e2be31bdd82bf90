"""Clusters for the volunteers that wait in a grouped run, from what they advertise. Pure.

Memory, speed, uplink, latency and links are those of adverts (swarm_inventory.py). A cluster has fewer stages
where machines have the memory; see stages/planning/swarms/clusters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import Advert
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.replan import as_measured
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.stages.planning.swarms.clusters import Clusters, divided


@dataclass(frozen=True, slots=True)
class FoundFormation:
    """A formation, and the model's figures for it."""

    formation: Formation
    clusters: Clusters


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
    try:
        found = inventory(manifest, {peer: adverts[peer] for peer in waiting if peer in adverts})
        named = devices_in(found.document(), "what the volunteers say")
    except LocalError:
        return None
    peers = found.peers
    if set(peers) != set(waiting):
        return None
    work = named.of(of_manifest(manifest, manifest.training.microbatches))
    clusters = divided(as_measured(named.devices), work, seed, on)
    if clusters is None:
        return None
    seats = [
        [(peers[d], place) for d, place in zip(one.devices, pairwise(one.cuts), strict=True)]
        for one in clusters.plan.pipelines
    ]
    spared = frozenset(peers[device] for device in clusters.spare)
    return FoundFormation(Formation(clusters=seats, spared=spared), clusters)
