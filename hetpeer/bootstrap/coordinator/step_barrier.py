"""The step barrier: volunteers that the next step waits for, late joiners of a step, and who fills a gap.

Pure. Where peers come and go in minutes, a step is too long to wait for its end. A late joiner fetches the
state with which the step began and enters, to share its work or to hold an orphaned block. It fetches from
other holders, or from the checkpoint store if a block has lost its last one. So the step need not be given up
for an orphaned block: others keep their work, and leftovers find the new holder (docs/protocol.md).

A volunteer that is too slow for that, because steps are short or its link is slow, is waited for; half as
long after each wait in vain. All these waits together take at most a share of the training time, however many
names a peer uses. Several such volunteers share one wait.

Between steps, a block without a holder makes the run wait: first for its former holders, then a redundant
volunteer is moved to it. rollback.py decides whether the run goes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.backup_fetches import BackupFetches, known_digests
from hetpeer.bootstrap.coordinator.rebalancing import granted
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.state.backups import needed_backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import AT_BARRIER, CoordinatorState, Effect, Send
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState

PAYS = 1.5
"""A step must be expected to last this many times a fetch for a late joiner to enter it."""
IN_VAIN = 5
"""Waits in vain in a row after which a volunteer is not waited for any more."""
SLOW_AFTER = 5
"""A volunteer that has not worked at its place after this many sync timeouts is not counted on any more."""
MISSES = 3
"""A volunteer that was late for this many steps is waited for even when steps are long."""
LONGEST_ABSENCE_S = 240.0
"""Longest wait for the last holder of a block that fell silent."""
SHARE = 0.1
"""Share of the training time that may be spent waiting for volunteers that are not needed."""
ADVANCE = 2
"""Sync timeouts of such waiting time at the beginning, and at most: one newcomer can use no more."""


class StepBarrier:
    """Waits at the barrier, and late joiners, in a term that began at `now`."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        self._context = context
        self.backup_fetches = BackupFetches(context)
        self.return_by = now + context.config.return_s
        """Holders of the current version are waited for until then."""
        self._settled_at = self.return_by
        """Backups step in at the barrier only after that: at the first step of the term at the latest."""
        self.awaited: set[str] = set()
        """Last holders of a block of the current version that fell silent, and may come back with it."""
        self._waiting_since: float | None = None
        self._sync_by = 0.0
        self._in_vain: Counter[str] = Counter()
        """Peer → waits for it in vain in a row, across its sessions."""
        self._leisure_s = ADVANCE * context.config.sync_s
        """Seconds left to wait for volunteers that are not needed."""
        self._waited_to = now
        """Waiting until then has been subtracted from `_leisure_s`."""
        self._trained_to = context.history.version
        """Training up to that version has been added to `_leisure_s`."""
        self._coming: dict[tuple[str, int, Range], float] = {}
        """(peer, incarnation, place) → since when it loads graphs or a state; not those that wait for us."""
        self._fetching: dict[str, tuple[int, float]] = {}
        """Peer → the version that it was told to fetch, and when."""
        self.fetch_s = 0.0
        """Seconds of the last fetch; 0 before the first."""
        self._hopeless_since: float | None = None
        """Since when an orphaned block waits for a holder while nobody prepares for it."""

    def look(self, now: float) -> None:
        """Mark volunteers as slow that have long been on the way to their place, or make room for others."""
        on_the_way = {
            (v.peer, v.incarnation, v.place): v
            for v in self._context.members.volunteers.values()
            if v.place is not None and v.life_cycle in (LifeCycle.JOINING, LifeCycle.SYNCING)
        }
        self._coming = {key: self._coming.get(key, now) for key in on_the_way}
        for volunteer in self._context.members.volunteers.values():
            volunteer.slow = False
        for key, volunteer in on_the_way.items():
            volunteer.slow = now - self._coming[key] > SLOW_AFTER * self._context.config.sync_s
        for peer in self._context.failures.resting.keys() & self._context.members.volunteers.keys():
            self._context.members.volunteers[peer].slow = True

    def admit_joiners(self, now: float) -> list[Effect]:
        """Tell prepared volunteers to fetch their blocks if they are waited for and the blocks available."""
        context = self._context
        self._earn()
        joiners = [v for v in context.members.volunteers.values() if v.life_cycle is LifeCycle.PREPARED]
        joiners = [v for v in joiners if self.available(v) and v.peer not in context.members.backups]
        joiners = [v for v in joiners if not self.may_rest(v) and v.peer not in context.failures.resting]
        needed, waits = bool(context.members.uncovered()), context.state is CoordinatorState.SYNCING
        if not needed:
            late = MISSES if self._steps_are_long else 1
            joiners = [v for v in joiners if v.missed >= late and self._in_vain[v.peer] < IN_VAIN]
        if joiners and not waits:
            # the one with the fewest waits in vain decides: otherwise others would use up the time it needs
            wait_s = context.config.sync_s / 2 ** min(self._in_vain[v.peer] for v in joiners)
            if not needed and wait_s > self._leisure_s:
                return []
            self._sync_by, self._waited_to = now + wait_s, now
        return [self.fetch(volunteer, now) for volunteer in joiners]

    def may_rest(self, volunteer: VolunteerState) -> bool:
        """Whether `volunteer` rests now, and others hold its blocks or are about to."""
        resting = self._context.disputed_pairs.resting
        if volunteer.peer not in resting:
            return False
        others = {
            v.peer: v.place
            for v in self._context.members.volunteers.values()
            if v.place is not None and not v.slow and v.peer not in {*resting, *self._context.members.backups}
        }
        return not set(self._context.members.uncovered(others)).intersection(
            range(*(volunteer.place or (0, 0)))
        )

    def _earn(self) -> None:
        """Add a share of the newly trained time to the waiting time."""
        context, most = self._context, ADVANCE * self._context.config.sync_s
        for step in range(self._trained_to, context.history.version):
            trained_s = float(context.history.commits.get(step, {}).get("seconds", 0.0))
            self._leisure_s = min(self._leisure_s + SHARE * trained_s, most)
        self._trained_to = context.history.version

    def expects(self) -> bool:
        """Whether a volunteer is coming that can only enter when steps do not overlap."""
        return any(
            self.available(v)
            and not v.slow
            and v.peer not in self._context.members.backups
            and v.peer not in self._context.failures.resting
            and self._in_vain[v.peer] < IN_VAIN
            and v.peer not in self._context.disputed_pairs.resting
            for v in self._context.members.volunteers.values()
            if v.life_cycle in (LifeCycle.PREPARED, LifeCycle.SYNCING)
        )

    @property
    def _steps_are_long(self) -> bool:
        """Whether a fetch that begins with a step most likely ends early enough in it."""
        last = self._context.history.commits.get(self._context.history.version - 1, {})
        return 0.0 < PAYS * self.fetch_s < float(last.get("seconds", 0.0))

    def lets_in(
        self,
        volunteer: VolunteerState,
        version: int,
        held: Sequence[m.Held],
        step: CoordinatedStep | None,
        now: float,
    ) -> bool:
        """`volunteer` holds all of its place at `version`, the states `held`. Returns whether it works from
        now on, at the barrier or in the running `step`; otherwise it prepares for a later version.
        """
        asked, began = self._fetching.get(volunteer.peer, (None, now))
        if asked == version:
            del self._fetching[volunteer.peer]
            if not (volunteer.worked and version == self._context.history.checkpoint_version):
                self.fetch_s = now - began  # else it may have had a copy of that checkpoint
        context = self._context
        if volunteer.peer in context.members.backups:
            self.backup_fetches.holds(volunteer, version, held, now)
            return False
        if volunteer.has(version) and volunteer.warm != (version, {one.block: one.digest for one in held}):
            volunteer.prepare()  # as a backup it said something else of its states
            volunteer.warm = None
            return False
        between_steps = context.state in AT_BARRIER and not self.may_rest(volunteer)
        welcome = between_steps or self.takes(step, volunteer)
        if version != context.history.version or not welcome or volunteer.peer in context.failures.resting:
            volunteer.prepare()
            volunteer.missed += asked == version  # else all would wait each time for one that is always late
            return False
        volunteer.work()
        self.awaited.discard(volunteer.peer)
        del self._in_vain[volunteer.peer]
        return True

    def must_wait(self, now: float) -> bool:
        """Whether the next step is held up for volunteers that fetch."""
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

    def available(self, volunteer: VolunteerState) -> bool:
        """Whether `volunteer` has the current version of its blocks, or can fetch it somewhere."""
        members, history = self._context.members, self._context.history
        if volunteer.place is None:
            return False
        here = history.stored or volunteer.has(history.version)
        return here or all(members.holders(block) for block in range(*volunteer.place))

    def stepping_in(self, now: float) -> list[str]:
        """Backups that are to work from now on, since a block of their places has no other volunteer.

        Before the first step of a term volunteers have time to come back first.
        """
        if self._context.state in AT_BARRIER and now < self._settled_at:
            return []
        return [v.peer for v in needed_backups(self._context.members, self._context.history.version)]

    def fetch(self, volunteer: VolunteerState, now: float) -> Effect:
        """Tell `volunteer` where to fetch the current version of its blocks."""
        assert volunteer.place is not None
        volunteer.fetch()
        volunteer.witness = False
        self._fetching[volunteer.peer] = self._context.history.version, now
        members, history, line = self._context.members, self._context.history, self._context.line
        # Reliable peers may have another cluster's state of the same number: a name of our own finds none.
        origin = (history.base or {}).get("cluster", 0) if history.stored else line.cluster
        order = m.Fetch(
            line=line,
            version=history.version,
            sources={b: tuple(members.holders(b)) for b in range(*volunteer.place)},
            digests=known_digests(self._context, volunteer),
            origin=origin,
        )
        return Send(volunteer.peer, order)

    def wait(self, now: float) -> None:
        """The run waits for holders of a block: since now, unless it waits already."""
        if self._context.state is not CoordinatorState.WAITING or self._waiting_since is None:
            self._waiting_since = now

    def leave(self) -> None:
        """End the wait: a step begins, or the run rolls back."""
        self._waiting_since = None
        self._settled_at = 0.0
        self.awaited.clear()

    def gather(self, holders: Iterable[VolunteerState], now: float) -> None:
        """Wait for the `holders` of the version to begin anew with, to report what they still hold."""
        self.return_by = self._sync_by = now + self._context.config.return_s
        self._waited_to = now
        for holder in holders:
            holder.fetch()

    def await_back(self, peers: Iterable[str], kept_version: int, now: float) -> None:
        """Wait for `peers`, the last holders of a block, as long as the steps since `kept_version` would take
        to train again.
        """
        history = self._context.history
        steps = range(kept_version, history.version)
        again_s = sum(float(history.commits.get(step, {}).get("seconds", 0.0)) for step in steps)
        absence_s = max(self._context.config.absence_s, min(again_s, LONGEST_ABSENCE_S))
        self.await_until(peers, now + absence_s)

    def await_shortly(self, peers: Iterable[str], now: float) -> None:
        """Wait for `peers` as long as a volunteer needs that was only cut off: a backup can take over."""
        self.await_until(peers, now + self._context.config.cut_off_s)

    def await_until(self, peers: Iterable[str], until: float) -> None:
        """Wait for `peers`, the last holders of a block, until then."""
        self.awaited.update(peers)
        self.return_by = until

    def await_another(self, now: float) -> None:
        """Wait for a volunteer that has, or fetches, the version of a block whose last holder left."""
        self.return_by = max(self.return_by, now + self._context.config.absence_s)

    def awaits_no_more(self, peer: str, now: float) -> None:
        """`peer` is back without its state. If nobody else is awaited, the wait is over."""
        if peer in self.awaited:
            self.awaited.discard(peer)
            self.return_by = self.return_by if self.awaited else now

    def excuse(self, pause_s: float, now: float) -> None:
        """Postpone all deadlines: the coordinator did not run for `pause_s` seconds and could hear nobody."""
        self.return_by += pause_s
        self._settled_at += pause_s
        self._sync_by += pause_s
        self._waited_to += pause_s
        self._coming = {key: since + pause_s for key, since in self._coming.items()}
        self._context.failures.excuse(pause_s, now)

    def too_late(self, now: float) -> bool:
        """Whether a block is lost for good: not stored, and its holders had their time to come back."""
        return not self._context.history.stored and now > self.return_by

    def fill_gap(self, now: float) -> list[Effect]:
        """Move a redundant volunteer to a block without a holder for `move_s`, if its state is stored."""
        if not self._context.history.stored or self._waiting_since is None:
            return []
        if now - self._waiting_since < self._context.config.move_s:
            return []
        self._waiting_since = now
        moved = self._context.members.move_redundant()
        if moved is None or moved.place is None:
            return []
        moved.rejoin()
        moved.warm = None
        return [Send(moved.peer, granted(self._context, moved))]

    # ── late joiners ────────────────────────────────────────────────────────────────────────────────────────

    def fetch_late(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """Tell prepared volunteers to fetch the state of `step`, if it needs or could still use them."""
        return [
            self.fetch(volunteer, now)
            for volunteer in self._outside(step)
            if volunteer.life_cycle is LifeCycle.PREPARED
            and self.available(volunteer)
            and (self._is_missing(step, volunteer) or self._pays(step, volunteer, now))
        ]

    def takes(self, step: CoordinatedStep | None, volunteer: VolunteerState) -> bool:
        """Whether `volunteer`, which has the current state, enters the running step."""
        if step is None or volunteer not in self._outside(step):
            return False
        welcome = not step.shuts_out(volunteer.peer) and not step.reduction.under_way
        return self._is_missing(step, volunteer) or welcome

    def hopeless(self, step: CoordinatedStep, now: float) -> bool:
        """Whether nobody prepared for an orphaned block in `move_s`, but a redundant volunteer could move."""
        members, blocks = self._context.members, step.orphaned
        if self.awaited:
            return False
        coming = {b for v in self._outside(step) if not v.slow for b in range(*(v.place or (0, 0)))}
        if coming.issuperset(blocks):
            self._hopeless_since = None
            return False
        if self._hopeless_since is None:
            self._hopeless_since = now
        return now - self._hopeless_since >= self._context.config.move_s and members.spare() is not None

    def _outside(self, step: CoordinatedStep) -> list[VolunteerState]:
        """Volunteers with a place that could enter."""
        here = [v for v in self._context.members.volunteers.values() if v.place is not None]
        kept_out = step.roster.keys() | self._context.failures.resting.keys() | self._context.members.backups
        return [v for v in here if v.peer not in kept_out]

    def _is_missing(self, step: CoordinatedStep, volunteer: VolunteerState) -> bool:
        """Whether the step cannot end without a holder of `volunteer`'s place."""
        return not set(step.orphaned).isdisjoint(range(*(volunteer.place or (0, 0))))

    def _pays(self, step: CoordinatedStep, volunteer: VolunteerState, now: float) -> bool:
        if step.shuts_out(volunteer.peer) or step.reduction.under_way:
            return False
        return step.remaining_s(now) >= PAYS * self.fetch_s
