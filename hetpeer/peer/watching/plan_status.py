"""A plan beside what came of it: who is at which planned place, and how long steps take. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hetpeer.bootstrap.log.plan_news import PlanNews
from hetpeer.bootstrap.run.seat_plan import PlannedSeat
from hetpeer.peer.watching.swarm_status import PeerRow, PlanStatus, SeatRow


def plan_status(news: PlanNews, rows: Sequence[PeerRow]) -> PlanStatus:
    """The plan of `news` beside the peers of `rows`.

    Adverts say blocks and no pipeline: a volunteer with its planned blocks counts as seated. Of several with
    one name it is the one that has them, if one does.
    """
    volunteers = [row for row in rows if row.role == "volunteer"]
    return PlanStatus(
        id=news.id,
        since=news.since,
        ended=news.ended,
        planned_s=news.plan.step_s,
        cost=news.plan.cost,
        measured_s=news.measured_s,
        seats=tuple(_seat_row(pipeline, seat, volunteers) for pipeline, seat in news.plan.seats()),
    )


def _seat_row(pipeline: int, seat: PlannedSeat, volunteers: Sequence[PeerRow]) -> SeatRow:
    meant = [row for row in volunteers if seat.is_of(row.peer, row.name)]
    row = max(meant, key=lambda row: row.blocks == seat.blocks, default=None)
    if row is None:
        standing = "not there"
    elif row.blocks is None:
        standing = "joining"
    else:
        standing = "as planned" if row.blocks == seat.blocks else "elsewhere"
    return SeatRow(
        device=seat.device,
        peer="" if row is None else row.peer,
        pipeline=pipeline,
        planned=seat.blocks,
        blocks=None if row is None else row.blocks,
        standing=standing,
    )
