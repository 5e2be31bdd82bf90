"""State and progress of a reliable peer for its owner."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hetpeer.peer.control.control_messages import ReliableMember, ReliableStatus
from hetpeer.peer.control.owned_daemon import Does

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.reliable.reliable_peer import ReliablePeer


def doing(peer: ReliablePeer) -> Does:
    """While it runs. A coordinator trains, waits for volunteers, or has finished; the others follow it."""
    service, replica = peer.service, peer.replica
    if service is None:
        return "following", "" if replica.leader not in (None, replica.me) else "no_coordinator"
    if service.halted.done():
        return "finished", ""
    return ("waiting", "no_peers") if service.core.missing_blocks else ("training", "")


def figures_of(run: RunDirectory, peer: ReliablePeer) -> ReliableStatus:
    """Current progress."""
    replica, service = peer.replica, peer.service
    return ReliableStatus(
        pid=os.getpid(),
        run=run.manifest.name,
        peer=replica.me,
        leader=replica.leader or "",
        term=replica.term,
        records=len(replica.records),
        version=replica.history.version if service is None else service.core.done,
        steps=run.manifest.training.steps,
        stored=peer.stored,
        members=tuple(
            ReliableMember(peer=one, lacks=replica.lacks(one), silent_s=replica.silent_s(one))
            for one in replica.members
        ),
    )
