"""Lines on what is not as planned, for the person who gave a plan.

Docs: planning.md, "A plan that is enacted".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.service.driver import CoordinatorService

LOOK_S = 2.0

_log = logging.getLogger(__name__)


class PlanWatch:
    """Tells each remark on the plan once, while `service` coordinates; again if it was false in between."""

    def __init__(self, service: Callable[[], CoordinatorService | None]) -> None:
        self._service = service
        self._told: frozenset[str] = frozenset()

    def news(self, remarks: Iterable[str]) -> list[str]:
        """Those of `remarks` that were not true at the last call."""
        found = list(dict.fromkeys(remarks))
        new = [remark for remark in found if remark not in self._told]
        self._told = frozenset(found)
        return new

    async def watch_forever(self) -> None:
        """Log what is not as planned, every LOOK_S seconds until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            service = self._service()
            if service is None or service.halted.done() or not isinstance(service.core, Coordinator):
                continue
            for line in self.news(service.core.seats.remarks(time.monotonic())):
                _log.warning("%s", line)
