"""Discovery: who takes part in a run (adverts, the roster), and which work is left over (the task board).

An advert is what a peer says about itself in the DHT; the roster is the adverts of all peers of one run.
A note on the task board says which sender holds work for a block without a known holder. Both are claims:
they guide, and decide nothing; of a note the protocol decides what counts. They are checked where they come
in: numbers are bounded, text is cut to printable ASCII, so that no name carries markup or terminal codes.
Unknown fields are ignored, since a newer version may add some.

Adverts are spread over SHARDS keys by the ids of their peers (table.py), notes by their blocks, so anybody
may have a note in any shard, up to table.MAX_RECORDS at a time. A note replaces the sender's earlier one in
its shard. The wire version is part of the key, so that versions that would misread each other do not meet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import Amount, Count, Label, Share, first_wrong
from hetpeer.dht.kademlia.table import MAX_PAYLOAD, SHARDS, is_of, shard_of
from hetpeer.dht.node.node import Node

ADVERT_VERSION = 1
LEFT = "left"
"""State of a peer that has left and said so."""
BACKUP = "backup"
"""State of a volunteer that keeps a place and takes part in no step."""
CHECKING = "checking"
"""State of a volunteer that starts its worker and measures its line: it will soon ask for a place."""
MAX_LINKS = 4
"""Links in one advert: a DHT record is small."""
MAX_COORDINATE = 8
CoordinateNumber = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
AddressText = Annotated[str, Field(max_length=256, pattern=r"^/[!-~]+$")]
ROSTER_VERSION = 3
ADVERT_TTL_S = 30.0
BOARD_VERSION = 2
NOTE_TTL_S = 12.0
MAX_IDS = 256
"""Ids in one note: a DHT record is small. The sender offers all its leftovers to a peer that asks."""

_log = logging.getLogger(__name__)


class LinkNote(BaseModel):
    """One outgoing link, for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    to: Label
    """The end of the peer's id."""
    rate: Amount = 0.0
    """Bytes/s that arrive there; 0: unknown."""
    trip_s: Amount = 0.0
    """Best round trip in seconds."""
    activation_bytes: Count = 0
    """Encoded bytes of the last bundle sent there; 0: none yet."""
    gradient_bytes: Count = 0
    """Encoded bytes of the last bundle's gradient; 0: none yet."""
    ratio: Amount = 1.0
    """Bytes in memory over bytes sent."""
    codec: Label = ""
    """Codec of the last bundle; empty: the run's links do not adapt, or an older version."""
    aim_s: Amount = 0.0
    """Seconds that a bundle was to take at most; 0: not known."""
    saved_bytes: Count = 0
    path: Label = ""
    """`direct`, or `through` and the end of a relay's id."""


class Advert(BaseModel):
    """One peer's state, published again every few seconds.

    advert = Advert(name="ada", role="volunteer", state="working", block_begin=0, block_end=4)
    await Roster(node, run_id).publish(advert)
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: Count = ADVERT_VERSION
    """Schema version; raised only when an old reader would misunderstand a field."""
    name: Label = ""
    """Name chosen by the owner, for people."""
    addresses: Annotated[tuple[AddressText, ...], Field(max_length=8, strict=False)] = ()
    role: Label = ""
    """volunteer or coordinator."""
    state: Label = ""
    """joining, working, draining and so on, for people."""
    block_begin: Count = 0
    block_end: Count = 0
    """Blocks held: [block_begin, block_end)."""
    step: Count = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Loss of the last committed step."""
    tokens_per_second: Amount = 0.0
    forward_s: Amount = 0.0
    """Seconds of one microbatch's forward over its blocks; 0: unknown."""
    backward_s: Amount = 0.0
    varies: Amount = 0.0
    """Standard deviation over mean of single forwards and backwards."""
    encode_s: Amount = 0.0
    """Seconds to encode one bundle, as last measured; 0: not encoded."""
    decode_s: Amount = 0.0
    between_s: Amount = 0.0
    """Seconds between its last work of a step and that step's update; 0: unknown."""
    update_s: Amount = 0.0
    """Seconds that its worker spends on a step's reduce and update; 0: unknown."""
    computes: Share = 0.0
    """Fraction of recent time in which its worker computed. It waited for data, room or (the rest) a step."""
    waits_data: Share = 0.0
    waits_room: Share = 0.0
    uplink: Amount = 0.0
    """Bytes/s that its line sends: in traffic, or in its probe before there was any; 0: unknown."""
    downlink: Amount = 0.0
    """Bytes/s that its line receives, by its probe; 0: unknown."""
    coordinate: Annotated[tuple[CoordinateNumber, ...], Field(max_length=MAX_COORDINATE, strict=False)] = ()
    """Its network coordinate (stages/planning/network_coordinates.py); empty: unknown."""
    flops_per_second: Amount = 0.0
    """FLOP/s that its worker reaches on its blocks; a guess before it has tried."""
    product_flops: Amount = 0.0
    """FLOP/s that its worker reaches in a product of large matrices; 0: unknown."""
    memory_bytes: Count = 0
    """Memory offered for blocks: the GPU's, or main memory if the processor computes."""
    host_bytes: Count = 0
    """Main memory offered beside a GPU."""
    gpu_bytes: Count = 0
    """Memory that its GPUs offer, added up; 0: it computes on the processor, or its version does not say."""
    disk_bytes: Count = 0
    """Disk offered for what does not fit into memory."""
    offload: Label = ""
    """Allowed kinds of offload: auto, none, host or disk; empty: the peer's version knows none."""
    processor: Label = ""
    """A mark that volunteers have in common which compute on one processor, or one GPU; empty: unknown."""
    processor_part: Share = 0.0
    """Fraction of that processor that its worker takes while it computes; 0: unknown."""
    device: Label = ""
    up_s: Amount = 0.0
    """Seconds since its node started; 0: its version does not say."""
    reach: Label = ""
    """public: takes connections; private: takes none; unknown."""
    reach_peers: Count = 0
    """Number of peers that tried to reach this one, with this result."""
    relays: Annotated[tuple[Label, ...], Field(max_length=MAX_LINKS, strict=False)] = ()
    """Ends of the ids of the relays through which it is reached."""
    links: Annotated[tuple[LinkNote, ...], Field(max_length=MAX_LINKS, strict=False)] = ()
    """The slowest first."""

    def to_map(self) -> dict[str, Any]:
        """The map for the DHT without fields at their defaults; no tuples: hivemind writes them otherwise."""
        return self.model_dump(mode="json", exclude_defaults=True) | {"version": self.version}

    def fitting(self) -> Advert:
        """The advert without as many of its last addresses, then links, as a DHT record has no room for."""
        advert = self
        while len(msgpack.packb(advert.to_map())) > MAX_PAYLOAD and (advert.addresses or advert.links):
            field = "addresses" if advert.addresses else "links"
            advert = advert.model_copy(update={field: getattr(advert, field)[:-1]})
        return advert

    @classmethod
    def from_map(cls, value: Mapping[str, Any], *, peer: str) -> Advert:
        """The advert in a DHT value of `peer`. Raises `ProtocolError`."""
        try:
            advert = cls.model_validate(dict(value))
        except ValidationError as error:
            field, why = first_wrong(error)
            raise ProtocolError(f"an advert whose {field} is wrong", peer=peer, why=why) from error
        if advert.version > ADVERT_VERSION:
            raise ProtocolError(f"an advert of version {advert.version}", peer=peer)
        return advert


class Roster:
    """The adverts of run `run_id`, seen from `node`, which has room of its own for them unless `foreign`.

    roster = Roster(node, run_id)
    await roster.publish(Advert(name="ada"))
    adverts = await roster.read()  # peer id → Advert
    """

    def __init__(self, node: Node, run_id: str, *, foreign: bool = False) -> None:
        self._node = node
        self._prefix = f"hetpeer/{ROSTER_VERSION}/{run_id}/peers"
        for shard in () if foreign else range(SHARDS):
            node.dht.declare(f"{self._prefix}/{shard}", partial(is_of, shard))

    async def publish(self, advert: Advert, *, ttl_s: float = ADVERT_TTL_S) -> bool:
        """Show `advert`, as far as it fits, for `ttl_s` seconds; False if no node took it.

        Raises `RemoteError` on a timeout.
        """
        value = advert.fitting().to_map()
        return await self._node.dht.store(self._key(self._node.peer_id), value, ttl_s=ttl_s)

    async def read(self) -> dict[str, Advert]:
        """Peer id → newest advert; invalid adverts are left out. Raises `RemoteError` on a timeout."""
        found = await self._node.dht.get([f"{self._prefix}/{shard}" for shard in range(SHARDS)])
        adverts: dict[str, Advert] = {}
        for values in found.values():
            for peer_id, value in values.items():
                try:
                    adverts[peer_id] = Advert.from_map(value, peer=peer_id)
                except ProtocolError as error:
                    _log.debug("left out an advert: %s", error)
        return adverts

    def _key(self, peer_id: str) -> str:
        return f"{self._prefix}/{shard_of(peer_id)}"


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
        self._prefix = f"hetpeer/{BOARD_VERSION}/{run_id}/leftovers"
        for shard in range(SHARDS):
            node.dht.declare(f"{self._prefix}/{shard}", lambda _peer_id: True)

    async def post(self, shard: int, note: TaskNote) -> bool:
        """Show `note` for NOTE_TTL_S seconds; False if no node took it. Raises `RemoteError` on a timeout."""
        value = note.model_dump(mode="json")
        return await self._node.dht.store(f"{self._prefix}/{shard}", value, ttl_s=NOTE_TTL_S)

    async def read(self, borders: Iterable[int] | None = None) -> dict[str, list[TaskNote]]:
        """Sender → its valid notes in `borders`' shards (default: all). Raises `RemoteError` on a timeout."""
        shards = range(SHARDS) if borders is None else sorted({board_shard(border) for border in borders})
        found = await self._node.dht.get([f"{self._prefix}/{shard}" for shard in shards])
        notes: dict[str, list[TaskNote]] = {}
        for values in found.values():
            for peer, value in values.items():
                try:
                    notes.setdefault(peer, []).append(TaskNote.from_map(value, peer=peer))
                except ProtocolError as error:
                    _log.debug("left out a note: %s", error)
        return notes


def board_shard(border: int) -> int:
    """The shard of notes for block `border`."""
    return border % SHARDS
