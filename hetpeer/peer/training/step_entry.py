"""The peers of a step: links to keep, and introductions of late joiners (docs/protocol.md, leftovers).

The core decides what an introduction means. Here a ticket is checked, the link for the late joiner opened,
and what the task board showed us written down. In a grouped run partners change from one averaging to the
next; a new link takes several round trips to open, and more until it is fast, so links to the latest partners
are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.member import Effect, Member, Origin
from hetpeer.averaging.member.tensor_heads import Introduction
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.admission.step_tickets import check
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import short_id
from hetpeer.dht.discovery import LeftoverIds
from hetpeer.peer.training.evidence_log import EvidenceLog
from hetpeer.peer.transport.data_plane import DataPlane

KEPT = 16
"""Peers that parameters were exchanged with lately, ourselves included: each has a part of our memory for its
tensors.
"""


class LinkedPeers:
    """The linked peers of one volunteer; iterates over their peer ids."""

    def __init__(self) -> None:
        self._group: frozenset[str] = frozenset()
        """All who take part in what we averaged last, or average now."""
        self._met: dict[str, None] = {}
        """Peers that we exchange parameters with, the latest ones last."""

    def averages(self, roster: Mapping[str, Range], place: Range | None) -> None:
        """We average with `roster` and hold `place`: parameters are exchanged with all that hold a block of
        it.
        """
        self._group = frozenset(roster)
        begin, end = place or (0, 0)
        for peer, (first, last) in roster.items():
            if first < end and begin < last:
                self._met.pop(peer, None)
                self._met[peer] = None
        for peer in list(self._met)[:-KEPT]:
            del self._met[peer]

    def forget(self, peers: Collection[str]) -> None:
        """Forget `peers`, which have left."""
        self._group = self._group.difference(peers)
        self._met = {peer: None for peer in self._met if peer not in peers}

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.union(self._met))


_log = logging.getLogger(__name__)


class StepEntry:
    """Introductions of one volunteer. `perform` carries out the core's effects, `tell` sends evidence to the
    coordinator.
    """

    def __init__(
        self,
        member: Member,
        plane: DataPlane,
        run_id: str,
        membership_config: MembershipConfig,
        evidence: EvidenceLog,
        perform: Callable[[Sequence[Effect]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._member = member
        self._plane = plane
        self._run_id = run_id
        self._membership_config = membership_config
        self._evidence = evidence
        self._perform = perform
        self._tell = tell
        self._linked = LinkedPeers()

    def begun(self, begin: m.Begin) -> None:
        """A step begins here: keep links to its volunteers, and set our introduction for those that may not
        know us.
        """
        if begin.group:
            self._linked.averages(begin.roster, self._member.place)
        self._plane.keep_only({*begin.roster, *self._linked})
        if begin.behind:
            return  # its roster names us; a late joiner of the step before it may not know us yet
        place = self._member.place
        self._plane.introduction(
            None
            if place is None
            else Introduction(
                line=begin.line,
                step=begin.step,
                incarnation=self._member.hello.incarnation,
                begin=place[0],
                end=place[1],
                ticket=begin.ticket,
            )
        )

    def left(self, message: m.Gone) -> None:
        """Volunteers that have left, as the coordinator says."""
        self._linked.forget(message.peers)
        self._plane.drop_peers(message.peers)

    def joined(self, message: m.Joined) -> None:
        """The coordinator says who came in."""
        for entrant in message.entrants:
            self._plane.admit(entrant.peer)

    def ask(self, sender: str, found: LeftoverIds) -> None:
        """The board says that `sender` keeps microbatches for us."""
        step = self._member.work.step
        assert step is not None
        failpoints.reached("ask_leftovers")
        for line in self._evidence.found(step, self._member.hello.incarnation, sender, found):
            self._tell(line)
        self._plane.introduce(sender)

    def introduced(self, peer: str, head: Introduction) -> None:
        """`peer` says that it takes part in a step. Raises `ProtocolError` for a ticket that no coordinator
        has signed.
        """
        origin, member = Origin(peer, head.incarnation, head.step_id), self._member
        if not member.work.knows(origin):
            if member.work.step is None or member.work.step.on_wire != head.step_id or not head.ticket:
                return  # of another step, or from a peer that has left and does not know it yet
            check(self._run_id, self._membership_config.peers, peer, head)
            self._plane.admit(peer)
            blocks = f"{head.begin}-{head.end - 1}"
            _log.info("%s came into step %d, for blocks %s", short_id(peer), head.step, blocks)
        self._perform(member.work.introduced(origin, (head.begin, head.end)))
