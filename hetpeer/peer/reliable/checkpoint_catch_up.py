"""Copying of the newest checkpoint, for a reliable peer that was away when the others sealed it."""

from __future__ import annotations

import asyncio
import logging

from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.trouble_line import TroubleLine

LOOK_S = 0.5
AGAIN_S = 10.0
"""Seconds until a checkpoint that nobody could give is asked for again."""

_log = logging.getLogger(__name__)


class CheckpointCatchUp:
    """`checkpoints` with those that `replica` says are sealed."""

    def __init__(self, replica: Replica, checkpoints: CheckpointReplication) -> None:
        self._replica = replica
        self._checkpoints = checkpoints
        self.uncopied = TroubleLine(_log, "checkpoints are copied again")
        """Why the newest checkpoint cannot be copied for the time being."""
        self._lacking: Record | None = None
        """The checkpoint that nobody could give; `_not_before`: when it is asked for again."""
        self._not_before = 0.0

    async def look_forever(self) -> None:
        """Look every LOOK_S until cancelled. Raises as `look`."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Copy a missing newest checkpoint; retried later if no peer has it, or no room is here.

        Raises `LocalError` HP-DISK-001.
        """
        last, others = self._replica.history.checkpoint, self._replica.company()
        if last is None or self._checkpoints.is_newest(last) or not others:
            return
        known = self._lacking is not None and self._lacking["blocks"] == last["blocks"]
        if known and asyncio.get_running_loop().time() < self._not_before:
            return
        try:
            await self._checkpoints.copy(last, others)
            if last is self._replica.history.checkpoint:  # else a newer one is here, or to be had
                await self._checkpoints.sealed(last)
            self.uncopied.ended()
        except (RemoteError, LocalError) as error:
            if isinstance(error, LocalError) and error.code != "HP-DISK-002":
                raise
            self.uncopied.lasts(error, f"checkpoint {last['version']} could not be copied yet: {error}")
            self._lacking, self._not_before = last, asyncio.get_running_loop().time() + AGAIN_S
