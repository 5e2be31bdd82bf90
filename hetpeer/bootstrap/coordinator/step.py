"""One step at the coordinator: from Begin to the exact cover, which step_reduction.py then reduces.

Pure. It hands out ids and keeps the ledger (step_ledger.py). After each event step_verdicts.py looks at
`reduction` and `failed`, and machine.py at `evaluated_only`: they decide what follows for the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.routing import Assignments
from hetpeer.bootstrap.coordinator.step_ledger import StepLedger
from hetpeer.bootstrap.coordinator.step_reduction import StepReduction
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, NextStep, Send
from hetpeer.bootstrap.state.failed_microbatches import FailedMicrobatch, FailureReports
from hetpeer.bootstrap.state.timeouts import AdaptiveTimeouts, ProgressTimer
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.bootstrap.state.work_shares import few, link_costs, rates, shunned
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.links.adaptive_ratio import warmed_up


class CoordinatedStep:
    """The next step, with the members that are ready now.

    `behind`: versions to be made before it; `mean`: the one among them that installs a mean, if any.
    `coming`: volunteers on the way to blocks that nobody holds. Routes lead through them; what others have
    for them is left over until they enter.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        work: NextStep,
        timeouts: AdaptiveTimeouts,
        now: float,
        behind: int = 0,
        mean: int | None = None,
        coming: Sequence[VolunteerState] = (),
    ) -> None:
        config, members = context.config, context.members
        self._context = context
        first = len(config.sizes)
        train = range(first if work.trains else 0)
        evaluation = range(first, first + (config.evaluation_microbatches if work.evaluates else 0))
        self.number = context.history.version + behind
        self.behind = behind
        """Number of versions by which the step's parameters are older than `number`."""
        self._mean = mean
        self.batch = work.batch
        self.workers = work.workers
        self._work = work
        self.began_at = now
        self._coming = {one.peer: one.place for one in coming if one.place is not None}
        self.roster, ready = members.roster() | self._coming, members.ready()
        speeds = rates([*ready, *coming], members.costs)
        most = warmed_up(config.link_ratio, work.batch, config.link_warmup)
        limited = context.issue_limits.limited
        self._targets = context.ratio_choice.targets(ready, most, config.compression, limited)
        links = link_costs(ready, speeds, config.compression, self._targets, mixed=config.checks is not None)
        apart = context.reputation.apart | shunned(ready)
        self.ledger = StepLedger(train, evaluation, members.blocks)
        self.sizes = dict(enumerate(config.sizes))
        """Training id → its samples."""
        self.weights = self.sizes if config.weights is None else dict(enumerate(config.weights(work.batch)))
        """Training id → its weight in the mean loss."""
        self._told = () if config.weights is None else tuple(self.weights.values())
        weights = config.evaluation_weights or [1] * config.evaluation_microbatches
        self.evaluation_weights = dict(enumerate(weights, first))
        """Held-out id → its weight in the mean held-out loss."""
        counts = {**self.weights, **self.evaluation_weights}
        for microbatch in (*train, *evaluation):
            bad = config.skips and self.bad_key(microbatch) in context.history.bad
            if bad or not counts[microbatch]:
                self.ledger.skip(microbatch)
        self._failure: FailedMicrobatch | None = None
        self._timeouts = timeouts
        self.line = context.line
        self._blocks = members.blocks
        self._incarnations = {peer: members.volunteers[peer].incarnation for peer in self.roster}
        self._entries = 0
        self._entrants: dict[str, m.Entrant] = {}
        """Late joiners that are not announced to everybody yet."""
        self._ways = Assignments(
            sorted(self.ledger.ids | self.ledger.evaluation),
            self.roster,
            members.blocks,
            speeds,
            self.ledger.undone,
            self.ledger.holder,
            links,
            context.issue_limits.limits(self.roster, len(train) or len(evaluation)),
            apart,
        )
        self.reduction = StepReduction(
            context, self.number, self.roster, self.ledger, self._ways.route_taken, timeouts, now
        )
        self._failures = FailureReports()
        self._trials: dict[int, str | None] = {}
        """Microbatch that the coordinator computes itself → what volunteers say of it; None: it could."""
        self._progress = ProgressTimer(now)
        self.stalls = 0
        """Number of times that work was handed out again since the last count."""

    def begin(self) -> list[Effect]:
        """Begin messages for the whole roster, with the first routes."""
        tasks = self._ways.tasks()
        self.leave(self._coming)  # they enter when they have the state
        return [Send(peer, self._begin(peer, tasks.get(peer, ()))) for peer in self.roster]

    def _begin(self, peer: str, tasks: tuple[m.Task, ...], entry: int = 0) -> m.Begin:
        """Begin message for `peer`; `entry`: number of its late entry, 0 for the roster's first members."""
        return m.Begin(
            line=self.line,
            step=self.number,
            batch=self.batch,
            microbatches=len(self._context.config.sizes),
            roster=dict(self.roster),
            incarnations=dict(self._incarnations),
            tasks=tasks,
            target=self._targets.get(peer, max(self._targets.values(), default=0.0)),
            behind=self.behind,
            mean=self._mean,
            entry=entry,
            weights=self._told if self.roster[peer][1] == self._blocks else (),
        )

    @property
    def evaluated_only(self) -> bool:
        """Whether the step only evaluates the final state, and is complete."""
        return not self._work.trains and self.ledger.complete()

    @property
    def nothing_left(self) -> str | None:
        """Why the step cannot be decided: nothing is left that can be computed. None otherwise."""
        for needed, left, what in (
            (self._work.trains, self.ledger.ids, "microbatch"),
            (self._work.evaluates, self.ledger.evaluation, "held-out microbatch"),
        ):
            if needed and not left:
                weighed = ", or all have the weight 0" if self._context.config.weights else ""
                return f"no {what} of step {self.number} can be computed{weighed}"
        return None

    def bad_key(self, microbatch: int) -> tuple[int | None, int]:
        """Key of `microbatch` in `History.bad`: held-out ids are the same in every batch."""
        return (self.batch if microbatch < len(self._context.config.sizes) else None), microbatch

    def failed(self) -> FailedMicrobatch | None:
        """The microbatch that all holders of some block have failed since this was last asked."""
        failure, self._failure = self._failure, None
        return failure

    def blamed(self) -> Mapping[str, int]:
        """Holder → ids that were taken from it and were most likely stuck there."""
        return self._ways.blamed(self.counted())

    def counted(self) -> dict[str, int]:
        """Holder → ids that it counts in the latest plan."""
        counted: dict[str, int] = {}
        for sums in self.reduction.covers.values():
            for holder, ids in sums:
                counted[holder] = max(counted.get(holder, 0), len(ids))
        return counted

    # ── what holders say ────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """Note a report of `peer`, which is on the roster. Raises `ProtocolError`, with nothing changed."""
        match message:
            case m.Sealed():
                return self._sealed(peer, message, now)
            case m.Evaluated():
                return self._evaluated(peer, message, now)
            case m.Failed():
                return self._failed(peer, message, now)
            case _:
                return self.reduction.receive(peer, message, now)

    def _sealed(self, peer: str, message: m.Sealed, now: float) -> list[Effect]:
        """Note a report of a slot: each block counts or is refused; blocks not held never count."""
        self._check(peer, message)
        begin, end = self.roster[peer]
        theirs = [part for part in message.contents if begin <= part.begin and part.end <= end]
        verdict = self.ledger.report(peer, message.slot, theirs, message.losses)
        if verdict is None:
            return []
        settled = m.Settled(line=self.line, step=self.number, slot=message.slot, refused=verdict.refused)
        effects: list[Effect] = [Send(peer, settled)]
        if verdict.progress:
            effects += self.reduction.checks.accepted(peer, theirs, verdict.refused)
        for rival, blocks in verdict.evicted.items():
            self.reduction.checks.lost(rival)
            evict = m.Evict(line=self.line, step=self.number, blocks=tuple(blocks))
            effects.append(Send(rival, evict))
        if verdict.progress:
            self._counted(now)
        return [*effects, *self._hand_out(verdict.reopened), *self.advance(now)]

    def _check(self, peer: str, message: m.Sealed) -> None:
        """Check that blocks are in order and ids of this step: else one report could reopen thousands."""
        checked_to, known = 0, self.ledger.ids | self.ledger.skipped
        for part in message.contents:
            if len(known.intersection(part.ids)) < len(part.ids):
                raise ProtocolError(f"a report of ids that are not of step {self.number}", peer=peer)
            if not checked_to <= part.begin < part.end:
                raise ProtocolError("a report whose blocks are out of order", peer=peer)
            checked_to = part.end
        if not message.losses.keys() <= known:
            raise ProtocolError(f"losses of ids that are not of step {self.number}", peer=peer)

    def _evaluated(self, peer: str, message: m.Evaluated, now: float) -> list[Effect]:
        """Note losses and hits of evaluation microbatches, which the holder of the last block reports."""
        holds_the_last = self.roster[peer][1] == self._blocks
        if not holds_the_last or not self.ledger.evaluated(message.losses, message.hits):
            return []
        self._counted(now)
        return self.advance(now)

    def _counted(self, now: float) -> None:
        if self.stalls and self._ways.taken:
            self._timeouts.found()
        self.stalls = 0
        self._progress.over(now)

    def _failed(self, peer: str, message: m.Failed, now: float) -> list[Effect]:
        """`peer` could not compute a microbatch: route it past the peer to blame.

        The input from another peer may be at fault, and the reporter may be wrong. So only a peer that failed
        the microbatch itself counts when nobody else is left.
        """
        known = message.id in self._ways and self.ledger.is_undone(message.id)
        there = known and self._ways.may_be_at(message.id, peer)
        if not (there and self._failures.hears(message.id, peer)):
            return self.part(peer, message.given)  # it may have come there some other way
        culprit = message.given or peer
        self._failures.add(message.id, peer, culprit if culprit in self.roster else "")
        self._progress.over(now)
        self._failure = self._nobody_can(message.id, message.why)
        if self._failure is not None:
            return []
        again = self._hand_out({message.id}, self._failures.who_else(message.id, self.roster, self._blocks))
        return [*again, *self.part(peer, culprit)]

    def _nobody_can(self, microbatch: int, why: str) -> FailedMicrobatch | None:
        """The failure of `microbatch` at blocks whose holders have all failed it, if there are any."""
        blocks = self._failures.nobody_can(microbatch, self.roster)
        if not blocks:
            return None
        holders = [p for p, (begin, end) in self.roster.items() if any(begin <= b < end for b in blocks)]
        return FailedMicrobatch(
            batch=self.batch,
            id=microbatch,
            blocks=blocks,
            holders=tuple(sorted(holders)),
            times=self._failures.times(microbatch),
            step=self.number,
            what=why,
        )

    def begins_trial(self, failure: FailedMicrobatch) -> bool:
        """Note that the coordinator is about to compute the microbatch of `failure`; False: it did before."""
        fresh = failure.id not in self._trials
        self._trials.setdefault(failure.id, failure.what)
        return fresh

    def tried(self, microbatch: int) -> None:
        """Note that the coordinator found nothing wrong with `microbatch`: volunteers' failures count."""
        why, self._trials[microbatch] = self._trials[microbatch], None
        self._failure = self._nobody_can(microbatch, why or "")

    def awaits_trial(self, microbatch: int) -> bool:
        """Whether `microbatch` is undone, and what the coordinator finds of it is not known yet."""
        return self._trials.get(microbatch) is not None and self.ledger.is_undone(microbatch)

    def skip(self, microbatch: int, now: float) -> list[Effect]:
        """Count `microbatch` nowhere. All report what is done: they may wait for a slot that never fills."""
        evicted, reopened = self.ledger.skip(microbatch)
        effects: list[Effect] = []
        for peer, blocks in evicted.items():
            self.reduction.checks.lost(peer)
            effects.append(Send(peer, m.Evict(line=self.line, step=self.number, blocks=tuple(blocks))))
        self._progress.over(now)
        return [*effects, *self._hand_out(reopened), *self._urge(), *self.advance(now)]

    def _urge(self) -> list[Effect]:
        """Ask everybody to report what is done."""
        return [self._tell(peer, ()) for peer in sorted(self.roster)]

    def part(self, peer: str, other: str) -> list[Effect]:
        """`peer` takes nothing of `other`: reroute what was to pass between them."""
        known = peer != other and {peer, other} <= self.roster.keys()
        return self._hand_out(self._ways.part(peer, other)) if known else []

    # ── who comes and goes ──────────────────────────────────────────────────────────────────────────────────

    @property
    def orphaned(self) -> list[int]:
        """Blocks that nobody in the step holds."""
        return [b for b in range(self._blocks) if not any(i <= b < j for i, j in self.roster.values())]

    def remaining_s(self, now: float) -> float:
        """Seconds that the rest would take at the rate so far; infinite while nothing is counted."""
        ids = len(self.ledger.ids)
        left = len(self.ledger.undone() & self.ledger.ids)
        return (now - self.began_at) * left / (ids - left) if left < ids else math.inf

    def enter(self, peer: str, incarnation: int, place: Range, speed: float, now: float) -> list[Effect]:
        """`peer` holds the state with which the step began, and takes part from now on.

        A volunteer that shares others' work is announced to all. One that fills a gap introduces itself to
        those that wait for it: n announcements at once would be n² messages.
        """
        self._entries += 1
        self.roster[peer], self._incarnations[peer] = place, incarnation
        self._entrants[peer] = m.Entrant(peer=peer, incarnation=incarnation, begin=place[0], end=place[1])
        self._progress.over(now)
        begin = Send(peer, self._begin(peer, (), self._entries))
        fresh = self._hand_out(self._ways.without_beginning() & self.ledger.undone())
        shared = {} if peer in self._context.issue_limits.limited else self._ways.share(peer, speed)
        known = self._make_known() if shared else []
        return [begin, *fresh, *known, *(self._tell(first, tasks) for first, tasks in sorted(shared.items()))]

    def shuts_out(self, peer: str) -> bool:
        """Whether `peer` was fenced in this step, or rests while the others get on without it."""
        return not self.stalls and (
            peer in self.reduction.unwanted or peer in self._context.disputed_pairs.resting
        )

    def leave(self, peers: Iterable[str]) -> list[str]:
        """Strike `peers` off the roster; returns those that were on it."""
        left = [peer for peer in peers if self.roster.pop(peer, None) is not None]
        for peer in left:
            del self._incarnations[peer]
            self._entrants.pop(peer, None)
        self._failures.forget(left)
        return left

    def without(self, peers: Sequence[str], now: float) -> list[Effect]:
        """Go on without `peers`; every block keeps a holder or may wait for one (the caller has checked)."""
        for peer in peers:
            self.ledger.unused.lost(peer, self.ledger.ids & self._ways.left_by(peer))
        lost = [peer for peer in peers if self.ledger.lose(peer)]
        self._progress.over(now)
        self.reduction.left(peers)
        effects = self._hand_out(self._ways.beginning_at(peers) & self.ledger.undone())
        if self.reduction.under_way and not lost and self.ledger.complete():
            return effects + self.reduction.plan(now)
        self.reduction.reduce.void()
        return effects + self.advance(now)

    # ── timeouts ────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[Effect]:
        """Renew a late plan. After an unusually long wait ask for reports and hand out last ids twice; when
        half is done, those of volunteers that are tried, too.
        """
        if self.reduction.under_way:
            return self.reduction.tick(now)
        if self.orphaned:
            self._progress.over(now)
        undone = self.ledger.undone()
        most = few(len(self.ledger.ids))
        last = undone if len(undone) <= most and self._progress.is_unusual(now) else set[int]()
        if 2 * len(undone & self.ledger.ids) <= len(self.ledger.ids):
            last = last | self._ways.tried(undone, most)
        urged = self._urge() if self._progress.urges(now) else []
        hedged = self._hand_out(self._ways.hedge(last))  # the first report of an id counts
        return [*urged, *hedged]

    def is_overdue(self, now: float) -> bool:
        """Whether nothing was counted for the stall timeout, with holders for all blocks and no plan out."""
        timeout_s = self._timeouts.scaled(self._context.config.stall_s)
        return not self.reduction.under_way and not self.orphaned and now - self._progress.since >= timeout_s

    def again(self, now: float) -> list[Effect]:
        """Hand the uncounted ids out again."""
        self.stalls += 1
        self._progress.over(now)
        known = self._make_known()
        undone = self.ledger.undone()
        self._ways.stuck(undone)
        return [*known, *self._hand_out(undone)]

    def _make_known(self) -> list[Effect]:
        """Announce late joiners to everybody: they may not have found all peers that wait for them."""
        entrants, self._entrants = tuple(self._entrants.values()), {}
        joined = m.Joined(line=self.line, step=self.number, entrants=entrants)
        return [Send(peer, joined) for peer in sorted(self.roster)] if entrants else []

    def _hand_out(self, ids: set[int], roster: Mapping[str, Range] | None = None) -> list[Effect]:
        """Route `ids` again from the first block; peers on the route pass on tensors that they have kept."""
        return [self._tell(first, tasks) for first, tasks in self._ways.again(ids, roster).items()]

    def _tell(self, first: str, tasks: tuple[m.Task, ...]) -> Effect:
        return Send(first, m.Reroute(line=self.line, step=self.number, tasks=tasks))

    # ── when all is counted ─────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> list[Effect]:
        """Begin the reduce if all is counted and earlier steps are committed: one is reduced at a time."""
        if self.number != self._context.history.version or self.reduction.under_way:
            return []
        return self.reduction.plan(now) if self.ledger.ids and self.ledger.complete() else []

    def comes_next(self, now: float) -> list[Effect]:
        """Note that all earlier steps are committed: this step's timeouts begin now."""
        self.reduction.awaited_at = now
        self._progress.over(now)
        return self.advance(now)
