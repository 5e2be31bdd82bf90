"""The task board: DHT notes of senders that hold work for a block without a known holder.

A note only says whom to ask; the protocol decides what counts. Each sender has one note in a shard, which
replaces its earlier one. A note disappears when its time is up. Shards are chosen by block, so anybody may
have a note in any of them, up to known_keys.MAX_RECORDS at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import Count, first_wrong
from hetpeer.dht.kademlia.table import SHARDS
from hetpeer.dht.node.node import Node

WIRE_VERSION = 1
TTL_S = 12.0
MAX_IDS = 256
"""Ids in one note: a DHT record is small. The sender offers all its leftovers to a peer that asks."""

_log = logging.getLogger(__name__)


class LeftoverIds(BaseModel):
    """Microbatches whose bundles enter block `border`, kept by the note's writer."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    border: Count
    ids: Annotated[tuple[Count, ...], Field(max_length=MAX_IDS, strict=False)]


class TaskNote(BaseModel):
    """Leftovers of one sender in step `step` of (`term`, `view`); empty: all done."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    term: Count
    view: Count
    step: Count
    leftovers: Annotated[tuple[LeftoverIds, ...], Field(max_length=64, strict=False)] = ()

    @classmethod
    def from_map(cls, value: Mapping[str, Any], *, peer: str) -> TaskNote:
        """The note in a DHT value of `peer`. Raises `ProtocolError`."""
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            field, why = first_wrong(error)
            raise ProtocolError(f"a note whose {field} is wrong", peer=peer, why=why) from error


class TaskBoard:
    """The board of run `run_id`, seen from `node`.

    board = TaskBoard(node, run_id)
    note = TaskNote(term=1, view=0, step=7, leftovers=(LeftoverIds(border=4, ids=(12, 13)),))
    await board.post(shard_of(4), note)
    notes = await board.read([4])  # sender → notes
    """

    def __init__(self, node: Node, run_id: str) -> None:
        self._node = node
        self._prefix = f"hetpeer/{WIRE_VERSION}/{run_id}/leftovers"
        for shard in range(SHARDS):
            node.dht.declare(f"{self._prefix}/{shard}", _anybody)

    async def post(self, shard: int, note: TaskNote) -> bool:
        """Show `note` as ours for TTL_S seconds; False if no node took it. Raises `RemoteError`
        on a timeout.
        """
        value = note.model_dump(mode="json")
        return await self._node.dht.store(f"{self._prefix}/{shard}", value, ttl_s=TTL_S)

    async def read(self, borders: Iterable[int] | None = None) -> dict[str, list[TaskNote]]:
        """Sender → its notes in the shards of `borders` (default: all); invalid notes are left out.

        Raises `RemoteError` on a timeout.
        """
        shards = range(SHARDS) if borders is None else sorted({shard_of(border) for border in borders})
        found = await self._node.dht.get([f"{self._prefix}/{shard}" for shard in shards])
        notes: dict[str, list[TaskNote]] = {}
        for values in found.values():
            for peer, value in values.items():
                try:
                    notes.setdefault(peer, []).append(TaskNote.from_map(value, peer=peer))
                except ProtocolError as error:
                    _log.debug("left out a note: %s", error)
        return notes


def _anybody(_peer_id: str) -> bool:
    return True


def shard_of(border: int) -> int:
    """The shard of notes for block `border`."""
    return border % SHARDS
