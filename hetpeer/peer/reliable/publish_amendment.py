"""`hetpeer amend`: sign an amendment (reliable peers, who may take part) and deliver it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hetpeer.bootstrap.consensus.reconfiguration import offer
from hetpeer.bootstrap.run.amendment import MembershipChange
from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.bootstrap.run.membership_config import MembershipConfig, amend
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError, RemoteError
from hetpeer.dht.identity.addresses import Address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig

_log = logging.getLogger(__name__)


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
