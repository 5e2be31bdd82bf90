"""Unassigned volunteers of a grouped run: new ones, and those whose cluster has fallen apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.handshake import Handshake
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import (
    CoordinatorConfig,
    Disconnect,
    Effect,
    NextStep,
    Send,
)
from hetpeer.bootstrap.state.membership import Membership
from hetpeer.bootstrap.state.timeouts import Leases
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


class _Nothing:
    """An agenda without work."""

    over = False

    def take(self, ahead: int = 0) -> NextStep | None:  # noqa: ARG002
        return None

    def saves(self, version: int) -> bool:  # noqa: ARG002
        return False

    def logged(self, record: Mapping[str, Any]) -> None:
        """Nothing to note: it writes no records."""


class UnassignedVolunteers:
    """Volunteers without a place, in the view of all clusters in `term`."""

    def __init__(self, config: CoordinatorConfig, term: int, now: float) -> None:
        line = m.TermView(term=term, view=0, cluster=m.EVERYBODY)
        self._context = CoordinatorContext(
            config, History(whole=False), _Nothing(), line, Membership((), config.costs, only=m.EVERYBODY)
        )
        self._handshake = Handshake(self._context)
        self._leases = Leases(self._context, now)

    def refuse(self, peer: str, hello: m.Hello) -> list[Effect]:
        """The answer to a volunteer that cannot take part; empty if it can."""
        return self._handshake.refuse(peer, hello)

    def close(self, end: m.Finished) -> list[Effect]:
        """Tell those that wait, and those that still come, how the run ended."""
        self._context.end = end
        return [Send(peer, end) for peer in self._context.members.volunteers]

    def __len__(self) -> int:
        return len(self._context.members.volunteers)

    def __contains__(self, peer: str) -> bool:
        return peer in self._context.members.volunteers

    def enter(self, volunteer: VolunteerState, places: Sequence[m.Place]) -> list[Effect]:
        """Offer `places` to `volunteer`."""
        self._context.members.volunteers[volunteer.peer] = volunteer
        welcome = m.Welcome(line=self._context.line, version=0, member=False, places=tuple(places))
        return [Send(volunteer.peer, welcome)]

    def leave(self, peer: str) -> VolunteerState:
        """Remove and return `peer`: it has a place now, or was lost."""
        return self._context.members.volunteers.pop(peer)

    def heard(self, peer: str, now: float) -> None:
        """`peer` has sent a message, or its stream is back."""
        if peer in self:
            self._context.members.volunteers[peer].heard(now)

    def broken(self, peer: str, now: float) -> None:
        """The stream of `peer` broke; it may come back within the grace."""
        self._leases.broken(peer, now)

    def tick(self, now: float) -> list[Effect]:
        """Remove volunteers whose leases ran out."""
        self._leases.tick(now)
        gone = self._leases.expired(now)
        for peer in gone:
            self.leave(peer)
        return [Disconnect(peer) for peer in gone]
