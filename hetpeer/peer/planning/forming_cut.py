"""A cut for waiting volunteers for those who wait in a forming cluster of a grouped run: fewer stages where
machines have the memory, balanced by speed, lines and memory. Pure.

Adverts are claims: who lies about its memory cannot hold what it is given and leaves, and its cluster is
dissolved as by any death.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

from hetpeer.bootstrap.grouped.cluster_cut import ClusterCut
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.discovery import Advert
from hetpeer.peer.planning.device_files import devices_in
from hetpeer.peer.planning.swarm_inventory import inventory
from hetpeer.stages.planning.swarms.plan_search import PlanSearch


def cutting(
    manifest: Manifest,
    adverts: Mapping[str, Advert],
    cluster: int,
    waiting: Collection[str],
    *,
    seed: int,
    on: Callable[[], bool],
) -> ClusterCut | None:
    """The fastest pipeline of the best plan found for the `waiting` volunteers while `on` is true.

    Volunteers outside it may be in the next forming cluster. None if they cannot hold the model together, or
    if one has not advertised its speed yet.
    """
    try:
        found = inventory(manifest, {peer: adverts[peer] for peer in waiting if peer in adverts})
        devices = devices_in(found.document(), "what the volunteers say").devices
    except LocalError:
        return None
    peers = found.peers
    if set(peers) != set(waiting):
        return None
    work = of_manifest(manifest, manifest.training.microbatches)
    plan = PlanSearch(devices, work, seed).run(on)
    if plan is None:
        return None
    best = min(plan.best.pipelines, key=lambda pipeline: pipeline.seconds(work.microbatches))
    seats = [(peers[d], place) for d, place in zip(best.devices, pairwise(best.cuts), strict=True)]
    return ClusterCut(
        cluster=cluster, seats=seats, spared=frozenset(waiting).difference(peer for peer, _ in seats)
    )
