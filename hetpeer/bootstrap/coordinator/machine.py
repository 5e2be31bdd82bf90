"""The coordinator's state machine: every transition of docs/protocol.md, "States of the coordinator".

Only this module sets `CoordinatorContext.state` and `.line`. `Machine.TABLE` says which method answers an
event in which state. These methods enter other states:

| method | from | to |
| --- | --- | --- |
| `at_barrier` | WAITING, SYNCING | SYNCING: volunteers fetch; TRAINING: a step begins; WAITING: none can |
| `follow` | TRAINING, REDUCING | REDUCING: a plan is out; TRAINING: ids are done again; WAITING: committed |
| `go_back` | any but FINISHED | WAITING, or SYNCING while holders report the state that they kept |
| `_end` | any | FINISHED: complete, or it cannot go on |

Pure: time in, effects out. coordinator.py handles events of volunteers, and ends in a call of this machine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.commits import commit, evaluation_record, refused
from hetpeer.bootstrap.coordinator.departures import Departures
from hetpeer.bootstrap.coordinator.move_watch import MoveWatch
from hetpeer.bootstrap.coordinator.rebalancing import Rebalancing
from hetpeer.bootstrap.coordinator.rollback import Retreat, Rollback
from hetpeer.bootstrap.coordinator.run_policy import RunPolicy, WholeRun
from hetpeer.bootstrap.coordinator.state_disputes import StateDisputes
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from hetpeer.bootstrap.coordinator.step_verdicts import StepVerdict, StepVerdicts
from hetpeer.bootstrap.coordinator.steps import StepQueue
from hetpeer.bootstrap.state.backups import note_backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import (
    BadSample,
    CoordinatorState,
    Effect,
    Halt,
    Send,
    TryMicrobatch,
)
from hetpeer.bootstrap.trust.state_agreement import StateAgreement


class Event(enum.Enum):
    """Events whose answer depends on the state."""

    TICK = "tick"
    ROOM = "a volunteer can take a state: at the barrier, or into the step that runs"
    STORED = "the checkpoint is complete"
    ARRANGED = "a planner proposes other places"
    LEFT = "volunteers left that were in no step"


Answer = Callable[["Machine", float], list[Effect]]


def _row(*answers: Answer) -> Mapping[CoordinatorState, Answer]:
    """State → answer, in the order of `CoordinatorState`."""
    return dict(zip(CoordinatorState, answers, strict=True))


class Machine:
    """The states of one term. Its parts are public attributes, since coordinator.py uses them directly."""

    def __init__(self, context: CoordinatorContext, now: float, policy: RunPolicy | None) -> None:
        self._context = context
        agreement = StateAgreement(context)
        self.checkpoints = CheckpointCollection(context, agreement)
        self.steps = StepQueue(context)
        self.barrier = StepBarrier(context, now)
        self.move_watch = MoveWatch(context)
        self.rebalancing = Rebalancing(context, self.checkpoints, self.move_watch)
        self.policy = policy or WholeRun(context, self.barrier)
        self.departures = Departures(context, self)
        self.states = StateDisputes(context, agreement, self.checkpoints, self.departures, self.roll_back)
        self._verdicts = StepVerdicts(context, self.policy)
        self._rollback = Rollback(
            context, self.policy, self.barrier, self.steps, self.checkpoints, self.move_watch
        )

    def on(self, event: Event, now: float) -> list[Effect]:
        """Answer `event` as `TABLE` says for the state that holds now."""
        return self.TABLE[event][self._context.state](self, now)

    def _nothing(self, _now: float) -> list[Effect]:
        return []

    # ── WAITING and SYNCING: at the step barrier ────────────────────────────────────────────────────────────

    def at_barrier(self, now: float) -> list[Effect]:
        """Between two steps: save, finish, move volunteers, let joiners fetch, or begin the next step."""
        if not self.policy.may_begin:
            return []
        context = self._context
        pending, leaving = self.rebalancing.pending, bool(context.members.leaving())
        effects = self.checkpoints.begin(wanted=pending or leaving)
        if context.agenda.over and context.history.stored:
            return effects + self.complete()
        if context.agenda.over or (leaving and not context.history.stored):
            context.state = CoordinatorState.WAITING
            return effects
        if pending and self.rebalancing.waits(now):
            context.state = CoordinatorState.WAITING
            return effects
        if pending and context.history.stored and self.rebalancing.pending:
            effects += self.rebalancing.enact(now)
        if fetches := self.barrier.admit_joiners(now):
            context.state = CoordinatorState.SYNCING
            effects += fetches
        if self.barrier.must_wait(now):
            return effects
        return effects + self._begin_or_wait(now)

    def _begin_or_wait(self, now: float) -> list[Effect]:
        """Begin the next step if all blocks are held, or about to be, and there is work; otherwise wait."""
        missing = self._context.members.uncovered()
        coming = self.policy.coming_for(missing) if missing else ()
        if missing and not coming:
            self.barrier.wait(now)
            self._context.state = CoordinatorState.WAITING
            return []
        work = self._context.agenda.take()
        if work is None:
            self._context.state = CoordinatorState.WAITING
            return []
        self._context.state = CoordinatorState.TRAINING
        self.barrier.leave()
        self.move_watch.began(now)
        begun = self.steps.open(work, now, coming)
        return [*begun, *self.admit(now), *self.overlap(now)]

    def _waited(self, now: float) -> list[Effect]:
        """A tick while WAITING: begin if all blocks are held; otherwise give up waiting, or fill the gap."""
        if not self.policy.may_begin:
            return []
        if not self._context.members.uncovered():
            return self.at_barrier(now)
        if why := self.policy.gap_is_final(now):
            return self.roll_back(why, now)
        moved = self.barrier.fill_gap(now)
        return moved if self.policy.whole_run else [*moved, *self.at_barrier(now)]

    def step_in(self, now: float) -> list[Effect]:
        """Let backups work that a block needs: into the step that runs, or at the barrier."""
        if not (peers := self.barrier.stepping_in(now)):
            return []
        backups = self._context.members.backups.difference(peers)
        return [*note_backups(self._context, backups, steps_in=peers), *self.on(Event.ROOM, now)]

    # ── TRAINING and REDUCING: steps run ────────────────────────────────────────────────────────────────────

    def admit(self, now: float) -> list[Effect]:
        """Let late joiners fetch the state of the step that runs."""
        step = self.steps.fresh
        return [] if step is None else self.barrier.fetch_late(step, now)

    def overlap(self, now: float) -> list[Effect]:
        """Begin the next steps before those under way are committed, unless anything awaits the barrier."""
        if not self.steps.may_overlap or self._context.members.uncovered():
            return []
        if self.rebalancing.pending or self._context.members.leaving() or self.barrier.expects():
            return []
        return self.steps.overlap(now)

    def _step_ticks(self, now: float) -> list[Effect]:
        """A tick while steps run: fence mute volunteers, hand work out again, give up a stuck step."""
        effects = self._timeouts(now)
        if self.steps and (why := self.policy.is_stuck(self.steps.first.stalls, now)):
            effects += self.dissolve(why)
        return effects

    def _timeouts(self, now: float) -> list[Effect]:
        step = self.steps.first
        if mute := step.reduction.mute(now):
            self._context.disputed_pairs.waited_in_vain(mute)
            return self.departures.fence(mute, now)
        if (retreat := self._rollback.for_orphans(step, now)) is not None:
            return self._retreat(retreat, now)
        return [*self.steps.tick(now), *self.follow(step, now), *self.overlap(now)]

    def follow(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """Act on what `step` reports: end the run, fence, begin anew, commit or go on."""
        return self._carry_out(self._verdicts.judge(step, now), step, now)

    def tried(self, trial: TryMicrobatch, bad: BadSample | None, now: float) -> list[Effect]:
        """We have computed a microbatch ourselves; `bad`: nobody can. Its step may be over."""
        step = self.steps.awaiting(trial)
        if step is None:
            return []
        return self._carry_out(self._verdicts.tried(step, trial, bad, now), step, now)

    def _carry_out(self, verdict: StepVerdict, step: CoordinatedStep, now: float) -> list[Effect]:
        context = self._context
        effects, line = list(verdict.effects), context.line
        if verdict.halt is not None:
            return effects + self._end(verdict.halt, completed=False)
        if verdict.fenced:
            effects += self.departures.fence(verdict.fenced, now)
        if verdict.anew and context.line == line:  # otherwise the run went back because of those fenced
            return effects + self.go_back(context.history.version, verdict.anew, now)
        return effects if verdict.fenced or verdict.waits else effects + self._go_on(step, now)

    def _go_on(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """Commit `step` if it is decided, end it if it only evaluates, or stay in it."""
        if step.reduction.decision is not None:
            return self._decided(step, step.reduction.decision, now)
        context = self._context
        if step.evaluated_only:
            self.steps.remove(step)
            context.state = CoordinatorState.WAITING
            return [context.log(**evaluation_record(step)), *self.at_barrier(now)]
        reducing = self.steps.first.reduction.under_way
        context.state = CoordinatorState.REDUCING if reducing else CoordinatorState.TRAINING
        return []

    def _decided(
        self, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float
    ) -> list[Effect]:
        """All voted alike: commit, unless states differ or a lone holder's norm is refused."""
        if differing := self.states.judge(now, last=True):
            return differing
        if alone := refused(self._context, step, decision):
            self.policy.rest(list(alone), now)
            return self.departures.fence(alone, now)
        self.checkpoints.settle()
        return self._commit(step, decision, now)

    def _commit(self, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float) -> list[Effect]:
        """Commit `step`, then cross the barrier, or go on with the steps that overlap it."""
        effects = commit(self._context, step, decision, now)
        effects += self.move_watch.committed(step.number, step.roster, now)
        self.steps.committed(step)
        self._context.members.outdate(step.roster)
        if not self.steps:
            self._context.state = CoordinatorState.WAITING
            return effects + self.at_barrier(now)
        wanted = self.rebalancing.pending or bool(self._context.members.leaving())
        effects += self.checkpoints.begin(wanted=wanted)
        return [*effects, *self._next(now)]

    def _next(self, now: float) -> list[Effect]:
        """Go on with the steps that run: the first one is the next to be committed, unless a mean is."""
        following = self.steps.first
        return [*self.overlap(now), *following.comes_next(now), *self.follow(following, now)]

    def installed(self, now: float) -> list[Effect]:
        """A mean was installed, which made the newest version: go on with the steps beside it, if any."""
        self.steps.installed()
        return self._next(now) if self.steps else self.at_barrier(now)

    # ── in every state: checkpoints, and volunteers that leave ──────────────────────────────────────────────

    def seal(self, now: float) -> list[Effect]:
        """Complete the checkpoint that is collected, if all its states are there and right."""
        if fenced := self.states.judge_uploads(now):
            return fenced
        effects = self.checkpoints.look(now)
        if not effects:
            return []
        return [*effects, *self.departures.see_off(now), *self.on(Event.STORED, now)]

    def left(self, now: float) -> list[Effect]:
        """Volunteers left that were in no step."""
        return self.on(Event.LEFT, now)

    # ── FINISHED, and back to a checkpoint ──────────────────────────────────────────────────────────────────

    def complete(self) -> list[Effect]:
        """All steps are committed and the last state is stored."""
        if not self.policy.whole_run:
            return []
        return self._end(f"all {self._context.config.steps} steps are committed", completed=True)

    def _end(self, why: str, *, completed: bool) -> list[Effect]:
        context = self._context
        context.state = CoordinatorState.FINISHED
        given_up = self.steps.clear()
        record = [] if completed else [context.log(kind="halt", why=why, **given_up)]
        told = context.end = m.Finished(why=why, completed=completed)
        return [*record, *(Send(peer, told) for peer in context.members.volunteers), Halt(why, completed)]

    def roll_back(self, why: str, now: float) -> list[Effect]:
        """Go back to the last complete checkpoint; a cluster that has none falls apart."""
        return self._retreat(self._rollback.to_checkpoint(why), now)

    def without_holder(self, why: str, now: float) -> list[Effect]:
        """Give up the steps that run: a block has no holder."""
        return self._retreat(self._rollback.without_holder(why), now)

    def _retreat(self, retreat: Retreat, now: float) -> list[Effect]:
        """Go back as decided, or fall apart."""
        if retreat.version is None:
            return self.dissolve(retreat.why)
        effects = self.go_back(retreat.version, retreat.why, now)
        if retreat.awaited:
            self.barrier.await_until(retreat.awaited, retreat.until)
        return effects

    def go_back(self, version: int, why: str, now: float) -> list[Effect]:
        """Go on with `version` in a new view; steps under way are given up, its holders keep their state."""
        context = self._context
        holders = list(context.members.roster()) if version == context.history.version else []
        context.state = CoordinatorState.SYNCING if holders else CoordinatorState.WAITING
        context.line = context.line.model_copy(update={"view": context.line.view + 1})
        return [*self._rollback.begin_anew(version, why, holders, now), *self.at_barrier(now)]

    def dissolve(self, why: str) -> list[Effect]:
        """Let a cluster fall apart."""
        if self.policy.dissolved is None:
            self.policy.dissolve(why, self.steps.clear())
            self._context.state = CoordinatorState.WAITING
            self.checkpoints.abandon()
        return []

    # ── the table ───────────────────────────────────────────────────────────────────────────────────────────

    TABLE: Mapping[Event, Mapping[CoordinatorState, Answer]] = {
        # event               WAITING     SYNCING     TRAINING     REDUCING     FINISHED
        Event.TICK:     _row(_waited,    at_barrier, _step_ticks, _step_ticks, _nothing),
        Event.ROOM:     _row(at_barrier, at_barrier, admit,       admit,       _nothing),
        Event.STORED:   _row(at_barrier, at_barrier, _nothing,    _nothing,    _nothing),
        Event.ARRANGED: _row(at_barrier, at_barrier, _nothing,    _nothing,    _nothing),
        Event.LEFT:     _row(_nothing,   at_barrier, _nothing,    _nothing,    _nothing),
    }  # fmt: skip
