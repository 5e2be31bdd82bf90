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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.checkpoint_collection import CheckpointCollection
from hetpeer.bootstrap.coordinator.commits import (
    ban_records,
    check_findings,
    commit,
    dispute_records,
    evaluation_record,
    refused,
)
from hetpeer.bootstrap.coordinator.departures import Departures, RunPolicy, WholeRun
from hetpeer.bootstrap.coordinator.move_watch import MoveWatch
from hetpeer.bootstrap.coordinator.rebalancing import Rebalancing
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_barrier import StepBarrier
from hetpeer.bootstrap.coordinator.steps import StepQueue
from hetpeer.bootstrap.log.record_text import bad_sample_text
from hetpeer.bootstrap.state.backups import kept, needed_backups, note_backups
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import (
    BadSample,
    CoordinatorState,
    Effect,
    Halt,
    Send,
    TryMicrobatch,
)
from hetpeer.bootstrap.state.failed_microbatches import FailedMicrobatch, room_s
from hetpeer.bootstrap.state.volunteer_state import VolunteerState
from hetpeer.bootstrap.trust.state_agreement import StateAgreement

MOST = 200
"""Characters of each text in a `bad_sample` record."""


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
        self.agreement = StateAgreement(context)
        self.checkpoints = CheckpointCollection(context, self.agreement)
        self.steps = StepQueue(context)
        self.barrier = StepBarrier(context, now)
        self.move_watch = MoveWatch(context)
        self.rebalancing = Rebalancing(context, self.checkpoints, self.move_watch)
        self.policy = policy or WholeRun(context, self.barrier)
        self.departures = Departures(context, self)

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
        if step.orphaned and (why := self.policy.gap_is_final(now)):
            return self.roll_back(why, now)
        if self.barrier.hopeless(step, now):
            why = f"nobody comes for block {step.orphaned[0]}"
            if self.policy.whole_run:
                return self.roll_back(why, now)
            if self._context.history.stored:
                return self.go_back(self._context.history.version, why, now)
        return [*self.steps.tick(now), *self.follow(step, now), *self.overlap(now)]

    def follow(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """Act on what `step` reports: log its disputes, then fence, roll back, commit or go on."""
        return [*dispute_records(self._context, step), *self._outcome(step, now)]

    def _outcome(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """Handle the gravest report: trouble, a failure, peers to fence, findings of checks, a decision."""
        context, departures = self._context, self.departures
        if (trouble := step.reduction.trouble) is not None:
            return self._end(trouble, completed=False)
        if (failure := step.failed()) is not None:
            return self._cannot_compute(step, failure, now)
        if (why := step.nothing_left) is not None:
            return self._end(why, completed=False)
        if out := step.reduction.to_fence():
            return [*ban_records(context, step.number, out), *departures.fence(out, now)]
        found, line = check_findings(context, step), context.line
        logged = found.logged
        if out := {peer: why for peer, why in found.out.items() if peer in context.members.volunteers}:
            logged += departures.fence(out, now)
        if found.anew and context.line == line:
            return [*logged, *self.go_back(context.history.version, found.anew, now)]
        if out:
            return logged
        if step.reduction.decision is not None:
            return [*logged, *self._decided(step, step.reduction.decision, now)]
        if step.evaluated_only:
            self.steps.remove(step)
            context.state = CoordinatorState.WAITING
            return [context.log(**evaluation_record(step)), *self.at_barrier(now)]
        reducing = self.steps.first.reduction.under_way
        context.state = CoordinatorState.REDUCING if reducing else CoordinatorState.TRAINING
        return logged

    def _cannot_compute(self, step: CoordinatedStep, failure: FailedMicrobatch, now: float) -> list[Effect]:
        """Every holder of some block failed a microbatch: we try it, then others do before the run ends."""
        context = self._context
        if (known := context.history.bad.get(step.bad_key(failure.id))) is not None:
            return self._leave_out(step, failure.id, known, now)
        if step.begins_trial(failure):
            return [TryMicrobatch(context.line.cluster, failure.batch, failure.id)]
        if step.awaits_trial(failure.id):
            return []
        for peer in failure.holders:
            context.members.volunteers[peer].slow = True
        replaceable = context.members.spare() is not None or bool(
            needed_backups(context.members, context.history.version)
        )
        if context.failures.are_final(failure, room_s(context.config), now, replaceable=replaceable):
            return self._end(failure.why, completed=False)
        self.policy.rest(failure.holders, now)
        return self.departures.fence(dict.fromkeys(failure.holders, failure.why), now)

    def tried(self, trial: TryMicrobatch, bad: BadSample | None, now: float) -> list[Effect]:
        """We have computed a microbatch ourselves; `bad`: nobody can. Then it is skipped, or the run ends."""
        context = self._context
        step = next((s for s in self.steps if s.batch == trial.batch and s.awaits_trial(trial.id)), None)
        if step is None:
            return []
        if bad is None:
            step.tried(trial.id)
            return self.follow(step, now)
        batch, _ = step.bad_key(trial.id)
        record = context.log(
            kind="bad_sample",
            batch=batch,
            id=trial.id,
            step=step.number,
            where=bad.where[:MOST],
            why=bad.why[:MOST],
            skipped=context.config.skips,
        )
        return [record, *self._leave_out(step, trial.id, record.record, now)]

    def _leave_out(
        self, step: CoordinatedStep, microbatch: int, known: Mapping[str, Any], now: float
    ) -> list[Effect]:
        """Skip a microbatch that nobody can compute, or end the run; `known`: the record that says so."""
        if not self._context.config.skips:
            return self._end(bad_sample_text(known), completed=False)
        return [*step.skip(microbatch, now), *self.follow(step, now)]

    def _decided(
        self, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float
    ) -> list[Effect]:
        """All voted alike: commit, unless states differ or a lone holder's norm is refused."""
        if differing := self.judge(now, last=True):
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

    # ── in every state: what holders say of their states ────────────────────────────────────────────────────

    def hear_states(self, volunteer: VolunteerState, held: Sequence[m.Held], now: float) -> list[Effect]:
        """Take `volunteer`'s digests of the states that it holds of the current version."""
        self.agreement.hear(volunteer, held)
        return self.judge(now)

    def judge(self, now: float, *, last: bool = False) -> list[Effect]:
        """Fence holders of another state than most; roll back on a tie. `last`: wait for no silent holder."""
        found = self.agreement.judge(last=last)
        out = dict.fromkeys(sorted(found.wrong), "its state is not that of most holders")
        effects = self.departures.fence_liars(out, found.made, now) if out else []
        if found.torn is None:
            return effects
        disputed_pairs, line = self._context.disputed_pairs, self._context.line
        why = f"holders of block {found.torn[0]} have different states"
        one = disputed_pairs.blamed(found.torn[1])
        disputed_pairs.fenced(one, shunned=False)
        disputed_pairs.waited_in_vain([one])
        effects += self.departures.fence({one: why}, now)
        if self._context.line == line:
            effects += self.roll_back(why, now)
        self.checkpoints.soon()
        return effects

    def seal(self, now: float) -> list[Effect]:
        """Complete the checkpoint that is collected, if all its states are there and right."""
        if false := self.checkpoints.false(now):
            return self.departures.fence_liars(false, false, now)
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
        version = self.policy.goes_back_to()
        return self.dissolve(why) if version is None else self.go_back(version, why, now)

    def without_holder(self, why: str, now: float) -> list[Effect]:
        """Give up the steps that run: a block has no holder. Those who may bring it back are awaited, or
        others fetch the version from the store.
        """
        members, version = self._context.members, self._context.history.version
        awaited, until = set(self.barrier.awaited), self.barrier.return_by
        at_hand = self._context.history.stored or kept(members, version).issuperset(members.uncovered())
        if not awaited and not at_hand:
            return self.roll_back(why, now)
        effects = self.go_back(version, why, now)
        if awaited:
            self.barrier.await_until(awaited, until)
        return effects

    def go_back(self, version: int, why: str, now: float) -> list[Effect]:
        """Go on with `version` in a new view; steps under way are given up, its holders keep their state."""
        context = self._context
        given_up = self.steps.clear()
        stopped = self.move_watch.stop(f"the run went back: {why}")
        self.checkpoints.abandon()
        self.barrier.leave()
        same = version == context.history.version
        holders = context.members.roster() if same else {}
        context.state = CoordinatorState.WAITING
        context.line = line = context.line.model_copy(update={"view": context.line.view + 1})
        record = context.log(
            kind="rollback", term=line.term, view=line.view, to_version=version, why=why, **given_up
        )
        context.members.start_over(same=same)
        if holders:
            context.state = CoordinatorState.SYNCING
        self.barrier.gather([context.members.volunteers[peer] for peer in holders], now)
        told = m.RolledBack(line=line, version=version, why=why)
        tell = [Send(peer, told) for peer in context.members.volunteers]
        return [*stopped, record, *tell, *self.at_barrier(now)]

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
