"""Nodes on loopback that know each other."""

from contextlib import AsyncExitStack
from pathlib import Path

from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig


async def known_nodes(stack: AsyncExitStack, folder: Path, count: int) -> list[Node]:
    """So many nodes with direct lanes, until `stack` ends."""
    found: list[Node] = []
    for number in range(count):
        known = {"peers": (parse_address(found[0].addresses()[0]),)} if found else {"alone_ok": True}
        config = NodeConfig(direct_port=0, **known)
        found.append(await Node.start(config, Identity.create(folder / str(number))))
        stack.push_async_callback(found[-1].close)
    return found
