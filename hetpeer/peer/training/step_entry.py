"""The peers of a step: links to keep, introductions of late joiners, and leftovers (docs/protocol.md).

Links. In a grouped run partners change from one averaging to the next; a new link takes several round trips
to open, and more until it is fast, so links to the latest partners are kept.

Introductions. The core decides what an introduction means. Here a ticket is checked, the link for the late
joiner opened, and what the task board showed us written down.

Leftovers. The task board in the DHT shows what senders keep for holders that they do not know. To ask one is
to introduce ourselves to it; it then sends what it keeps. A holder looks at the board while it has nothing to
do in a step; one that came into the step while it ran looks at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect, StepId
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.position import Origin
from hetpeer.averaging.member.tensor_heads import Introduction
from hetpeer.averaging.member.work_in_progress import WorkInProgress
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.admission.step_tickets import check
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import RemoteError, short_id
from hetpeer.dht.discovery import MAX_IDS, NOTE_TTL_S, LeftoverIds, TaskBoard, TaskNote, board_shard
from hetpeer.peer.training.evidence_log import EvidenceLog
from hetpeer.peer.transport.data_plane import DataPlane

KEPT = 16
"""Peers we exchanged parameters with lately, and ourselves: each has part of our memory for its tensors."""


class LinkedPeers:
    """The linked peers of one volunteer; iterates over their peer ids."""

    def __init__(self) -> None:
        self._group: frozenset[str] = frozenset()
        """All who take part in what we averaged last, or average now."""
        self._met: dict[str, None] = {}
        """Peers that we exchange parameters with, the latest ones last."""

    def averages(self, roster: Mapping[str, Range], place: Range | None) -> None:
        """We average with `roster`: parameters are exchanged with all that hold a block of `place`."""
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


@dataclass(eq=False)
class StepEntry:
    """Introductions of one volunteer. `perform` carries out the core's effects, `tell` sends evidence."""

    _member: Member
    _plane: DataPlane
    _run_id: str
    _membership_config: MembershipConfig
    _evidence: EvidenceLog
    _perform: Callable[[Sequence[Effect]], None]
    _tell: Callable[[str], None]
    _linked: LinkedPeers = field(default_factory=LinkedPeers)

    def begun(self, begin: m.Begin) -> None:
        """A step begins: keep links to its volunteers, set our introduction for any that may not know us."""
        if begin.group:
            self._linked.averages(begin.roster, self._member.place)
        self._plane.keep_only({*begin.roster, *self._linked})
        if begin.behind or begin.group:
            return  # its roster names us; a late joiner of the step before it may not know us yet
        place = self._member.place
        self._plane.introduction(
            None
            if place is None
            else Introduction(
                line=begin.line,
                step=begin.step,
                incarnation=self._member.life.hello.incarnation,
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
        for line in self._evidence.found(step, self._member.life.hello.incarnation, sender, found):
            self._tell(line)
        self._plane.introduce(sender)

    def introduced(self, peer: str, head: Introduction) -> None:
        """`peer` takes part in a step. Raises `ProtocolError` for a ticket that no coordinator has signed."""
        origin, member = Origin(peer, head.incarnation, head.step_id), self._member
        if not member.work.knows(origin):
            if member.work.step is None or member.work.step.on_wire != head.step_id or not head.ticket:
                return  # of another step, or from a peer that has left and does not know it yet
            check(self._run_id, self._membership_config.peers, peer, head)
            self._plane.admit(peer)
            blocks = f"{head.begin}-{head.end - 1}"
            _log.info("%s came into step %d, for blocks %s", short_id(peer), head.step, blocks)
        self._perform(member.work.introduced(origin, (head.begin, head.end)))


LOOK_S = 0.5
IDLE_S = 2.0
"""Seconds without work before a holder that began the step looks for leftovers, and between two looks."""


class LeftoverWatch:
    """The task board for `keeper`, with peer id `me`: leftovers are posted, and those of others asked for by
    `asker`. Microbatches of the run have ids below `ids`.
    """

    def __init__(self, me: str, board: TaskBoard, keeper: WorkInProgress, asker: StepEntry, ids: int) -> None:
        self._me = me
        self._ids = ids
        self._board = board
        self._keeper = keeper
        self._asker = asker
        self._shown: dict[int, TaskNote] = {}
        """Shard → our note there."""
        self._shown_at = 0.0
        self._idle_since: float | None = None

    async def watch_forever(self) -> None:
        """Post and look until cancelled. A DHT that does not answer is asked again at the next turn."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._show(clock())
                await self._look(clock())
            except RemoteError as error:
                _log.debug("the task board: %s", error)

    async def _show(self, now: float) -> None:
        """Post our leftovers on the task board, when they change and before the post expires."""
        notes = self._notes()
        for shard in self._shown.keys() - notes.keys():
            await self._board.post(shard, self._shown[shard].model_copy(update={"leftovers": ()}))
        if notes and (notes != self._shown or now - self._shown_at > NOTE_TTL_S / 2):
            self._shown_at = now
            for shard, note in notes.items():
                _log.info("leftovers of step %d on the board: %s", note.step, note.leftovers)
                await self._board.post(shard, note)
        self._shown = notes

    def _notes(self) -> dict[int, TaskNote]:
        """Task board shard → note on the leftovers that we keep."""
        step = self._keeper.step
        if step is None:
            return {}
        shards: dict[int, list[LeftoverIds]] = {}
        for border, ids in sorted(self._keeper.leftovers().items()):
            shards.setdefault(board_shard(border), []).append(LeftoverIds(border=border, ids=ids[:MAX_IDS]))
        return {
            shard: TaskNote(term=step.line.term, view=step.line.view, step=step.number, leftovers=tuple(left))
            for shard, left in shards.items()
        }

    async def _look(self, now: float) -> None:
        """Ask keepers of leftovers for our blocks for work, once we were idle for IDLE_S."""
        step, place = self._keeper.step, self._keeper.place
        if step is None or place is None or not self._keeper.is_idle:
            self._idle_since = None
            return
        self._idle_since = now if self._idle_since is None else self._idle_since
        if not step.entry and now - self._idle_since < IDLE_S:
            return
        self._idle_since = now
        board = await self._board.read(range(*place))
        if self._keeper.step != step:
            return  # it ended while we read
        partners = self._keeper.partners  # anybody may post there
        for sender, notes in board.items():
            if sender == self._me or sender not in partners:
                continue
            for note in notes:
                if (note.term, note.view, note.step) == (*_line(step), step.number):
                    self._ask(sender, note, place)

    def _ask(self, sender: str, note: TaskNote, place: tuple[int, int]) -> None:
        for found in note.leftovers:
            ids = tuple(dict.fromkeys(number for number in found.ids if number < self._ids))
            if ids and place[0] <= found.border < place[1]:
                self._asker.ask(sender, LeftoverIds(border=found.border, ids=ids))


def _line(step: StepId) -> tuple[int, int]:
    return step.line.term, step.line.view
