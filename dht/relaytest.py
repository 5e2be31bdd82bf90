"""Does our p2pd relay as it was told? It starts two relay services, ours and libp2p's with 128 KiB and two minutes to a
circuit, and the one that came last answers (on one processor ours, as measured; nothing promises it). So we ask: a
throw-away p2pd takes a slot and reads the limits in the answer.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from hetpeer.dht.addresses import Address
from hetpeer.dht.circuits import Reservation, reserve
from hetpeer.dht.config import NodeConfig
from hetpeer.dht.control import Control
from hetpeer.dht.identity import Identity
from hetpeer.dht.p2pd import P2pd

_DEADLINE_S = 5.0


async def offered(relay: Address) -> Reservation:
    """What the relay at `relay`, on this machine, offers to strangers. Raises `LocalError`, `RemoteError`."""
    folder = _folder()
    identity = Identity.load_or_create(Path(folder.name) / "key")
    p2pd = await P2pd.start(NodeConfig(), identity, port=0)
    try:
        control = Control(p2pd.control_path)
        await control.connect(relay, _DEADLINE_S)
        return await reserve(control, relay.peer_id, _DEADLINE_S)
    finally:
        await p2pd.close()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of the throw-away identity, as long as we live."""
    return tempfile.TemporaryDirectory(prefix="hetpeer-stranger-")
