"""Adverts of a run as another node of the DHT reads them, from their first moment on; a process of its own.

    python -m tests.swarm.advert_observer ADDRESS RUN_ID HOST

It prints a line of JSON for each advert that it has not seen: {"peer": …, "at": seconds, **fields}. It ends
when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import Roster
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig

LOOK_S = 0.1


async def observe(address: str, run_id: str, host: str) -> None:
    """Print adverts until cancelled."""
    with tempfile.TemporaryDirectory() as folder:
        config = NodeConfig(peers=(parse_address(address),), host=host)
        node = await Node.start(config, Identity.create(Path(folder) / "key"))
        try:
            roster, told = Roster(node, run_id), set()
            print(json.dumps({"up": node.peer_id}), flush=True)
            while True:
                with contextlib.suppress(RemoteError):
                    for peer, advert in (await roster.read()).items():
                        line = json.dumps({"peer": peer, **advert.to_map()}, sort_keys=True)
                        if line not in told:
                            told.add(line)
                            print(json.dumps({"at": time.time()} | json.loads(line)), flush=True)
                await asyncio.sleep(LOOK_S)
        finally:
            await node.close()


async def main() -> None:
    watching = asyncio.ensure_future(observe(*sys.argv[1:]))
    await asyncio.wait(
        {watching, asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))},
        return_when=asyncio.FIRST_COMPLETED,
    )
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
