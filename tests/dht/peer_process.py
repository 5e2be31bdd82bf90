"""A peer in its own process: a Node that echoes streams and publishes one advert. Run by `ChildPeer` below.

The child prints one JSON line when it is up, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
ECHO = "test/1/echo"
RUN_ID = "test-run"
DEADLINE_S = 120.0


class ChildPeer:
    """Use as an async context manager; on exit the process is gone, by force if need be."""

    def __init__(self, identity: Path) -> None:
        self._identity = identity
        self.report: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        command = [sys.executable, __file__, str(self._identity)]
        self.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={"PYTHONPATH": ".", "PATH": ""},
        )
        assert self.process.stdout is not None
        try:
            import hivemind.dht.node  # noqa: F401 - takes seconds: here while the child does the same

            line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
            self.report = json.loads(line)
        except BaseException:
            await self.end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self) -> None:
        if self.process.returncode is None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 5)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()


async def echo(stream: Any) -> None:
    while True:
        frame = await stream.receive(timeout_s=30)
        data = await stream.receive_bytes(64 << 20)
        await stream.send({"sha256": hashlib.sha256(data).digest(), "asked": frame.header}, data)


async def publish(node: Any) -> None:
    from hetpeer.dht.discovery import Advert, Roster

    await Roster(node, RUN_ID).publish(Advert(name="child"), ttl_s=60)


async def publish_again(node: Any) -> None:
    """For a test that comes late."""
    from hetpeer.dht.base.errors import RemoteError

    while True:
        await asyncio.sleep(15)
        with contextlib.suppress(RemoteError):
            await publish(node)


async def run(identity: Path) -> None:
    from hetpeer.dht.identity.peer_identity import Identity
    from hetpeer.dht.node.node import Node, NodeConfig

    node = await Node.start(NodeConfig(), Identity.create(identity))
    await node.serve(ECHO, echo)
    await publish(node)
    publishing = asyncio.create_task(publish_again(node))
    up = {"peer_id": node.peer_id, "addresses": node.addresses(), "p2pd": node.p2pd_pid}
    print(json.dumps(up), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    publishing.cancel()
    await node.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(run(Path(sys.argv[1])))
