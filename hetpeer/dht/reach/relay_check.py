"""A test of our own p2pd as a relay.

p2pd starts two relay services, ours and libp2p's with 128 KiB and two minutes for each circuit, and the one
that came last answers (on one processor ours, as measured; nothing promises it). So a throw-away p2pd takes a
slot and reads the limits in the answer.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.node_config import NodeConfig
from hetpeer.dht.p2pd.p2pd_control import P2pdControl
from hetpeer.dht.p2pd.p2pd_process import P2pd
from hetpeer.dht.reach.relay_reservation import RelayReservation, reserve

Offered = Callable[[Address], Awaitable[RelayReservation]]
"""Offer of a relay on this machine to strangers. Raises `LocalError`, `RemoteError`."""
_DEADLINE_S = 5.0


@asynccontextmanager
async def stranger() -> AsyncIterator[Offered]:
    """A throw-away p2pd, which starts while the caller does something else."""
    starting = asyncio.ensure_future(_start())

    async def offered(relay: Address) -> RelayReservation:
        control = P2pdControl((await asyncio.shield(starting)).control_path)
        await control.connect(relay, _DEADLINE_S)
        return await reserve(control, relay.peer_id, _DEADLINE_S)

    try:
        yield offered
    finally:
        starting.cancel()  # no effect when done
        with suppress(LocalError, asyncio.CancelledError):
            await (await starting).close()


async def _start() -> P2pd:
    identity = Identity.load_or_create(Path(_folder().name) / "key")
    return await P2pd.start(NodeConfig(), identity, port=0)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Folder of the throw-away identity, kept as long as this process."""
    return tempfile.TemporaryDirectory(prefix="hetpeer-stranger-")
