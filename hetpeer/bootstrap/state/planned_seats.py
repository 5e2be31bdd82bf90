"""Seats of a plan that was given: kept free for the volunteers that it names, for a while.

Pure. docs/planning.md, "A plan that is enacted". A seat is reserved while its volunteer is here and has no
place yet, and HELD_S seconds after it was last seen. Then anybody may take it, and its volunteer takes what
is open when it comes. Two volunteers of one name: the first that came has the seat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.run.seat_plan import PlannedSeat, SeatPlan, in_record
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.dht.base.errors import short_id

HELD_S = 120.0
"""Seconds for which a seat is kept for a volunteer that is not there."""


@dataclass(slots=True)
class _Held:
    """One seat and who has it."""

    cluster: int
    seat: PlannedSeat
    seen_at: float
    """Last time at which its volunteer was here, and not at another place; at first the start of the term."""
    peer: str = ""
    """The volunteer that is meant; empty: nobody was seen yet."""

    @property
    def place(self) -> tuple[int, Range]:
        return self.cluster, self.seat.blocks


class PlannedSeats:
    """The seats of the plan that is in force by `history`, for the `members` of one term. None: no plan."""

    def __init__(self, history: History, members: Membership, now: float) -> None:
        self._history, self._members = history, members
        self._plan_id = ""
        self._held: list[_Held] = []
        self.plan: SeatPlan | None = None
        """The plan in force."""
        self.look(now)

    def look(self, now: float) -> None:
        """Note who is here, and reserve the seats of those that are to come."""
        self._read(now)
        members = self._members.volunteers
        reserved = set()
        for held in self._held:
            volunteer = members.get(held.peer)
            if volunteer is not None and (volunteer.place is None or self._is_seated(held)):
                held.seen_at = now
            if now < held.seen_at + HELD_S:
                reserved.add(held.place)
        self._members.reserved.reserve(reserved)

    def expect(self, volunteer: VolunteerState, now: float) -> None:
        """Find the seat of a newcomer, and note it in `volunteer`. One whose seat another has gets none."""
        self._read(now)
        for held in self._held:
            other = self._members.volunteers.get(held.peer)
            free = other is None or other.peer == volunteer.peer
            if free and held.seat.is_of(volunteer.peer, volunteer.name):
                held.peer, volunteer.planned = volunteer.peer, held.place
                break
        self.look(now)

    def holds(self, now: float) -> bool:
        """Whether the plan is kept to: all that it names are at their seats, awaited, or can move there."""
        self.look(now)
        moves = self.moves()
        return self.plan is not None and all(
            held.peer in moves or (now < held.seen_at + HELD_S and not self._is_lost(held))
            for held in self._held
        )

    def spares(self, volunteer: VolunteerState, now: float) -> bool:
        """Whether `volunteer` becomes a backup: it is not in the plan that holds, others have its blocks."""
        if volunteer.planned is not None or not self.holds(now):
            return False
        members = self._members
        others = {
            v.peer: v.place
            for v in members.volunteers.values()
            if v is not volunteer and v.place is not None and not v.slow and v.peer not in members.backups
        }
        return set(members.uncovered(others)).isdisjoint(range(*(volunteer.place or (0, 0))))

    def excuse(self, pause_s: float) -> None:
        """The coordinator did not run for `pause_s` seconds: seats are kept longer by that."""
        for held in self._held:
            held.seen_at += pause_s

    def remarks(self, now: float) -> Iterator[str]:
        """Lines for people on what is not as planned, each of them stable while it is true."""
        for held in self._held:
            seat, place = held.seat, f"its place (pipeline {held.cluster}, {_blocks(held.seat.blocks)})"
            volunteer = self._members.volunteers.get(held.peer)
            same = [v for v in self._members.volunteers.values() if seat.is_of(v.peer, v.name)]
            if volunteer is not None and len(same) > 1:
                first = f"{short_id(held.peer)} came first and has {place}"
                yield (
                    f"{len(same)} volunteers are called {seat.device}: {first}; a plan with peer ids "
                    "(hetpeer status --devices has them) names one of them"
                )
            if volunteer is None and now >= held.seen_at + HELD_S:
                yield f"{seat.device} is not there: {place} is open to others"
            if volunteer is None or volunteer.place is None or self._is_seated(held):
                continue
            if not volunteer.has_room(self._members.place_at(held.place)):
                yield f"{seat.device} has too little memory for {place}: it takes another"
            elif now >= held.seen_at + HELD_S or self._is_lost(held):
                yield f"{seat.device} is not at {place}: it has {_blocks(volunteer.place)}"

    def moves(self) -> dict[str, tuple[int, Range]]:
        """Volunteers that work elsewhere → the seats to which they can move now, all at once."""
        wanted = {
            held.peer: held.place
            for held in self._held
            if (volunteer := self._members.volunteers.get(held.peer)) is not None
            and volunteer.place is not None
            and volunteer.worked
            and not self._is_seated(held)
            and volunteer.has_room(self._members.place_at(held.place))
        }
        while True:
            staying = {
                (v.cluster, v.place) for v in self._members.volunteers.values() if v.peer not in wanted
            }
            possible = {peer: place for peer, place in wanted.items() if place not in staying}
            if len(possible) == len(wanted):
                return possible
            wanted = possible

    def _is_seated(self, held: _Held) -> bool:
        volunteer = self._members.volunteers.get(held.peer)
        return volunteer is not None and (volunteer.cluster, volunteer.place) == held.place

    def _is_lost(self, held: _Held) -> bool:
        """Whether another volunteer has the seat, and is not planned for a third one."""
        return any(
            (v.cluster, v.place) == held.place and v.planned is None
            for v in self._members.volunteers.values()
            if v.peer != held.peer
        )

    def _read(self, now: float) -> None:
        """Take up the plan in force if it has changed."""
        history = self._history
        record = history.plan if history.plan_ended is None else None
        identity = "" if record is None else str(record["id"])
        if identity == self._plan_id:
            return
        self._plan_id = identity
        self.plan = None if record is None else in_record(record)
        self._held = [] if self.plan is None else [_Held(c, seat, now) for c, seat in self.plan.seats()]
        for volunteer in self._members.volunteers.values():
            volunteer.planned = None


def _blocks(place: Range) -> str:
    begin, end = place
    return f"block {begin}" if end - begin == 1 else f"blocks {begin} to {end - 1}"
