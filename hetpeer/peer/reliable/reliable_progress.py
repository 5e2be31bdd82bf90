"""Lines that a reliable peer shows to the person who started it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.dht.base.errors import short_id
from hetpeer.peer.process.console import EVERY_S, LOOK_S, say
from hetpeer.peer.watching.human_units import block_list, counted


class ReliableProgress:
    """Lines of `hetpeer bootstrap`: who coordinates, each change of state and a step line every few
    seconds.
    """

    def __init__(self, replica: Replica, service: Callable[[], CoordinatorService | None]) -> None:
        self._replica = replica
        self._service = service
        self._told: tuple[str, int] = ("", -1)
        self._told_at = 0.0

    async def show_forever(self) -> None:
        """Look twice a second and print changes. Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            service, now = self._service(), time.monotonic()
            if service is None:
                self._following()
            else:
                self._look(service, now)

    def _following(self) -> None:
        leader = self._replica.leader
        key = (leader or "", -1)
        if key != self._told and len(self._replica.members) > 1 and leader != self._replica.me:
            self._told = key
            say(
                f"{short_id(leader)} coordinates; this peer follows"
                if leader
                else "waiting until most reliable peers are there"
            )

    def _look(self, service: CoordinatorService, now: float) -> None:
        core = service.core
        key = (core.state.value if core.missing_blocks else "running", core.volunteers)
        if key == self._told and (core.missing_blocks or now - self._told_at < EVERY_S):
            return
        self._told, self._told_at = key, now
        loss = "".join(f"  loss {last['loss']:.4f}" for last in core.last)
        line = f"step {core.done}  {counted(core.volunteers, 'volunteer')}{loss}"
        if core.missing_blocks:
            line += f"  waiting for volunteers for {block_list(core.missing_blocks)}"
        say(line)
