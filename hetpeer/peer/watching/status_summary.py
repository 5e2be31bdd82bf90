"""Summary of a swarm from the adverts of its peers and what the run's log tells. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from hetpeer.bootstrap.log.departure_counts import DepartureCounts
from hetpeer.bootstrap.log.moves import Move
from hetpeer.bootstrap.log.plan_news import PlanNews
from hetpeer.bootstrap.log.record_text import move_text
from hetpeer.dht.discovery import LEFT
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
    from hetpeer.dht.discovery import Advert, TaskNote

SLOWEST = 1e-6
"""Tokens (or samples) a second: below this no remaining time is given."""
HOLDING = frozenset({"ready", "training", "reducing", "applying"})
"""Phases of a volunteer that has the current state of its blocks."""


@dataclass(frozen=True, slots=True)
class LogFigures:
    """Answer of reliable peers from the run's log; None: nobody answered, or there is none of it."""

    ranking: Ranking | None = None
    moves: Sequence[Move] | None = None
    departures: DepartureCounts | None = None
    plan: PlanNews | None = None


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
    left = tuple(sorted(adverts.keys() - present(adverts).keys()))
    adverts = present(adverts)
    closed = {peer[-8:] for peer, advert in adverts.items() if advert.reach == ReachKind.PRIVATE}
    departures = told.departures
    rows = tuple(
        peer_row(peer, advert, closed, None if departures is None else departures.of(peer))
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


def present(adverts: Mapping[str, Advert]) -> dict[str, Advert]:
    """Adverts without those of peers that said goodbye."""
    return {peer: advert for peer, advert in adverts.items() if advert.state != LEFT}


def peer_row(peer: str, advert: Advert, closed: set[str], departures: int | None) -> PeerRow:
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
