"""What a swarm says of itself: run, peers, blocks and their holders, progress. Read through any peer of it.

A short-lived node with an identity of its own joins the DHT, fetches the signed manifest from the peer it joined by,
and reads everybody's adverts; the bootstrap node need not be there. Adverts are claims, so a status informs and proves
nothing: `hetpeer audit` proves.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hetpeer.dht.reachability import Reach

if TYPE_CHECKING:
    from hetpeer.bootstrap.manifest import Manifest, SignedManifest
    from hetpeer.dht.addresses import Address
    from hetpeer.dht.board import Board, Note
    from hetpeer.dht.node import Node
    from hetpeer.dht.records import Advert
    from hetpeer.dht.roster import Roster

SCHEMA = "hetpeer.status/1"
HOLDING = frozenset({"ready", "training", "reducing", "applying"})
"""Phases of a volunteer that has the current state of its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer, as it says itself."""

    peer: str
    name: str
    role: str
    state: str
    blocks: tuple[int, int] | None
    """[begin, end) of its place; held only if `holds`."""
    holds: bool
    step: int
    tokens_per_second: float
    computes: float
    """Of its time lately, that its worker computed; 0: it does not say, as the next two."""
    waits_data: float
    """That what came next was computed elsewhere, or on its way."""
    waits_room: float
    """That there was no room for what would have come of ready work, in its memory or at the next peer. The rest it waited for a step to begin."""
    device: str
    reach: str
    """public: takes connections; private: takes none; unknown; empty: it does not say."""
    reach_peers: int
    """How many peers tried, with this result."""
    relays: tuple[str, ...]
    """The ends of the ids of those through whom it is reached."""
    links: tuple[LinkRow, ...]
    """Its outgoing links, the slowest first, a few at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """What goes to another peer."""

    to: str
    """The end of its id."""
    bytes_per_second: float
    """At which bytes arrive there; 0: not known."""
    ratio: float
    """How many times smaller than in memory what is sent is."""
    saved_bytes: int
    path: str
    """direct; punched: direct, though neither end takes connections; `through` the end of a relay's id; or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """One block and the peer ids of those who hold its current state."""

    block: int
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverRow:
    """Work on the task board: microbatches that wait for a holder of a block."""

    block: int
    sender: str
    """The peer that keeps them."""
    step: int
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    name: str
    id: str
    unit: str
    """What the speeds count: `tok` of text, or `samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    step: int
    """Updates committed."""
    steps: int
    loss: float | None
    """Of the last committed step."""
    eta_s: float | None
    """Seconds until the last step at the present speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    volunteers: int
    working: int
    """Volunteers that hold the current state of their blocks."""
    coordinator: bool
    """Whether one of the reliable peers coordinates."""
    tokens_per_second: float
    weakest_block: int
    """The block with the fewest holders, the first of several."""
    weakest_holders: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatus:
    """Everything `hetpeer status` shows. `time` is in seconds since 1970, `state` as in docs/protocol.md."""

    time: float
    state: str
    reason: str
    """Why it does not train, in plain words; empty while it does."""
    run: RunName
    peers: tuple[PeerRow, ...]
    blocks: tuple[BlockRow, ...]
    leftovers: tuple[LeftoverRow, ...]
    progress: Progress
    swarm: Swarm

    def document(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {"schema": SCHEMA, **asdict(self)}


def summarise(
    signed: SignedManifest,
    adverts: Mapping[str, Advert],
    now: float,
    board: Mapping[str, Sequence[Note]] = MappingProxyType({}),
) -> SwarmStatus:
    """The status that the adverts and the notes on the task board (by peer id) give of a run, at `now` seconds since 1970.
    Pure.
    """
    manifest = signed.manifest
    closed = {peer[-8:] for peer, advert in adverts.items() if advert.reach == Reach.PRIVATE}
    rows = tuple(_peer_row(peer, advert, closed) for peer, advert in sorted(adverts.items()))
    blocks = tuple(
        BlockRow(block=block.index, holders=tuple(row.peer for row in rows if _has(row, block.index)))
        for block in manifest.blocks
    )
    weakest = min(blocks, key=lambda row: len(row.holders))
    coordinators = [row for row in rows if row.role == "coordinator" and row.peer in signed.reliable]
    swarm = Swarm(
        volunteers=sum(row.role == "volunteer" for row in rows),
        working=sum(row.holds for row in rows),
        coordinator=bool(coordinators),
        tokens_per_second=_speed(coordinators, rows, blocks),
        weakest_block=weakest.block,
        weakest_holders=len(weakest.holders),
    )
    witnesses = coordinators or [row for row in rows if row.holds]
    progress = _progress(manifest, witnesses, adverts, swarm.tokens_per_second)
    state, reason = _state(progress, coordinators, blocks)
    return SwarmStatus(
        time=now,
        state=state,
        reason=reason,
        run=RunName(name=manifest.name, id=signed.run_id, unit=manifest.data.unit),
        peers=rows,
        blocks=blocks,
        leftovers=tuple(_leftovers(board)),
        progress=progress,
        swarm=swarm,
    )


MAX_CLAIMANTS = 8
"""Peers that say they coordinate, of whom an amendment that names them is asked for."""


@dataclass(slots=True)
class Onlooker:
    """Somebody who looks at a swarm without taking part."""

    signed: SignedManifest
    _node: Node
    _roster: Roster
    _board: Board

    async def adverts(self) -> Mapping[str, Advert]:
        """What the peers say of themselves now, by peer id. Raises `RemoteError` HP-NET-012 when the DHT does not answer."""
        return await self._roster.read()

    async def status(self) -> SwarmStatus:
        """The same, put together. Raises as `adverts`."""
        from hetpeer.dht.clock import SystemClock
        from hetpeer.peer.manifests import amended

        adverts, board = await asyncio.gather(self.adverts(), self._board.read())
        claimants = {peer for peer, advert in adverts.items() if advert.role == "coordinator"}
        if claimants.isdisjoint(self.signed.reliable):
            self.signed = await amended(self._node, self.signed, sorted(claimants)[:MAX_CLAIMANTS])
        return summarise(self.signed, adverts, SystemClock().wall(), board)


@asynccontextmanager
async def observing(addresses: Sequence[Address]) -> AsyncIterator[Onlooker]:
    """Join the swarm as an onlooker. Raises `LocalError` HP-NET-002 (nobody answers), HP-NET-006 (nobody serves a run)."""
    from hetpeer.dht.board import Board
    from hetpeer.dht.identity import Identity
    from hetpeer.dht.node import Node, NodeConfig
    from hetpeer.dht.roster import Roster
    from hetpeer.peer.manifests import fetch_manifest

    with tempfile.TemporaryDirectory(prefix="hetpeer-status-") as folder:
        identity = Identity.create(Path(folder) / "identity.key")
        node = await Node.start(NodeConfig(peers=tuple(addresses)), identity)
        try:
            signed = await fetch_manifest(node, addresses)
            yield Onlooker(signed, node, Roster(node, signed.run_id), Board(node, signed.run_id))
        finally:
            await node.close()


def _peer_row(peer: str, advert: Advert, closed: set[str]) -> PeerRow:
    volunteer = advert.role == "volunteer"
    place = (advert.block_begin, advert.block_end) if advert.block_begin < advert.block_end else None
    return PeerRow(
        peer=peer,
        name=advert.name,
        role=advert.role,
        state=advert.state,
        blocks=place if volunteer else None,
        holds=volunteer and place is not None and advert.state in HOLDING,
        step=advert.step,
        tokens_per_second=advert.tokens_per_second,
        computes=advert.computes,
        waits_data=advert.waits_data,
        waits_room=advert.waits_room,
        device=advert.device,
        reach=advert.reach,
        reach_peers=advert.reach_peers,
        relays=advert.relays,
        links=tuple(
            LinkRow(
                to=n.to,
                bytes_per_second=n.rate,
                ratio=n.ratio,
                saved_bytes=n.saved_bytes,
                path="punched" if n.path == "direct" and {n.to, peer[-8:]} <= closed else n.path,
            )
            for n in advert.links
        ),
    )


def _leftovers(board: Mapping[str, Sequence[Note]]) -> Iterator[LeftoverRow]:
    for sender, notes in sorted(board.items()):
        for note in notes:
            for left in note.leftovers:
                yield LeftoverRow(
                    block=left.border, sender=sender, step=note.step, microbatches=len(left.ids)
                )


def _has(row: PeerRow, block: int) -> bool:
    return row.holds and row.blocks is not None and row.blocks[0] <= block < row.blocks[1]


def _speed(coordinators: Sequence[PeerRow], rows: Sequence[PeerRow], blocks: Sequence[BlockRow]) -> float:
    """The coordinator's figure; without one, what the slowest block's holders do together."""
    if coordinators:
        return max(row.tokens_per_second for row in coordinators)
    speeds = {row.peer: row.tokens_per_second for row in rows}
    return min(sum(speeds[peer] for peer in block.holders) for block in blocks)


def _progress(
    manifest: Manifest, witnesses: Sequence[PeerRow], adverts: Mapping[str, Advert], speed: float
) -> Progress:
    steps = manifest.training.steps
    furthest = max(witnesses, key=lambda row: row.step, default=None)
    step = min(furthest.step, steps) if furthest else 0
    per_step = manifest.training.batch_size * manifest.data.tokens_per_sample
    return Progress(
        step=step,
        steps=steps,
        loss=adverts[furthest.peer].loss if furthest else None,
        eta_s=(steps - step) * per_step / speed if speed > 0 else None,
    )


def _state(
    progress: Progress, coordinators: Sequence[PeerRow], blocks: Sequence[BlockRow]
) -> tuple[str, str]:
    missing = [str(block.block) for block in blocks if not block.holders]
    if progress.step >= progress.steps:
        return "finished", ""
    if not coordinators:
        return "waiting", "no coordinator is there"
    if missing:
        return "waiting", f"nobody holds block {', '.join(missing)}"
    return coordinators[0].state, ""
