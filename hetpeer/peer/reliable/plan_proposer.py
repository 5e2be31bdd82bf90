"""Search for better places while the run goes on, by the reliable peer that coordinates it.

See docs/planning.md, "Replanning a running swarm". In a grouped run volunteers are divided into clusters
(cluster_proposer.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.log.departure_counts import hourly
from hetpeer.bootstrap.log.moves import MovePromise
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import Advert, LinkNote, Roster
from hetpeer.peer.limits.amounts import counted
from hetpeer.peer.planning.asked_lines import Line, line_of, lines_known, settled
from hetpeer.peer.planning.replan import (
    RememberedLinks,
    Seating,
    comparable,
    proposal,
    stakes,
    to_seats,
)
from hetpeer.peer.reliable.cluster_proposer import ClusterProposer
from hetpeer.peer.reliable.proposal_timing import ProposalTiming

LOOK_S = 5.0
GATHERING_LOOK_S = 1.5
"""Seconds between looks before the first clusters are founded; who waits at two looks is divided."""
SEARCH_S = 2.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class PlanProposer:
    """Proposes divisions of the run that `service` coordinates, if not None, from adverts in `roster`."""

    def __init__(
        self,
        manifest: Manifest,
        roster: Roster,
        service: Callable[[], CoordinatorService | None],
        measure: Callable[[Collection[Line]], Awaitable[Mapping[tuple[str, str], LinkNote]]],
    ) -> None:
        """`measure` has volunteers measure lines: (sender, receiver) → what it carries, as far as known."""
        self._manifest = manifest
        self._measure = measure
        self._roster = roster
        self._service = service
        self._timing = ProposalTiming()
        self._remembered = RememberedLinks()
        self._known: set[Line] = set()
        """Lines that are measured, at the last look at the adverts."""
        self._in_vain: set[Line] = set()
        """Lines that could not be measured since a volunteer came or went."""
        self._clusters = ClusterProposer(manifest, self._searched, self._read)
        self._seed = 0

    async def look_forever(self) -> None:
        """Look for a better plan every LOOK_S seconds, or more often while volunteers gather, until
        cancelled.
        """
        service = self._service()
        while True:
            gathers = (
                service is not None and isinstance(service.core, GroupedRun) and service.core.awaits_first
            )
            await asyncio.sleep(min(LOOK_S, GATHERING_LOOK_S) if gathers else LOOK_S)
            service = self._service()
            if service is None or service.halted.done():
                continue
            try:
                match service.core:
                    case Coordinator() as core:
                        await self._look(service, core)
                    case GroupedRun() as grouped:
                        await self._clusters.look(service, grouped)
            except RemoteError as error:
                _log.debug("the volunteers' adverts could not be read: %s", error)
            except ValueError as error:
                _log.warning("the planner found an invalid division of the blocks: %s", error)
            except Exception:  # noqa: BLE001 - the run goes on, and the next look may find a better division
                _log.exception("the planner failed; the run goes on as it is")

    async def _look(self, service: CoordinatorService, core: Coordinator) -> None:
        """Look for better places for the whole run; have the coordinator arrange them if any are found.

        A plan that was given is kept as long as it holds; volunteers are moved only to their places in it.
        """
        if not core.may_arrange:
            return
        seating, history, timing = Seating.of(core.members), core.history, self._timing
        if core.seats.holds(time.monotonic()):
            if timing.is_due(seating, time.monotonic(), core.done) and (
                seated := to_seats(core.seats, core.members)
            ):
                _log.warning("volunteers take their places in the plan; those without one become backups")
                service.arrange(seated)
            return
        runs = seating.holds_all(len(self._manifest.blocks))
        if not timing.is_due(
            seating, time.monotonic(), core.done, lambda since: not runs or comparable(history, since)
        ):
            return
        search = partial(
            proposal,
            self._manifest,
            seating=seating,
            stakes=stakes(history, self._manifest.training.steps, timing.since),
            lost=timing.lost,
            leaves=hourly(history),
        )
        if not timing.changes:
            self._in_vain.clear()
        found = await settled(
            lambda hope: self._searched(partial(search, hope=hope)),
            lambda: self._known,
            self._ask,
            self._in_vain,
        )
        if found is not None and core.may_arrange and Seating.of(core.members) == seating:
            assert found.promise is not None
            self._say(found.promise)
            timing.proposed(time.monotonic())
            service.arrange(found)

    async def _ask(self, lines: Collection[Line]) -> Collection[Line]:
        """Have `lines` measured, and remember what they carry; returns those that are known then."""
        found = await self._measure(lines)
        for (sender, _), note in found.items():
            self._remembered.add(sender, note)
        return {line_of(*pair) for pair in found}

    async def _read(self) -> Mapping[str, Advert]:
        return await self._roster.read()

    async def _searched(self, search: Callable[..., T | None]) -> T | None:
        """Result of `search` within SEARCH_S on the current adverts."""
        adverts = self._remembered(await self._read())
        self._known = lines_known(adverts)
        self._seed += 1
        until = time.monotonic() + SEARCH_S
        return await asyncio.to_thread(search, adverts, seed=self._seed, on=lambda: time.monotonic() < until)

    def _say(self, promise: MovePromise) -> None:
        what = (
            f"{counted(promise.blocks, 'block')} move to other volunteers"
            if promise.blocks
            else "pipelines are formed anew"
        )
        before = "" if promise.before_s is None else f" instead of {promise.before_s:.1f} s"
        if promise.before_s is not None and not promise.shortens:
            before += ", with steadier holders"
        _log.warning(
            "%s, which takes %.0f s: a step will take about %.1f s%s",
            what,
            promise.moving_s,
            promise.after_s,
            before,
        )
