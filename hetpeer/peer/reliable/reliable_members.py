"""Changing who the reliable peers are: an amendment (`hetpeer amend`), a further peer's copy of the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hetpeer.bootstrap.consensus.reconfiguration import offer
from hetpeer.bootstrap.run.amendment import MembershipChange
from hetpeer.bootstrap.run.durable_files import (
    atomic_write,
    disk_errors,
    made_beside,
    temporary_folder,
)
from hetpeer.bootstrap.run.membership_config import MembershipConfig, amend
from hetpeer.bootstrap.run.run_directory import FOLDERS, RunDirectory
from hetpeer.bootstrap.storage.file_service import fetch_file
from hetpeer.dht.base.errors import ExitCode, LocalError, RemoteError
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival.destinations import Destination
from hetpeer.peer.arrival.manifest_fetch import fetch_manifest
from hetpeer.peer.process.home import Home


def amended(directory: Path, change: MembershipChange) -> MembershipConfig:
    """Sign a new amendment in the run directory; without a change, return the latest. A running `hetpeer
    bootstrap` of that directory sees it within a second.

    Raises `LocalError` HP-RUN-015 (no owner key there), HP-RUN-001 (a wrong number or id), HP-DISK-*.
    """
    run = RunDirectory.open(directory)
    if change == MembershipChange():
        return MembershipConfig(run.signed, directory)
    return amend(run.signed, directory, run.owner_key(), change)


async def deliver(membership_config: MembershipConfig, addresses: Sequence[Address]) -> None:
    """Tell one of the reliable peers at `addresses`; it tells the others.

    Raises `LocalError` HP-NET-002, HP-RUN-018, HP-DISK-*; HP-RUN-023 if that peer has another amendment of
    this number or a later one, which is then kept in the run directory.
    """
    with temporary_folder("amend") as folder:
        identity = Identity.create(folder / "identity.key")
        node = await Node.start(NodeConfig(peers=tuple(addresses)), identity)
        try:
            last: RemoteError | None = None
            for address in addresses:
                number = membership_config.sequence
                try:
                    told = await offer(node, address.peer_id, membership_config.data)
                    if told.data and membership_config.hear(told.data, address.peer_id, instead=True):
                        raise _without_effect(number, membership_config)
                except RemoteError as error:
                    last = error
                else:
                    return
        finally:
            await node.close()
    raise LocalError(
        "HP-RUN-018",
        f"amendment {membership_config.sequence} is signed, but no reliable peer took it",
        why=last.what if last is not None else "no address was given",
        fix="give the address of a running one: hetpeer amend DIR --bootstrap ADDR",
        exit_code=ExitCode.NETWORK,
    )


def _without_effect(number: int, membership_config: MembershipConfig) -> LocalError:
    return LocalError(
        "HP-RUN-023",
        f"amendment {number} changes nothing: the reliable peers have another amendment "
        f"{membership_config.sequence}",
        why="that one was signed in another copy of the run directory, and came first",
        fix="this run directory has it now: look at it with hetpeer amend DIR, then repeat the command",
        exit_code=ExitCode.CONFIG,
    )


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
                await fetch_file(node, peers, path, reference.blake3, reference.bytes)
        _note(mark, directory)
    finally:
        await node.close()


def _note(mark: Path, directory: Path) -> None:
    with disk_errors(mark):
        mark.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(mark, os.fsencode(directory.resolve()))


def _has_had_one(peer_id: str, where: Path) -> LocalError:
    """Error HP-RUN-024 for a machine that had its copy of the run: it may have voted."""
    return LocalError(
        "HP-RUN-024",
        f"this machine has had its copy of the run as the reliable peer {peer_id}: {where}",
        why="it has taken part and may have voted, and a new copy would not know its votes",
        fix=f"hetpeer bootstrap {where}; if that is lost, take a new identity: the run's author names the id "
        "that hetpeer"
        " id --reliable --home NEW prints (hetpeer amend); then add --home NEW to this command",
        exit_code=ExitCode.CONFIG,
    )
