"""A further reliable peer's copy of a run: manifest and files, from the peers that serve them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hetpeer.bootstrap.authoring.create import made_beside
from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import FOLDERS, RunDirectory
from hetpeer.bootstrap.storage.file_service import fetch_file
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.arrival.manifest_fetch import fetch_manifest
from hetpeer.peer.process.home import Home


async def mirror(directory: Path, goal: Destination, home: Home) -> None:
    """Make `directory` a complete copy of the run to which `goal` leads; after an error nothing is left
    there.

    An identity gets only one copy of a run: a second one would begin with an empty log and forget its votes.
    Raises `LocalError` HP-RUN-012 (the amended manifest does not name the reliable identity of `home`),
    HP-RUN-024 (it has had its copy), HP-NET-006, HP-RUN-016, HP-DISK-*; `RemoteError` HP-SYNC-001 for a file
    that nobody gives.
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
                why=f"its id as a reliable peer is {identity.peer_id}",
                fix=f"have its owner name it: hetpeer amend DIR --reliable {identity.peer_id} …",
                exit_code=ExitCode.CONFIG,
            )
        mark = home.reliable_mark(signed.run_id, identity.peer_id)
        if mark.exists():
            raise _has_had_one(identity.peer_id, Path(os.fsdecode(mark.read_bytes())))
        with made_beside(directory) as folder:
            for part in FOLDERS:
                (folder / part).mkdir()
            atomic_write(folder / "manifest.hetpeer", signed.data)
            MembershipConfig(signed, folder)  # keeps the amendment
            atomic_write(folder / "identity.key", home.reliable_key.read_bytes(), mode=0o600)
            peers = list(dict.fromkeys((found.peer, *(address.peer_id for address in goal.addresses))))
            for reference, path in RunDirectory(folder, signed).files():
                data = await fetch_file(node, peers, reference.blake3, reference.bytes)
                await asyncio.to_thread(atomic_write, path, bytes(data))
        _note(mark, directory)
    finally:
        await node.close()


def _note(mark: Path, directory: Path) -> None:
    with disk_errors(mark):
        mark.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(mark, os.fsencode(directory.resolve()))


def _has_had_one(peer_id: str, where: Path) -> LocalError:
    return LocalError(
        "HP-RUN-024",
        f"this machine has had its copy of the run as the reliable peer {peer_id}: {where}",
        why="it has taken part and may have voted, and a new copy would not know its votes",
        fix=f"hetpeer bootstrap {where}; if that is lost, take a new identity: the run's author names the id "
        "that hetpeer"
        " id --reliable --home NEW prints (hetpeer amend); then add --home NEW to this command",
        exit_code=ExitCode.CONFIG,
    )
