"""State and progress of a reliable peer: for its owner, on its console, and in its advert."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.service.driver import CoordinatorService
from hetpeer.bootstrap.state.effects import CoordinatorState
from hetpeer.dht.base.errors import short_id
from hetpeer.dht.discovery import Advert
from hetpeer.dht.node.node import Node
from hetpeer.peer.control.control_messages import ReliableMember, ReliableStatus
from hetpeer.peer.control.owned_daemon import Does
from hetpeer.peer.limits.amounts import block_list, counted
from hetpeer.peer.process.console import EVERY_S, LOOK_S, say
from hetpeer.peer.training.self_advert import reach_fields

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.peer.reliable.reliable_peer import ReliablePeer


def doing(peer: ReliablePeer) -> Does:
    """State of a running reliable peer, and its reason.

    It waits for room on its disk. A coordinator trains, waits for volunteers, or has finished; the others
    follow it.
    """
    service, replica = peer.service, peer.replica
    if peer.disk.error is not None:
        return "waiting", "no_room"
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


class ReliableProgress:
    """Lines of `hetpeer bootstrap`: the coordinator, each change of state, a step line every few seconds."""

    def __init__(self, replica: Replica, service: Callable[[], CoordinatorService | None]) -> None:
        self._replica = replica
        self._service = service
        self._told: tuple[str, int] = ("", -1)
        self._told_at = 0.0

    async def show_forever(self) -> None:
        """Look twice a second and print changes. Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            service, now = self._service(), time.monotonic()
            if service is None:
                self._following()
            else:
                self._look(service, now)

    def _following(self) -> None:
        """Tell once which peer coordinates."""
        leader = self._replica.leader
        key = (leader or "", -1)
        if key != self._told and len(self._replica.members) > 1 and leader != self._replica.me:
            self._told = key
            say(
                f"{short_id(leader)} coordinates; this peer follows"
                if leader
                else "waiting until most reliable peers are there"
            )

    def _look(self, service: CoordinatorService, now: float) -> None:
        """Tell the step, volunteers, loss and missing blocks, on a change or every EVERY_S seconds."""
        core = service.core
        key = (core.state.value if core.missing_blocks else "running", core.volunteers)
        if key == self._told and (core.missing_blocks or now - self._told_at < EVERY_S):
            return
        self._told, self._told_at = key, now
        loss = "".join(f"  loss {last['loss']:.4f}" for last in core.last)
        line = f"step {core.done}  {counted(core.volunteers, 'volunteer')}{loss}"
        if core.missing_blocks:
            line += f"  waiting for volunteers for {block_list(core.missing_blocks)}"
        say(line)


def notable_of_reliable(service: CoordinatorService | None) -> object:
    """Facts whose change is published at once: who coordinates, committed steps, whether the run trains."""
    if service is None:
        return None
    state = service.core.state
    return service.core.done, CoordinatorState.TRAINING if state is CoordinatorState.REDUCING else state


def reliable_advert(service: CoordinatorService | None, node: Node, coordinate: Sequence[int] = ()) -> Advert:
    """Progress of the run if this peer coordinates it; otherwise only that it is there, at `coordinate`."""
    at = tuple(coordinate)
    if service is None:
        return Advert(
            addresses=tuple(node.addresses()[:8]),
            role="reliable",
            state="following",
            coordinate=at,
            **reach_fields(node),
        )
    last = [float(commit["loss"]) for commit in service.core.last]
    return Advert(
        addresses=tuple(node.addresses()[:8]),
        role="coordinator",
        state=service.core.state.value,
        step=service.core.done,
        loss=sum(last) / len(last) if last else None,
        tokens_per_second=service.tokens_per_second(),
        coordinate=at,
        **reach_fields(node),
    )
