"""Between two steps: whom the next one waits for while they fetch the current version, and who fills a gap.

A newcomer need not be waited for: it comes into the step while it runs (late_joiners.py). But who was too slow for that, because steps are short or its
line is, is waited for; each time that this was in vain, half as long. All such waits together take no more than a share of the time that is trained, whoever
comes under however many names: whoever has to come all the same comes into a wait with the others.

Pure. A block that nobody holds makes the run wait: first for whoever had it, then somebody who is redundant elsewhere
takes its place. That the run goes back to a checkpoint is the coordinator's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import CoordinatorState, Effect, Send
from hetpeer.bootstrap.state.membership import Range
from hetpeer.bootstrap.state.volunteer import LifeCycle, Volunteer

PAYS = 1.5
"""A step must take so many times longer than a fetch for somebody to come into it."""
IN_VAIN = 5
"""So often in a row, and it is not waited for any more."""
PATIENCE = 5
"""Who has a place and has not worked there after so many times the sync time-out is not counted on any more."""
MISSES = 3
"""Who was too late for so many steps is waited for in any case."""
SHARE = 0.1
"""Of the time in which steps are trained, so much may be spent on waits for those who are not needed."""
ADVANCE = 2
"""So many sync time-outs of it at the beginning, and saved up at most: all that one newcomer can ask for."""


class StepBarrier:
    """The waiting room of a reign that began at `now`."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        self._context = context
        self._return_by = now + context.config.return_s
        self._waiting_since: float | None = None
        self._sync_by = 0.0
        self._in_vain: Counter[str] = Counter()
        """Peer → for how many borders in a row it was waited for in vain, whatever sessions it has begun meanwhile."""
        self._leisure_s = ADVANCE * context.config.sync_s
        """So long may be waited for those who are not needed."""
        self._waited_to = now
        """What was waited until then is taken from that."""
        self._trained_to = context.version
        """What was trained until that version is in it."""
        self._coming: dict[tuple[str, int, Range], float] = {}
        """Who loads graphs or a state, at which place → since when. Who is prepared waits for us."""
        self._fetching: dict[str, tuple[int, float]] = {}
        """Peer → the version that it was told to fetch, and when."""
        self.fetch_s = 0.0
        """How long the last fetch took; 0 before the first."""

    def look(self, now: float) -> None:
        """Who has been on its way to its place for too long?"""
        on_the_way = {
            (v.peer, v.incarnation, v.place): v
            for v in self._context.members.volunteers.values()
            if v.place is not None and v.life_cycle in (LifeCycle.JOINING, LifeCycle.SYNCING)
        }
        self._coming = {key: self._coming.get(key, now) for key in on_the_way}
        for volunteer in self._context.members.volunteers.values():
            volunteer.slow = False
        for key, volunteer in on_the_way.items():
            volunteer.slow = now - self._coming[key] > PATIENCE * self._context.config.sync_s
        for volunteer in filter(self.keeps_out, self._context.members.volunteers.values()):
            volunteer.slow = True

    def admit_joiners(self, now: float) -> list[Effect]:
        """Prepared volunteers who are waited for, and whose blocks can be had somewhere, are told to fetch them."""
        context = self._context
        self._earn()
        joiners = [v for v in context.members.volunteers.values() if v.life_cycle is LifeCycle.PREPARED]
        joiners = [v for v in joiners if self.available(v.place)]
        joiners = [v for v in joiners if not self.may_rest(v) and not self.keeps_out(v)]
        needed, waits = bool(context.members.uncovered()), context.state is CoordinatorState.SYNCING
        if not needed:
            late = MISSES if self._steps_are_long else 1
            joiners = [v for v in joiners if v.missed >= late and self._in_vain[v.peer] < IN_VAIN]
        if joiners and not waits:
            # whoever has been waited for least often decides: else others would use up what it needs
            wait_s = context.config.sync_s / 2 ** min(self._in_vain[v.peer] for v in joiners)
            if not needed and wait_s > self._leisure_s:
                return []
            self._sync_by, self._waited_to = now + wait_s, now
        return [self.fetch(volunteer, now) for volunteer in joiners]

    def may_rest(self, volunteer: Volunteer) -> bool:
        """Whether it is not to come in now, and others who do hold its blocks, or are about to."""
        disputed_pairs = self._context.disputed_pairs
        if not disputed_pairs.rests(volunteer.peer):
            return False
        others = {
            v.peer: v.place
            for v in self._context.members.volunteers.values()
            if v.place is not None and not v.slow and not disputed_pairs.rests(v.peer)
        }
        return not set(self._context.members.uncovered(others)).intersection(
            range(*(volunteer.place or (0, 0)))
        )

    def _earn(self) -> None:
        """What was trained since the last time gives some leisure."""
        context, most = self._context, ADVANCE * self._context.config.sync_s
        for step in range(self._trained_to, context.version):
            trained_s = float(context.history.commits.get(step, {}).get("seconds", 0.0))
            self._leisure_s = min(self._leisure_s + SHARE * trained_s, most)
        self._trained_to = context.version

    def expects(self) -> bool:
        """Whether somebody comes who can only come in when steps do not overlap."""
        return any(
            self.available(v.place)
            and not v.slow
            and not self.keeps_out(v)
            and self._in_vain[v.peer] < IN_VAIN
            and not self._context.disputed_pairs.rests(v.peer)
            for v in self._context.members.volunteers.values()
            if v.life_cycle in (LifeCycle.PREPARED, LifeCycle.SYNCING)
        )

    def keeps_out(self, volunteer: Volunteer) -> bool:
        """Whether `volunteer` has failed where nobody else could be asked: others may come to its blocks first."""
        return self._context.failures.rests(volunteer.peer)

    @property
    def _steps_are_long(self) -> bool:
        """Whether a fetch that begins with a step is done early enough in it, most likely."""
        last = self._context.history.commits.get(self._context.version - 1, {})
        return 0.0 < PAYS * self.fetch_s < float(last.get("seconds", 0.0))

    def fetched(self, volunteer: Volunteer, version: int, now: float) -> bool:
        """`volunteer` has `version`. Whether it was told to fetch that."""
        told, began = self._fetching.get(volunteer.peer, (None, now))
        if told != version:
            return False
        del self._fetching[volunteer.peer]
        self.fetch_s = now - began
        return True

    def in_time(self, volunteer: Volunteer) -> None:
        """`volunteer` has the current version, and works."""
        del self._in_vain[volunteer.peer]

    def must_wait(self, now: float) -> bool:
        """Whether the step is held up for somebody who fetches."""
        volunteers = self._context.members.volunteers.values()
        syncing = [v for v in volunteers if v.life_cycle is LifeCycle.SYNCING]
        if self._context.state is not CoordinatorState.SYNCING or not syncing:
            return False
        over = now > self._sync_by
        if not self._context.members.uncovered():
            self._leisure_s -= max(0.0, min(now, self._sync_by) - self._waited_to)
            over = over or self._leisure_s <= 0.0
        self._waited_to = now
        if over:
            self._in_vain.update(v.peer for v in syncing)
        return not over

    def available(self, place: Range | None) -> bool:
        """Whether the current version of these blocks can be had somewhere."""
        if place is None:
            return False
        return self._context.stored or all(self._context.members.holders(block) for block in range(*place))

    def fetch(self, volunteer: Volunteer, now: float) -> Effect:
        """Tell `volunteer` where to fetch the current version of its blocks."""
        assert volunteer.place is not None
        volunteer.fetch()
        volunteer.witness = False
        self._fetching[volunteer.peer] = self._context.version, now
        members, blocks = self._context.members, range(*volunteer.place)
        digests: dict[int, str] = {}
        for holder in members.volunteers.values():
            if holder.life_cycle is LifeCycle.READY:
                digests |= {b: d for b, d in holder.digests.items() if b in blocks}
        digests |= {b: d for b, d in self._context.sealed.items() if b in blocks}
        order = m.Fetch(
            line=self._context.line,
            version=self._context.version,
            sources={b: tuple(members.holders(b)) for b in blocks},
            digests=digests,
            origin=(self._context.history.base or {}).get("cluster", 0),
        )
        return Send(volunteer.peer, order)

    def wait(self, now: float) -> None:
        """The run waits for holders of a block: since now, unless it waits already."""
        if self._context.state is not CoordinatorState.WAITING or self._waiting_since is None:
            self._waiting_since = now

    def leave(self) -> None:
        """A step begins, or the run goes back: no wait goes on."""
        self._waiting_since = None

    def gather(self, holders: Iterable[Volunteer], now: float) -> None:
        """The current version is begun with anew: `holders` of it are waited for, for a while. Each says what it still holds."""
        self._return_by = self._sync_by = now + self._context.config.return_s
        self._waited_to = now
        for holder in holders:
            holder.fetch()

    def excuse(self, pause_s: float, now: float) -> None:
        """We did not run for so long: nobody could be heard."""
        self._return_by += pause_s
        self._sync_by += pause_s
        self._waited_to += pause_s
        self._coming = {key: since + pause_s for key, since in self._coming.items()}
        self._context.failures.excuse(pause_s, now)

    def too_late(self, now: float) -> bool:
        """Whether a block is gone for good: not stored, and its holders had their time to come back."""
        return not self._context.stored and now > self._return_by

    def fill_gap(self, now: float) -> list[Effect]:
        """Waited long enough for a block: a volunteer who can be spared is moved to it, if its state can be had."""
        if not self._context.stored or self._waiting_since is None:
            return []
        if now - self._waiting_since < self._context.config.move_s:
            return []
        self._waiting_since = now
        moved = self._context.members.move_redundant()
        if moved is None or moved.place is None:
            return []
        moved.rejoin()
        begin, end = moved.place
        return [Send(moved.peer, m.Granted(line=self._context.line, begin=begin, end=end))]
