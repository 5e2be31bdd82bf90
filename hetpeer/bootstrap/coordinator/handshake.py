"""Handshake of volunteers: refusal or welcome, and places.

Pure. coordinator.py handles an earlier session of the same volunteer, and the step that it may be in.
"""

from __future__ import annotations

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import last_message
from hetpeer.bootstrap.coordinator.rebalancing import granted
from hetpeer.bootstrap.state.backups import note_backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Disconnect, Effect, Send
from hetpeer.bootstrap.state.placement_policies import is_spared, ranked
from hetpeer.bootstrap.state.planned_seats import PlannedSeats
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class Handshake:
    """Answers to joining volunteers in one term."""

    def __init__(self, context: CoordinatorContext, seats: PlannedSeats) -> None:
        self._context = context
        self._seats = seats

    def refuse(self, peer: str, hello: m.Hello) -> list[Effect]:
        """The answer to a volunteer that cannot take part; empty if it can."""
        answer = self._refusal(peer, hello)
        return [] if answer is None else [Send(peer, answer), Disconnect(peer)]

    def _refusal(self, peer: str, hello: m.Hello) -> m.Message | None:
        """Answer to a Hello that begins no session (version, run, end, older incarnation); None if it may."""
        run = self._context.config.run
        if not hello.understands_us:
            why = f"wire version {hello.wire_version} here, {m.WIRE_VERSION} at the coordinator"
            return m.Rejected(reason="version", why=why)
        if hello.run != run:
            return m.Rejected(reason="run", why=f"this coordinator serves run {run}, not {hello.run}")
        if self._context.end is not None:
            return self._context.end
        known = self._context.members.volunteers.get(peer)
        if known is not None and hello.incarnation < known.incarnation:
            return m.Fenced(why="a newer incarnation of this volunteer is here")
        return None

    def welcome(self, peer: str, hello: m.Hello, now: float) -> list[Effect]:
        """Enter `peer` as a member. It keeps the place that it still holds, if that is possible."""
        context = self._context
        volunteer = VolunteerState.of(peer, hello, now)
        context.members.volunteers[peer] = volunteer
        self._seats.expect(volunteer, now)
        member = hello.place is not None and context.members.adopt(volunteer, hello.place)
        missed = any(held.version == context.history.version - 1 for held in hello.held)
        welcome = m.Welcome(
            line=context.line,
            version=context.history.version,
            member=member,
            places=context.members.places() if member else self._offers(volunteer),
            commit=last_message(context.history) if member and missed else None,
            since=context.history.since_view,
            backup=member and peer in context.members.backups,
        )
        return [Send(peer, welcome)]

    def claim(self, volunteer: VolunteerState, message: m.Claim, now: float) -> list[Effect]:
        """Grant the claimed place, or offer open ones. A volunteer with a place gets no other."""
        if volunteer.place is not None:
            return []
        if not self._context.members.claim(volunteer, message.cluster, (message.begin, message.end)):
            why = "that place was taken meanwhile"
            return [Send(volunteer.peer, m.Refused(why=why, places=self._offers(volunteer)))]
        volunteer.rejoin()
        members, config = self._context.members, self._context.config
        backups = members.backups - {volunteer.peer}  # as such it has lost its place
        last = self._context.history.commits.get(self._context.history.version - 1, {})
        if self._seats.spares(volunteer, now) or (
            volunteer.planned is None
            and is_spared(members, volunteer, config.asks, last.get("seconds"), config.placement)
        ):
            backups |= {volunteer.peer}
        noted = [] if backups == members.backups else note_backups(self._context, backups)
        return [*noted, Send(volunteer.peer, granted(self._context, volunteer))]

    def _offers(self, volunteer: VolunteerState) -> tuple[m.Place, ...]:
        """Places to choose from, best first. The first claim of a place counts; others get a new ranking.

        A volunteer that a plan names gets its seat and no choice, if that is free and fits its memory.
        """
        config = self._context.config
        places = ranked(self._context.members, volunteer, config.asks, config.placement)
        own = [(p.cluster, (p.begin, p.end)) == volunteer.planned and volunteer.has_room(p) for p in places]
        if not any(mine and place.open for mine, place in zip(own, places, strict=True)):
            return places
        return tuple(
            place if mine else place.model_copy(update={"open": False})
            for mine, place in zip(own, places, strict=True)
        )
