"""A further reliable peer's copy of a run: manifest and files, from the peers that serve them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hetpeer.bootstrap.council import Council
from hetpeer.bootstrap.create import made_beside
from hetpeer.bootstrap.files import atomic_write
from hetpeer.bootstrap.rundir import FOLDERS, RunDirectory
from hetpeer.bootstrap.serving import fetch_file
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.arrival.manifests import fetch_manifest
from hetpeer.peer.home import Home


async def mirror(directory: Path, goal: Destination, home: Home) -> None:
    """Make `directory` a copy of the run to which `goal` leads; complete, or nothing is left there.

    Raises `LocalError` HP-RUN-012 where the manifest, as amended, does not name the reliable identity of `home`, HP-NET-006, HP-RUN-016, HP-DISK-*;
    `RemoteError` HP-SYNC-001 for a file that nobody gives.
    """
    identity = home.reliable_identity()
    node = await Node.start(NodeConfig(peers=goal.addresses), identity)
    try:
        found = await fetch_manifest(node, goal.addresses, goal.run)
        signed = found.signed
        if identity.peer_id not in signed.reliable:
            raise LocalError(
                "HP-RUN-012",
                f"run {signed.manifest.name} does not name this machine as one of its reliable peers",
                why=f"its identity as such is {identity.peer_id}",
                fix=f"have its owner name it: hetpeer amend DIR --reliable {identity.peer_id} …",
                exit_code=ExitCode.CONFIG,
            )
        with made_beside(directory) as folder:
            for part in FOLDERS:
                (folder / part).mkdir()
            atomic_write(folder / "manifest.hetpeer", signed.data)
            Council(signed, folder)  # keeps the amendment
            atomic_write(folder / "identity.key", home.reliable_key.read_bytes(), mode=0o600)
            peers = list(dict.fromkeys((found.peer, *(address.peer_id for address in goal.addresses))))
            for reference, path in RunDirectory(folder, signed).files():
                data = await fetch_file(node, peers, reference.blake3, reference.bytes)
                await asyncio.to_thread(atomic_write, path, bytes(data))
    finally:
        await node.close()
