"""One step at the coordinator: from Begin to the exact cover, which step_reduction.py then reduces.

Pure. It hands out ids and keeps the ledger (step_ledger.py); step_roster.py has its volunteers and the
messages to them. After each event step_verdicts.py looks at `reduction` and `failures`, and machine.py at
`evaluated_only`: they decide what follows for the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.coordinator.routing import Assignments
from hetpeer.bootstrap.coordinator.step_failures import StepFailures
from hetpeer.bootstrap.coordinator.step_ledger import StepLedger
from hetpeer.bootstrap.coordinator.step_reduction import StepReduction
from hetpeer.bootstrap.coordinator.step_roster import StepRoster, StepTerms
from hetpeer.bootstrap.coordinator.step_samples import StepSamples
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, NextStep
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
        self.samples = samples = StepSamples(config, work)
        self.number = context.history.version + behind
        self.behind = behind
        """Number of versions by which the step's parameters are older than `number`."""
        self.batch = work.batch
        self.workers = work.workers
        self._work = work
        self.began_at = now
        self._coming = {one.peer: one.place for one in coming if one.place is not None}
        self.roster, ready = members.roster() | self._coming, members.ready()
        speeds = rates([*ready, *coming], members.costs)
        most = warmed_up(config.link_ratio, work.batch, config.link_warmup)
        limited = context.issue_limits.limited
        targets = context.ratio_choice.targets(ready, most, config.compression, limited)
        links = link_costs(ready, speeds, config.compression, targets, mixed=config.checks is not None)
        apart = context.reputation.apart | shunned(ready)
        self.ledger = StepLedger(samples.training, samples.evaluation, members.blocks)
        for microbatch in samples.left_out(context.history.bad):
            self.ledger.skip(microbatch)
        self._timeouts = timeouts
        self.line = context.line
        self._blocks = members.blocks
        terms = StepTerms(
            line=context.line,
            number=self.number,
            batch=self.batch,
            microbatches=len(config.sizes),
            behind=behind,
            mean=mean,
            blocks=members.blocks,
            targets=targets,
            weights=samples.told,
        )
        incarnations = {peer: one.incarnation for peer, one in members.volunteers.items()}
        self._volunteers = StepRoster(terms, self.roster, incarnations)
        self._ways = Assignments(
            sorted(self.ledger.ids | self.ledger.evaluation),
            self.roster,
            members.blocks,
            speeds,
            self.ledger.undone,
            self.ledger.holder,
            links,
            context.issue_limits.limits(self.roster, len(samples.training) or len(samples.evaluation)),
            apart,
        )
        self.reduction = StepReduction(
            context, self.number, self.roster, self.ledger, self._ways.route_taken, timeouts, now
        )
        self.failures = StepFailures(self.number, self.batch, self.roster, members.blocks, self.ledger)
        self._progress = ProgressTimer(now)
        self.stalls = 0
        """Number of times that work was handed out again since the last count."""

    def begin(self) -> list[Effect]:
        """Begin messages for the whole roster, with the first routes."""
        tasks = self._ways.tasks()
        self.leave(self._coming)  # they enter when they have the state
        return self._volunteers.begin(tasks)

    @property
    def evaluated_only(self) -> bool:
        """Whether the step only evaluates the final state, and is complete."""
        return not self._work.trains and self.ledger.complete()

    @property
    def nothing_left(self) -> str | None:
        """Why the step cannot be decided: nothing is left that can be computed. None otherwise."""
        what = self.samples.lack(self.ledger.ids, self.ledger.evaluation)
        if what is None:
            return None
        weighed = ", or all have the weight 0" if self._context.config.weights else ""
        return f"no {what} of step {self.number} can be computed{weighed}"

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
        if fault := self.ledger.fault(message.contents, message.losses, self.number):
            raise ProtocolError(fault, peer=peer)
        begin, end = self.roster[peer]
        theirs = [part for part in message.contents if begin <= part.begin and part.end <= end]
        verdict = self.ledger.report(peer, message.slot, theirs, message.losses)
        if verdict is None:
            return []
        effects = [self._volunteers.settle(peer, message.slot, verdict.refused)]
        if verdict.progress:
            effects += self.reduction.checks.accepted(peer, theirs, verdict.refused)
        for rival, blocks in verdict.evicted.items():
            self.reduction.checks.lost(rival)
            effects.append(self._volunteers.evict(rival, blocks))
        if verdict.progress:
            self._counted(now)
        return [*effects, *self._hand_out(verdict.reopened), *self.advance(now)]

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

        The input from another peer may be at fault, and the reporter may be wrong (step_failures.py).
        """
        known = message.id in self._ways and self.ledger.is_undone(message.id)
        there = known and self._ways.may_be_at(message.id, peer)
        if not (there and self.failures.hears(message.id, peer)):
            return self.part(peer, message.given)  # it may have come there some other way
        culprit = message.given or peer
        others_can = self.failures.add(message.id, peer, culprit, message.why)
        self._progress.over(now)
        if not others_can:
            return []
        again = self._hand_out({message.id}, self.failures.who_else(message.id))
        return [*again, *self.part(peer, culprit)]

    def skip(self, microbatch: int, now: float) -> list[Effect]:
        """Count `microbatch` nowhere. All report what is done: they may wait for a slot that never fills."""
        evicted, reopened = self.ledger.skip(microbatch)
        effects: list[Effect] = []
        for peer, blocks in evicted.items():
            self.reduction.checks.lost(peer)
            effects.append(self._volunteers.evict(peer, blocks))
        self._progress.over(now)
        return [*effects, *self._hand_out(reopened), *self._volunteers.urge(), *self.advance(now)]

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

        It is announced to all if it shares others' work. If it fills a gap it introduces itself.
        """
        begin = self._volunteers.enter(peer, incarnation, place)
        self._progress.over(now)
        fresh = self._hand_out(self._ways.without_beginning() & self.ledger.undone())
        shared = {} if peer in self._context.issue_limits.limited else self._ways.share(peer, speed)
        known = self._volunteers.make_known() if shared else []
        return [begin, *fresh, *known, *self._volunteers.hand_out(dict(sorted(shared.items())))]

    def shuts_out(self, peer: str) -> bool:
        """Whether `peer` was fenced in this step, or rests while the others get on without it."""
        return not self.stalls and (
            peer in self.reduction.unwanted or peer in self._context.disputed_pairs.resting
        )

    def leave(self, peers: Iterable[str]) -> list[str]:
        """Strike `peers` off the roster; returns those that were on it."""
        left = self._volunteers.leave(peers)
        self.failures.forget(left)
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
        urged = self._volunteers.urge() if self._progress.urges(now) else []
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
        known = self._volunteers.make_known()
        undone = self.ledger.undone()
        self._ways.stuck(undone)
        return [*known, *self._hand_out(undone)]

    def _hand_out(self, ids: set[int], roster: Mapping[str, Range] | None = None) -> list[Effect]:
        """Route `ids` again from the first block; peers on the route pass on tensors that they have kept."""
        return self._volunteers.hand_out(self._ways.again(ids, roster))

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
