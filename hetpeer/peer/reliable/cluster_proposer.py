"""Search for better clusters of a grouped run, by the reliable peer that coordinates it.

Volunteers that wait are divided into clusters, and living clusters anew if that pays (docs/grouped.md,
"Formation of clusters" and "Living clusters").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Protocol, TypeVar

from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.discovery import CHECKING, Advert
from hetpeer.peer.limits.amounts import counted
from hetpeer.peer.planning.cluster_formation import FoundFormation, FoundRecut, formation, recut
from hetpeer.peer.planning.replan import Seating
from hetpeer.peer.reliable.proposal_timing import ProposalTiming
from hetpeer.stages.planning.swarms.clusters import Clusters

_log = logging.getLogger(__name__)

T = TypeVar("T")

ARRIVES_S = 10.0
"""Seconds from the last advert of a volunteer that is being checked until it has a place, at most."""


class Search(Protocol):
    """Runs a search on the current adverts, within the time that searches have."""

    def __call__(self, search: Callable[..., T | None], /) -> Awaitable[T | None]: ...


class ClusterProposer:
    """Proposes clusters from what volunteers advertise, and says who is on the way."""

    def __init__(
        self,
        manifest: Manifest,
        searched: Search,
        adverts: Callable[[], Awaitable[Mapping[str, Advert]]],
    ) -> None:
        """`adverts` reads all present adverts; it may raise `RemoteError`."""
        self._manifest = manifest
        self._searched = searched
        self._adverts = adverts
        self._timing = ProposalTiming()
        self._checking: dict[str, float] = {}
        """Volunteer without a place → when its advert last said that it is being checked."""
        self._gathered: set[str] = set()
        """Volunteers that waited at the last look, before the first clusters were founded."""

    async def look(self, service: CoordinatorService, core: GroupedRun) -> None:
        """Divide the volunteers that wait, or living clusters, if that is due.

        Raises ValueError if the planner finds what does not fit the model.
        """
        if core.awaits_first:
            service.expect(self._on_the_way(await self._adverts(), time.monotonic()))
        if core.gathers:
            if self._gathered == core.waiting.keys():
                await self._form(service, core)
            self._gathered = {*core.waiting}  # others may be about to come
            return
        standing = core.standing
        seats = core.waiting | {
            peer: (number, place) for number, places in standing.items() for peer, place in places.items()
        }
        if not seats or not self._timing.is_due(Seating(layouts=(), seats=seats), time.monotonic()):
            return
        if not (core.waiting and await self._form(service, core)):
            await self._recut(service, core)

    def _on_the_way(self, adverts: Mapping[str, Advert], now: float) -> Collection[str]:
        """Volunteers that are being checked, or were until a few seconds ago."""
        checking = (p for p, one in adverts.items() if one.role == "volunteer" and one.state == CHECKING)
        self._checking |= dict.fromkeys(checking, now)
        self._checking = {p: since for p, since in self._checking.items() if now - since < ARRIVES_S}
        return self._checking.keys()

    async def _form(self, service: CoordinatorService, core: GroupedRun) -> bool:
        """Divide those that wait into clusters. Returns whether they can hold the model."""
        waiting = core.waiting
        found: FoundFormation | None = await self._searched(
            partial(formation, self._manifest, waiting=waiting.keys())
        )
        if found is None or core.waiting.keys() != waiting.keys():
            return False
        _log.warning("%s that wait form %s", counted(len(waiting), "volunteer"), _described(found.clusters))
        service.form(found.formation)
        return True

    async def _recut(self, service: CoordinatorService, core: GroupedRun) -> None:
        """Have some clusters divided anew, if that pays."""
        standing, waiting = core.standing, core.waiting
        search = partial(
            recut,
            self._manifest,
            standing=standing,
            waiting=waiting.keys(),
            left=self._manifest.training.steps - core.done,
        )
        found: FoundRecut | None = await self._searched(search)
        if found is None or core.standing != standing or core.waiting.keys() != waiting.keys():
            return
        proposal, plan = found.recut, found.found
        _log.warning(
            "%s and %s that wait form %s at their next averaging: in all %s, %.1f before",
            counted(len(proposal.retiring), "cluster"),
            counted(len(waiting), "volunteer"),
            counted(len(proposal.formation.clusters), "other cluster"),
            _described(plan.after),
            60 * plan.before.batches_per_s,
        )
        self._timing.proposed(time.monotonic())
        service.recut(proposal)


def _described(clusters: Clusters) -> str:
    """`3 clusters: 41.2 batches a minute by what they advertise …`."""
    return (
        f"{counted(len(clusters.batch_s), 'cluster')}: {60 * clusters.batches_per_s:.1f} batches a minute by "
        f"what they advertise, with averages; a batch takes {min(clusters.batch_s):.1f} to "
        f"{max(clusters.batch_s):.1f} s (imbalance {clusters.imbalance_s:.1f} s)"
    )
