"""A reliable peer looks for a better division of the blocks while the run that it coordinates goes on (docs/planning.md, "A plan that lives")."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from hetpeer.bootstrap.coordinator import Coordinator
from hetpeer.bootstrap.manifest import Manifest
from hetpeer.bootstrap.service import CoordinatorService
from hetpeer.dht.errors import RemoteError
from hetpeer.dht.roster import Roster
from hetpeer.peer.planning.replanning import Proposal, Seating, proposal

LOOK_S = 5.0
SETTLED_S = 30.0
"""Nobody has come or gone for so long: it may be worth it. A block that nobody holds for so long: nobody else comes."""
AGAIN_S = 120.0
"""After a change nothing is changed for so long, unless somebody comes or goes."""
SEARCH_S = 2.0

_log = logging.getLogger(__name__)


class Calm:
    """Whether it is time to look for another division. Pure; `now` in seconds of a clock that only rises."""

    def __init__(self) -> None:
        self._seating: Seating | None = None
        self._not_before = 0.0
        self._changed_at = -AGAIN_S

    def changed(self, now: float) -> None:
        """We have proposed something."""
        self._changed_at = now

    def __call__(self, seating: Seating, now: float) -> bool:
        """`seating`: who is where now."""
        if seating != self._seating:
            moved = self._seating is not None and self._seating.seats.keys() == seating.seats.keys()
            rested = self._changed_at + AGAIN_S if moved else 0.0
            self._seating, self._not_before = seating, max(now + SETTLED_S, rested)
        if now < self._not_before:
            return False
        self._not_before = now + AGAIN_S
        return True


class Proposing:
    """Looks at the run that `service` coordinates (None: another peer does), whose volunteers `roster` shows."""

    def __init__(
        self, manifest: Manifest, roster: Roster, service: Callable[[], CoordinatorService | None]
    ) -> None:
        self._manifest = manifest
        self._roster = roster
        self._service = service
        self._calm = Calm()
        self._seed = 0

    async def look_forever(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            service = self._service()
            if service is None or service.halted.done() or not isinstance(service.core, Coordinator):
                continue
            try:
                await self._look(service, service.core)
            except RemoteError as error:
                _log.debug("what the volunteers say could not be read: %s", error)
            except ValueError as error:
                _log.warning("a division of the blocks that is none was found: %s", error)

    async def _look(self, service: CoordinatorService, core: Coordinator) -> None:
        seating = Seating.of(core.members)
        if not self._calm(seating, time.monotonic()):
            return
        adverts = await self._roster.read()
        self._seed += 1
        until = time.monotonic() + SEARCH_S
        search = partial(
            proposal,
            self._manifest,
            adverts,
            seating,
            steps_left=max(1, self._manifest.training.steps - core.done),
            seed=self._seed,
            on=lambda: time.monotonic() < until,
        )
        found = await asyncio.to_thread(search)
        if found is not None:
            self._say(found)
            self._calm.changed(time.monotonic())
            service.arrange(found.arrangement)

    def _say(self, found: Proposal) -> None:
        _log.warning(
            "%d blocks are given to others (%.0f s): a step is to take %.1f s%s",
            found.moved,
            found.moving_s,
            found.after_s,
            f" instead of {found.before_s:.1f}" if found.before_s < float("inf") else "",
        )
