"""Stand-in: a reliable peer's own volunteer for blocks that no other volunteer holds (leftovers of HPS, 3.2).

It is an ordinary `hetpeer join` with its own process and identity: it takes the open place, fetches the
state, computes the leftovers, and leaves when others hold all blocks again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from pathlib import Path

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.process.hetpeer_children import Child, end_all
from hetpeer.peer.process.home import Home

LOOK_S = 1.0
NEEDED_S = 15.0
"""Seconds without a holder of a block before the stand-in starts."""
ENOUGH_S = 60.0
"""Seconds with all blocks held by others before the stand-in leaves."""
AGAIN_S = 120.0
"""Seconds until it is started again after an error."""

_log = logging.getLogger(__name__)


class StandInOrder(enum.Enum):
    """Order for the stand-in's process."""

    START = "start"
    END = "end"


class Need:
    """Whether a stand-in is needed. Pure; `now` in seconds of a clock that only rises."""

    def __init__(self) -> None:
        self._since: float | None = None
        """Time since which the stand-in is wanted but not running, or running but not wanted."""
        self._not_before = float("-inf")

    def failed(self, now: float) -> None:
        """Note that the stand-in ended with an error: no restart for AGAIN_S."""
        self._not_before = now + AGAIN_S

    def order(self, wanted: bool, works: bool, now: float) -> StandInOrder | None:
        """Order at `now`, if any. `wanted`: some block has no other holder; `works`: the stand-in runs."""
        if wanted == works:
            self._since = None
            return None
        self._since = now if self._since is None else self._since
        needed_s = NEEDED_S if wanted else ENOUGH_S
        if now - self._since < needed_s or (wanted and now < self._not_before):
            return None
        self._since = None
        return StandInOrder.START if wanted else StandInOrder.END


class StandIn:
    """Starts and ends the stand-in for the run that `service` coordinates (None: another peer does).

    `home` is the stand-in's folder, `address` where it joins.
    """

    def __init__(
        self, home: Path, service: Callable[[], CoordinatorService | None], address: Callable[[], str]
    ) -> None:
        self._home = Home(home)
        self._service = service
        self._address = address
        self._child: Child | None = None
        self._need = Need()

    async def watch_forever(self) -> None:
        """Start and end the stand-in as needed, until cancelled; then end it."""
        try:
            peer = self._home.identity().peer_id
            while True:
                await asyncio.sleep(LOOK_S)
                await self._look(peer, asyncio.get_running_loop().time())
        except LocalError as error:
            _log.warning("the stand-in cannot start: %s", error)
        finally:
            if self._child is not None:
                await end_all([self._child])

    async def _look(self, peer: str, now: float) -> None:
        """Start the stand-in if it is needed, end it if not, and note that it died."""
        child = self._child
        if child is not None and child.status is not None:
            if child.status:
                _log.warning("the stand-in ended: %s", child.last_line())
                self._need.failed(now)
            child = self._child = None
        match self._need.order(self._is_wanted(peer), child is not None, now):
            case StandInOrder.START:
                await self._start()
            case StandInOrder.END if child is not None:
                _log.warning("volunteers hold all blocks again: the stand-in leaves")
                await end_all([child])
                self._child = None

    def _is_wanted(self, peer: str) -> bool:
        """Whether a block has no holder but `peer`, our own."""
        service = self._service()
        if service is None or service.halted.done():
            return False
        core = service.core
        places = [place for other, place in core.working().items() if other != peer]
        return any(not any(i <= b < j for i, j in places) for b in range(service.blocks))

    async def _start(self) -> None:
        _log.warning("no volunteer comes for the missing blocks: a stand-in takes part")
        arguments = ("join", "--bootstrap", self._address(), "--name", "stand-in")
        log = self._home.path / "stand-in.log"
        with disk_errors(log):
            self._child = await Child.start("stand-in", arguments, home=self._home.path, log=log)
