"""How volunteers come in: the handshake, places, and what they hold.

Pure. Whether a newcomer displaces an earlier session of the same volunteer, and what that means for the step in
progress, is the coordinator's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import last_message
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Disconnect, Effect, Send
from hetpeer.bootstrap.state.placement import ranked
from hetpeer.bootstrap.state.volunteer import Volunteer


class Handshake:
    """The door of one reign."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def refuse(self, peer: str, hello: m.Hello) -> list[Effect]:
        """The answer to a volunteer who cannot take part; nothing if it can."""
        answer = self._refusal(peer, hello)
        return [] if answer is None else [Send(peer, answer), Disconnect(peer)]

    def _refusal(self, peer: str, hello: m.Hello) -> m.Message | None:
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
        """Enter `peer`; it keeps the place that it still holds, if it can."""
        context = self._context
        volunteer = Volunteer.of(peer, hello, now)
        context.members.volunteers[peer] = volunteer
        member = hello.place is not None and context.members.adopt(volunteer, hello.place)
        missed = any(held.version == context.version - 1 for held in hello.held)
        welcome = m.Welcome(
            line=context.line,
            version=context.version,
            member=member,
            places=context.members.places() if member else self._offers(volunteer),
            commit=last_message(context.history) if member and missed else None,
        )
        return [Send(peer, welcome)]

    def claim(self, volunteer: Volunteer, message: m.Claim) -> list[Effect]:
        """The place is given, or those that are open now are offered. Who has one already does not get another."""
        if volunteer.place is not None:
            return []
        if not self._context.members.claim(volunteer, message.cluster, (message.begin, message.end)):
            why = "that place was taken meanwhile"
            return [Send(volunteer.peer, m.Refused(why=why, places=self._offers(volunteer)))]
        volunteer.rejoin()
        granted = m.Granted(line=self._context.line, begin=message.begin, end=message.end)
        return [Send(volunteer.peer, granted)]

    def _offers(self, volunteer: Volunteer) -> tuple[m.Place, ...]:
        """What it may choose from. Of several who come at once the first gets the place that they all want; for the others places are ranked anew."""
        return ranked(self._context.members, volunteer, self._context.config.asks)

    def holds(self, volunteer: Volunteer, held: Sequence[m.Held], version: int) -> bool:
        """Whether `held` is all of `volunteer`'s place at `version`."""
        blocks = range(*(volunteer.place or (0, 0)))
        return [h.block for h in held] == list(blocks) and all(h.version == version for h in held)
