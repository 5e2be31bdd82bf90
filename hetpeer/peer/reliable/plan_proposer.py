"""Search for better places while the run goes on, by the reliable peer that coordinates it.

See docs/planning.md, "Replanning a running swarm". In a grouped run it divides the volunteers that wait into
clusters (docs/averaging.md, "Formation of clusters").
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
from hetpeer.dht.discovery import LinkNote, Roster
from hetpeer.peer.limits.amounts import counted
from hetpeer.peer.planning.asked_lines import Line, line_of, lines_known, settled
from hetpeer.peer.planning.cluster_formation import formation
from hetpeer.peer.planning.replan import (
    RememberedLinks,
    Seating,
    comparable,
    proposal,
    stakes,
    to_seats,
)

LOOK_S = 5.0
GATHERING_LOOK_S = 1.5
"""Seconds between looks before the first clusters are founded; who waits at two looks is divided."""
SETTLED_S = 30.0
"""Seconds without a newcomer or loss before a search, and before a block without a holder is given away."""
LONGEST_S = 120.0
"""Seconds after the first of several changes in which a search takes place, however often things change."""
AGAIN_S = 120.0
"""Seconds without another change after a change, unless a volunteer comes or leaves. They double with each
change: a gain hoped for from links that nobody had measured may not have come true.
"""
DOUBLINGS = 10
SEARCH_S = 2.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ProposalTiming:
    """Timing of the search for better places. Pure; `now` in seconds of a clock that only rises."""

    def __init__(self) -> None:
        self._seating: Seating | None = None
        self._not_before = 0.0
        self._changed_at: float | None = None
        """Time of the first change since the last search."""
        self._rested_at = 0.0
        self.since = 0
        """Step under way when the seating changed first since the last search; later ones are measured."""
        self.changes = 0
        """Proposals since the last volunteer came or went."""
        self._whole: frozenset[int] = frozenset()
        """Clusters that were complete at some time since volunteers were moved last."""
        self.lost: frozenset[int] = frozenset()
        """Complete clusters that a volunteer has left since the last proposal."""

    def proposed(self, now: float) -> None:
        """Note a proposal at `now`: the next one waits longer."""
        self.lost = frozenset()
        self._rested_at = now + AGAIN_S * 2.0 ** min(self.changes, DOUBLINGS)
        self.changes += 1

    def is_due(
        self,
        seating: Seating,
        now: float,
        done: int = 0,
        known: Callable[[int], bool] = lambda _since: True,
    ) -> bool:
        """Note the present `seating` after `done` steps. Returns whether to search for a better one now.

        A search waits until `known(since)`: enough steps after `since` were measured.
        """
        if seating != self._seating:
            self.since = done if self._changed_at is None else self.since
            before = seating if self._seating is None else self._seating
            gone = before.seats.keys() - seating.seats.keys()
            self.lost |= self._whole & {before.seats[peer][0] for peer in gone}
            if any(before.seats.get(peer, seat) != seat for peer, seat in seating.seats.items()):
                self._whole = frozenset()
            self._whole |= seating.whole
            if self._seating is None or before.seats.keys() != seating.seats.keys():
                self._rested_at, self.changes = 0.0, 0
            self._changed_at = now if self._changed_at is None else self._changed_at
            settled_at = min(now + SETTLED_S, self._changed_at + LONGEST_S)
            self._seating, self._not_before = seating, max(settled_at, self._rested_at)
        if now < self._not_before or not known(self.since):
            return False
        self._changed_at = None
        self._not_before = now + AGAIN_S
        return True


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
        self._gathered: set[str] = set()
        """Volunteers that waited at the last look, before the first clusters were founded."""
        self._seed = 0

    async def look_forever(self) -> None:
        """Look for a better plan every LOOK_S seconds, or more often while volunteers gather, until
        cancelled.
        """
        service = self._service()
        while True:
            gathers = service is not None and isinstance(service.core, GroupedRun) and service.core.gathers
            await asyncio.sleep(min(LOOK_S, GATHERING_LOOK_S) if gathers else LOOK_S)
            service = self._service()
            if service is None or service.halted.done():
                continue
            try:
                match service.core:
                    case Coordinator() as core:
                        await self._look(service, core)
                    case GroupedRun() as grouped:
                        await self._look_at_waiting(service, grouped)
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

    async def _look_at_waiting(self, service: CoordinatorService, core: GroupedRun) -> None:
        """Divide the volunteers that wait into clusters, if they can hold all blocks."""
        waiting = core.waiting
        seating = Seating(layouts=(), seats=waiting)
        if core.gathers:
            if self._gathered != waiting.keys():
                self._gathered = set(waiting)  # perhaps others are about to come
                return
        elif not waiting or not self._timing.is_due(seating, time.monotonic()):
            return
        found = await self._searched(partial(formation, self._manifest, waiting=waiting.keys()))
        if found is None or core.waiting.keys() != waiting.keys():
            return
        clusters = found.clusters
        _log.warning(
            "%s that wait form %s: %.1f batches a minute by what they advertise, with averages; a batch "
            "takes %.1f to %.1f s (imbalance %.1f s)",
            counted(len(waiting), "volunteer"),
            counted(len(clusters.batch_s), "cluster"),
            60 * clusters.batches_per_s,
            min(clusters.batch_s),
            max(clusters.batch_s),
            clusters.imbalance_s,
        )
        service.form(found.formation)

    async def _searched(self, search: Callable[..., T | None]) -> T | None:
        """Result of `search` within SEARCH_S on the current adverts."""
        adverts = self._remembered(await self._roster.read())
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
