"""A plan that was given to a run, beside what came of it, in plain words. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hetpeer.peer.limits.amounts import blocks_text

if TYPE_CHECKING:
    from hetpeer.peer.watching.swarm_status import PlanStatus

MANY = 3.0
"""Factor from which a longer step is given as a multiple."""


def plan_text(plan: PlanStatus) -> str:
    """`f4cc since step 0, 2 of 2 at their places: 4.20 s a step planned, 4.41 s measured (+5%)`."""
    when = f"since step {plan.since}" if plan.ended is None else f"not in force since step {plan.ended}"
    seated = sum(seat.standing == "as planned" for seat in plan.seats)
    facts = []
    if plan.planned_s is not None:
        only = " (communication only)" if plan.cost == "dt-fm" else ""
        facts.append(f"{plan.planned_s:.2f} s a step planned{only}")
    if plan.measured_s is not None:
        times = plan.measured_s / plan.planned_s if plan.planned_s else 1.0
        beside = "" if times == 1.0 else f" ({times - 1:+.0%})" if times < MANY else f" ({times:.0f} times)"
        facts.append(f"{plan.measured_s:.2f} s measured{beside}")
    told = f": {', '.join(facts)}" if facts else ""
    return f"{plan.id} {when}, {seated} of {len(plan.seats)} at their places{told}"


def seat_cells(plan: PlanStatus) -> Iterator[tuple[str, str, str]]:
    """(device, planned place, what it has) of each place."""
    for seat in plan.seats:
        now = seat.standing
        if seat.blocks is not None and now == "elsewhere":
            now = f"has {blocks_text(*seat.blocks)}"
        yield seat.device, f"pipeline {seat.pipeline}, {blocks_text(*seat.planned)}", now
