"""Execution of an amendment of the manifest, at every reliable peer.

A peer that learns of an amendment, from its directory or from another peer, tells the leader. The leader
records it, so every later leader has it, too. Then the leader changes the log's members step by step
to those that the amendment names. No member leaves before most of those that stay have the newest checkpoint.
A peer that is no longer named ends once that is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hetpeer.bootstrap.consensus.replica import DeposedError, Replica
from hetpeer.bootstrap.run.owner_signature import AMENDMENT
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError, RemoteError
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import CONTROL as CONTROL_BUDGET
from hetpeer.dht.streams.stream import Stream

AMEND: Final = "hetpeer/1/amend"
LOOK_S = 0.5
ASK_AGAIN_S = 2.0
ANSWER_S = 8.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AmendmentAnswer:
    """Answer of a reliable peer to an offered amendment."""

    sequence: int
    """Number of the latest amendment that it knows."""
    in_effect: bool
    """Whether that amendment is in effect, by the word of a leader."""
    checkpoint: int
    """Version of the newest checkpoint on its disk."""
    data: bytes
    """The amendment; empty: the peer knows none."""


async def offer(node: Node, peer: str, data: bytes) -> AmendmentAnswer:
    """Tell a reliable peer of an amendment. Raises `RemoteError`."""
    async with await node.open(peer, AMEND) as stream:
        await stream.send({}, data, timeout_s=ANSWER_S)
        header = (await stream.receive(payload_limit=AMENDMENT.max_bytes, timeout_s=ANSWER_S)).header
        known = await stream.receive_bytes(AMENDMENT.max_bytes, timeout_s=ANSWER_S)
    sequence, in_effect, checkpoint = map(header.get, ("sequence", "in_effect", "checkpoint"))
    if not (isinstance(sequence, int) and isinstance(in_effect, bool) and isinstance(checkpoint, int)):
        raise ProtocolError("an answer to an amendment that is none", peer=peer)
    return AmendmentAnswer(sequence, in_effect, checkpoint, bytes(known))


class Reconfiguration:
    """Amendments at the reliable peer `node`; `checkpoint` returns the newest version on its disk."""

    def __init__(self, node: Node, replica: Replica, checkpoint: Callable[[], int]) -> None:
        self._node = node
        self._replica = replica
        self._checkpoint = checkpoint
        self._config = replica.membership_config

    @property
    def _recorded(self) -> bool:
        """Whether the latest amendment is decided, so that it survives this peer."""
        return bytes.fromhex(self._replica.history.amendment) == self._config.data

    async def run(self) -> None:
        """Run until cancelled. Raises `LocalError` HP-RUN-014 if this peer is no longer named, HP-DISK-*."""
        await self._node.serve(AMEND, self._asked, CONTROL_BUDGET)
        asked_at = 0.0
        while True:
            self._look()
            now = asyncio.get_running_loop().time()
            if self._replica.is_leading:
                await self._lead()
            elif self._pressing and now >= asked_at + ASK_AGAIN_S:
                asked_at = now
                await self._ask_the_others()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        """Read the newest amendment from the log and from the file that `hetpeer amend` writes."""
        if recorded := self._replica.history.amendment:
            self._config.learn(bytes.fromhex(recorded), instead=True)
        try:
            self._config.look()
        except LocalError as error:
            _log.warning("%s", error)

    @property
    def _pressing(self) -> bool:
        """Whether others should learn what we know, or we should learn what became of us."""
        return not self._recorded or self._node.peer_id not in self._config.peers

    async def _lead(self) -> None:
        """Lead the change: record the amendment, then change the members step by step."""
        if self._recorded:
            await self._shape()
            return
        config = self._config
        record = {"kind": "amendment", "sequence": config.sequence, "data": config.data.hex()}
        try:
            await self._replica.record(record)
        except DeposedError:
            _log.info("amendment %d is left to the next leader", self._config.sequence)

    async def _shape(self) -> None:
        """Take one step towards the named members: new ones come in first, then others go."""
        members, named = self._replica.members, self._config.peers
        new = [peer for peer in named if peer not in members]
        if new:
            self._replica.shape((*members, *new))
        elif set(members) != set(named) and await self._furnished(named):
            self._replica.shape(named)

    async def _furnished(self, named: Sequence[str]) -> bool:
        """Whether most that stay have the newest checkpoint: otherwise it would go with those that leave."""
        newest = self._replica.history.checkpoint_version
        have = sum(peer == self._node.peer_id for peer in named)
        for peer in named:
            if peer != self._node.peer_id:
                try:
                    have += (await offer(self._node, peer, self._config.data)).checkpoint >= newest
                except RemoteError as error:
                    _log.debug("%s does not say what it has: %s", peer, error)
        return 2 * have > len(named)

    async def _ask_the_others(self) -> None:
        """Tell the others our amendment and hear theirs. Raises `LocalError` HP-RUN-014 if we are out."""
        us = self._node.peer_id
        for peer in sorted(self._replica.company()):
            try:
                told = await offer(self._node, peer, self._config.data)
                if told.in_effect and told.data:
                    self._config.hear(told.data, peer, instead=True)
            except RemoteError as error:
                _log.debug("%s was not told of amendment %d: %s", peer, self._config.sequence, error)
                continue
            if told.in_effect and told.sequence >= self._config.sequence and us not in self._config.peers:
                raise LocalError(
                    "HP-RUN-014",
                    "this machine is not one of the run's reliable peers any more",
                    why=f"amendment {told.sequence} of the manifest names others",
                    fix="nothing: the others have all that it had",
                    exit_code=ExitCode.RUN_CLOSED,
                )

    async def _asked(self, stream: Stream) -> None:
        """Answer a peer that offers or asks for an amendment."""
        await stream.receive(payload_limit=AMENDMENT.max_bytes, timeout_s=ANSWER_S)
        data = await stream.receive_bytes(AMENDMENT.max_bytes)
        if data:
            self._config.hear(bytes(data), stream.peer_id)
        in_effect = self._recorded and self._replica.settled(self._config.peers)
        answer = {"sequence": self._config.sequence, "in_effect": in_effect, "checkpoint": self._checkpoint()}
        await stream.send(answer, self._config.data, timeout_s=ANSWER_S)
