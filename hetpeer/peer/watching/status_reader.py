"""Reading of a swarm's status through any peer: run, peers, blocks, holders, progress, credit, moves, curves.

A short-lived node with a new identity joins the DHT, fetches the signed manifest from the peer it joined by,
and reads all adverts; the coordinator need not answer. Adverts are claims, so a status proves nothing;
`hetpeer audit` does. Credit, moves and curves come from the run's log (`FromLog`): the reliable peers are
asked for them, and a reliable peer asks itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from hetpeer.bootstrap.log import credit_ranking, departure_counts, plan_news
from hetpeer.bootstrap.log import moves as log_moves
from hetpeer.bootstrap.log.departure_counts import DepartureCounts
from hetpeer.bootstrap.log.loss_curves import MAX_BYTES, Curves
from hetpeer.bootstrap.log.moves import Move
from hetpeer.bootstrap.log.plan_news import PlanNews
from hetpeer.bootstrap.log.record_text import move_text
from hetpeer.bootstrap.storage.file_service import Answer, fetch
from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.discovery import LEFT
from hetpeer.dht.node.node import Node
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.peer.limits.amounts import block_list
from hetpeer.peer.watching.codec_reason import codec_reason
from hetpeer.peer.watching.plan_status import plan_status
from hetpeer.peer.watching.swarm_status import (
    BlockRow,
    CreditRow,
    LeftoverRow,
    LinkRow,
    MoveRow,
    PeerRow,
    Progress,
    RunCredit,
    RunName,
    SwarmStatus,
    SwarmTotals,
)

if TYPE_CHECKING:
    from hetpeer.bootstrap.log.credit_ranking import RankedPeer, Ranking
    from hetpeer.bootstrap.run.manifest import Manifest, SignedManifest
    from hetpeer.dht.discovery import Advert, Roster, TaskBoard, TaskNote
    from hetpeer.peer.arrival.destinations import Destination

ANSWER_S = 4.0
ALL_S = 6.0
"""Seconds for one answer, and for all tries: a status does not wait longer for lost reliable peers."""

T = TypeVar("T")

SLOWEST = 1e-6
"""Tokens (or samples) a second: below this no remaining time is given."""
HOLDING = frozenset({"ready", "training", "reducing", "applying"})
"""Phases of a volunteer that has the current state of its blocks."""
MAX_CLAIMANTS = 8
"""Most peers asked for an amendment because they claim to coordinate."""

_log = logging.getLogger(__name__)


class FromLog:
    """Asks through `node`. A reliable peer asks itself: `answers` is what it serves to others."""

    def __init__(self, node: Node, answers: Mapping[str, Answer] = MappingProxyType({})) -> None:
        self._node = node
        self._answers = answers

    async def ranking(self, reliable: Iterable[str], peer: str = "") -> credit_ranking.Ranking | None:
        """The ranking by credit, with the credit of `peer`, from the first of `reliable` that answers; None
        if none does.

        Never raises.
        """
        return await self._first(reliable, "credit", peer, credit_ranking.MAX_BYTES, credit_ranking.decode)

    async def moves(self, reliable: Iterable[str]) -> tuple[Move, ...] | None:
        """The newest moves of blocks, asked for in the same way."""
        return await self._first(reliable, "moves", "", log_moves.MAX_BYTES, log_moves.decode)

    async def departures(self, reliable: Iterable[str]) -> DepartureCounts | None:
        """How often peers have left the run, asked for in the same way."""
        limit, decode = departure_counts.MAX_BYTES, departure_counts.decode
        return await self._first(reliable, "departures", "", limit, decode)

    async def plan(self, reliable: Iterable[str]) -> PlanNews | None:
        """The last plan that was given and what came of it, asked for in the same way; None: no plan."""
        return await self._first(reliable, "plan", "", plan_news.MAX_BYTES, plan_news.decode)

    async def curves(self, reliable: Iterable[str]) -> Curves | None:
        """The loss curves, asked for in the same way."""
        return await self._first(reliable, "curves", "", MAX_BYTES, Curves.decode)

    async def _first(
        self,
        reliable: Iterable[str],
        kind: str,
        about: str,
        limit: int,
        decode: Callable[[bytes | bytearray, str], T],
    ) -> T | None:
        """Answer of the first reliable peer that gives one within ALL_S; a reliable peer asks itself."""
        if kind in self._answers:
            with contextlib.suppress(RemoteError):
                return decode(self._answers[kind](about), self._node.peer_id)
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALL_S):
                for asked in reliable:
                    try:
                        name = f"{kind}/{about}" if about else kind
                        data, _ = await fetch(self._node, asked, name, limit, ANSWER_S)
                        return decode(data, asked)
                    except RemoteError as error:
                        _log.debug("no %s from %s: %s", kind, asked, error)
        return None


def summarise(
    signed: SignedManifest,
    adverts: Mapping[str, Advert],
    now: float,
    board: Mapping[str, Sequence[TaskNote]] = MappingProxyType({}),
    told: LogFigures | None = None,
) -> SwarmStatus:
    """Status of a run from adverts, notes on the task board (by peer id), and what the log tells. Pure.

    `now` is in seconds since 1970.
    """
    manifest, told = signed.manifest, told or LogFigures()
    left = tuple(sorted(adverts.keys() - _there(adverts).keys()))
    adverts = _there(adverts)
    closed = {peer[-8:] for peer, advert in adverts.items() if advert.reach == ReachKind.PRIVATE}
    departures = told.departures
    rows = tuple(
        _peer_row(peer, advert, closed, None if departures is None else departures.of(peer))
        for peer, advert in sorted(adverts.items())
    )
    blocks = tuple(
        BlockRow(block=block.index, holders=tuple(row.peer for row in rows if _has(row, block.index)))
        for block in manifest.blocks
    )
    weakest = min(blocks, key=lambda row: len(row.holders))
    coordinators = [row for row in rows if row.role == "coordinator" and row.peer in signed.reliable]
    swarm = SwarmTotals(
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
        left=left,
        blocks=blocks,
        unchecked=_unchecked(manifest, rows),
        leftovers=tuple(_leftovers(board)),
        progress=progress,
        swarm=swarm,
        credit=None if told.ranking is None else _credit(told.ranking, adverts),
        moves=None if told.moves is None else tuple(map(_move_row, told.moves)),
        plan=None if told.plan is None else plan_status(told.plan, rows),
    )


@dataclass(frozen=True, slots=True)
class LogFigures:
    """Answer of reliable peers from the run's log; None: nobody answered, or there is none of it."""

    ranking: Ranking | None = None
    moves: Sequence[Move] | None = None
    departures: DepartureCounts | None = None
    plan: PlanNews | None = None


@dataclass(slots=True)
class Onlooker:
    """A reader of a swarm that takes no part in it."""

    signed: SignedManifest
    _node: Node
    _roster: Roster
    _board: TaskBoard
    _log: FromLog
    _identity: str
    """The peer whose credit is asked for as well."""
    _present: Sequence[str] = ()
    """Reliable peers that were there at the last look, the coordinator first."""
    _told: LogFigures | None = None
    """The newest figures that were fetched."""

    async def adverts(self) -> Mapping[str, Advert]:
        """Current adverts by peer id. Raises `RemoteError` HP-NET-012 if the DHT does not answer."""
        return _there(await self._roster.read())

    async def leaves_per_hour(self) -> Mapping[str, float]:
        """Expected departures an hour by peer id, from a reliable peer; empty if not known. Never raises."""
        told = await self._log.departures(self.signed.reliable)
        return {} if told is None else told.hourly

    async def status(self, *, ranked: bool = True) -> SwarmStatus:
        """Current status; unless `ranked`, with the last known figures of the log.

        Raises as `adverts`.
        """
        from hetpeer.dht.base.runtime import SystemClock
        from hetpeer.peer.arrival.manifest_fetch import amended

        found, board = await asyncio.gather(self._roster.read(), self._board.read())
        adverts = _there(found)
        claimants = {peer for peer, advert in adverts.items() if advert.role == "coordinator"}
        if claimants.isdisjoint(self.signed.reliable):
            self.signed = await amended(self._node, self.signed, sorted(claimants)[:MAX_CLAIMANTS])
        self._present = sorted(
            adverts.keys() & set(self.signed.reliable), key=lambda peer: peer not in claimants
        )
        if ranked:
            self._told = LogFigures(
                *await asyncio.gather(
                    self._log.ranking(self._present, self._identity),
                    self._log.moves(self._present),
                    self._log.departures(self._present),
                    self._log.plan(self._present),
                )
            )
        return summarise(self.signed, found, SystemClock().wall(), board, self._told)

    async def curves(self) -> Curves | None:
        """The run's loss curves, from a reliable peer seen at the last look. Never raises."""
        return await self._log.curves(self._present)


@asynccontextmanager
async def observing(goal: Destination, peer: str = "") -> AsyncIterator[Onlooker]:
    """Join the swarm as an onlooker; the credit of `peer` is asked for as well.

    Raises `LocalError` HP-NET-002 (no peer answers), HP-NET-006 (no peer serves the run), HP-RUN-016.
    """
    from hetpeer.bootstrap.run.durable_files import temporary_folder
    from hetpeer.dht.discovery import Roster, TaskBoard
    from hetpeer.dht.identity.peer_identity import Identity
    from hetpeer.dht.node.node import Node, NodeConfig
    from hetpeer.peer.arrival.manifest_fetch import fetch_manifest

    with temporary_folder("status") as folder:
        identity = Identity.create(folder / "identity.key")
        node = await Node.start(NodeConfig(peers=goal.addresses), identity)
        try:
            signed = (await fetch_manifest(node, goal.addresses, goal.run)).signed
            roster, board = Roster(node, signed.run_id), TaskBoard(node, signed.run_id)
            yield Onlooker(signed, node, roster, board, FromLog(node), peer)
        finally:
            await node.close()


def _there(adverts: Mapping[str, Advert]) -> dict[str, Advert]:
    """Adverts without those of peers that said goodbye."""
    return {peer: advert for peer, advert in adverts.items() if advert.state != LEFT}


def _peer_row(peer: str, advert: Advert, closed: set[str], departures: int | None) -> PeerRow:
    """Row of a peer, by its advert, with its departures by the log."""
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
        ram_bytes=advert.host_bytes or advert.memory_bytes,
        gpu_bytes=advert.gpu_bytes,
        uplink=advert.uplink,
        downlink=advert.downlink,
        up_s=advert.up_s,
        coordinate=advert.coordinate,
        departures=departures,
        reach=advert.reach,
        reach_peers=advert.reach_peers,
        relays=advert.relays,
        links=tuple(
            LinkRow(
                to=n.to,
                bytes_per_second=n.rate,
                ratio=n.ratio,
                saved_bytes=n.saved_bytes,
                why=codec_reason(n),
                trip_s=n.trip_s,
                path="punched" if n.path == "direct" and {n.to, peer[-8:]} <= closed else n.path,
            )
            for n in advert.links
        ),
    )


def _credit(ranking: Ranking, adverts: Mapping[str, Advert]) -> RunCredit:
    def row(one: RankedPeer) -> CreditRow:
        name = adverts[one.peer].name if one.peer in adverts else ""
        return CreditRow(peer=one.peer, name=name, rank=one.rank, credit=one.credit)

    return RunCredit(
        total=ranking.total,
        contributors=ranking.contributors,
        first=tuple(map(row, ranking.first)),
        yours=None if ranking.yours is None else row(ranking.yours),
    )


def _move_row(move: Move) -> MoveRow:
    """Row of a move of blocks."""
    result = move.result
    return MoveRow(
        step=move.step,
        blocks=move.promise.blocks,
        before_s=move.promise.before_s,
        promised_s=move.promise.after_s,
        promised_moving_s=move.promise.moving_s,
        after_s=None if result is None else result.after_s,
        moving_s=None if result is None else result.moving_s,
        settled=result is not None,
        text=move_text(move),
    )


def _leftovers(board: Mapping[str, Sequence[TaskNote]]) -> Iterator[LeftoverRow]:
    for sender, notes in sorted(board.items()):
        for note in notes:
            for left in note.leftovers:
                yield LeftoverRow(
                    block=left.border, sender=sender, step=note.step, microbatches=len(left.ids)
                )


def _unchecked(manifest: Manifest, rows: Sequence[PeerRow]) -> tuple[str, ...]:
    from hetpeer.bootstrap.trust.step_spot_checks import unchecked

    if not manifest.trust.spot_checks:
        return ()
    roster = {row.peer: row.blocks for row in rows if row.holds and row.blocks is not None}
    grouped = manifest.averaging is not None
    return tuple(roster if grouped else unchecked(roster))  # nobody is checked in a grouped run


def _has(row: PeerRow, block: int) -> bool:
    return row.holds and row.blocks is not None and row.blocks[0] <= block < row.blocks[1]


def _speed(coordinators: Sequence[PeerRow], rows: Sequence[PeerRow], blocks: Sequence[BlockRow]) -> float:
    """The coordinator's figure; without one, the speed of the slowest block's holders together."""
    if coordinators:
        return max(row.tokens_per_second for row in coordinators)
    speeds = {row.peer: row.tokens_per_second for row in rows}
    return min(sum(speeds[peer] for peer in block.holders) for block in blocks)


def _progress(
    manifest: Manifest, witnesses: Sequence[PeerRow], adverts: Mapping[str, Advert], speed: float
) -> Progress:
    """Step, loss and seconds left, by the volunteer or reliable peer that is furthest."""
    steps = manifest.training.steps
    furthest = max(witnesses, key=lambda row: row.step, default=None)
    step = min(furthest.step, steps) if furthest else 0
    per_step = manifest.training.batch_size * manifest.data.tokens_per_sample
    return Progress(
        step=step,
        steps=steps,
        loss=adverts[furthest.peer].loss if furthest else None,
        eta_s=(steps - step) * per_step / speed if speed > SLOWEST else None,
    )


def _state(
    progress: Progress, coordinators: Sequence[PeerRow], blocks: Sequence[BlockRow]
) -> tuple[str, str]:
    """(state of the run, reason to wait): finished, waiting, or what the coordinator says."""
    missing = [block.block for block in blocks if not block.holders]
    if progress.step >= progress.steps:
        return "finished", ""
    if not coordinators:
        return "waiting", "no coordinator answers"
    if missing:
        return "waiting", f"nobody holds {block_list(missing)}"
    return coordinators[0].state, ""
