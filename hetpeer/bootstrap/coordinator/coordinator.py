"""The coordinator: who takes part, which step runs, when it is committed.

Pure: messages and time in, effects out; the daemon and the simulator drive the same object. This file is the state
machine of docs/protocol.md; what happens within a state lives in its own room: handshake.py, rebalancing.py, step_barrier.py,
failure_handling.py, checkpoint_collection.py, step.py, steps.py. All truth that must outlive a reign goes through `Record` effects, which the driver makes durable
before it carries out the next effect; after a restart the folded log (`History`) is all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.commits import (
    commit,
    done_with,
    evaluation_record,
    found_out,
    quarrelled,
    refused,
)
from hetpeer.bootstrap.coordinator.failure_handling import Losing
from hetpeer.bootstrap.coordinator.handshake import Handshake
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import (
    CollectCheckpoint,
    CoordinatorState,
    Disconnect,
    Effect,
    Halt,
    Send,
)
from hetpeer.bootstrap.state.failed_microbatches import FailedMicrobatch, room_s
from hetpeer.bootstrap.state.membership import LifeCycle, Volunteer


class Coordinator(Losing):
    """One reign; the constructor's effects are in `start`."""

    def __init__(self, context: CoordinatorContext, now: float) -> None:
        super().__init__(context, now)
        self._handshake = Handshake(self._context)

    def start(self) -> list[Effect]:
        """The first effects of a reign. Of a run that is over there is nothing left to decide."""
        if self._context.agenda.over and self._context.stored:
            return self._complete()
        return super().start()

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """A message of `peer` (the transport's word, not the message's)."""
        if isinstance(message, m.Hello):
            return self._hello(peer, message, now)
        volunteer = self.members.volunteers.get(peer)
        if volunteer is None:
            return [
                Send(peer, m.Fenced(why="the coordinator does not know this volunteer")),
                Disconnect(peer),
            ]
        if self.state is CoordinatorState.FINISHED:
            return []
        self._leases.heard(peer, now)
        handler = self._HANDLERS.get(type(message))
        line = getattr(message, "line", None)
        if handler is None or (line is not None and line != self.line):
            return []
        effects: list[Effect] = handler(self, volunteer, message, now)
        return effects

    def saved(self, order: CollectCheckpoint, block: int, digest: str, now: float) -> list[Effect]:
        """The state of `block` that `order` asks for has arrived and lies durably in the checkpoint store."""
        self._checkpoints.saved(order, block, digest, now)
        return self._seal(now)

    def arrange(self, arrangement: Arrangement, now: float) -> list[Effect]:
        """A planner proposes who has which blocks from now on: at the next border, once the version of then is stored. A step that waits for a holder
        is given up for it. Nothing happens if others are here by now than those it was made for. Raises `ValueError` for an arrangement that is none.
        """
        if self.state is CoordinatorState.FINISHED or not self._rebalancing.propose(arrangement, now):
            return []
        if orphaned := self._steps.orphaned:
            return self._roll_back(f"nobody comes for block {orphaned[0]}: others take it over", now)
        return self._cross(now) if self._context.resting else []

    def tick(self, now: float) -> list[Effect]:
        """Time passes: leases, graces and dead-lines. To be called a few times a second."""
        if self.state is CoordinatorState.FINISHED:
            return []
        self._excuse(self._leases.tick(now), now)
        self._barrier.look(now)
        effects = self._make_room(now) if self._context.failures.wake(now) else []
        effects += [*self._lose(self._leases.expired(now), now), *self._judge(now), *self._seal(now)]
        match self.state:
            case CoordinatorState.WAITING:
                effects += self._waited(now)
            case CoordinatorState.SYNCING:
                effects += self._cross(now)
            case CoordinatorState.TRAINING | CoordinatorState.REDUCING:
                effects += self._patience(now)
        return effects

    def _excuse(self, pause_s: float, now: float) -> None:
        """We did not run for so long: it counts against nobody."""
        self._barrier.excuse(pause_s, now)

    # ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hello(self, peer: str, hello: m.Hello, now: float) -> list[Effect]:
        refusal = self._handshake.refuse(peer, hello)
        if refusal:
            return refusal
        self._context.failures.met(peer)
        known = {peer: "came back as a new session"} if peer in self.members.volunteers else {}
        return [*self._lose(known, now), *self._handshake.welcome(peer, hello, now)]

    def _claim(self, volunteer: Volunteer, message: m.Claim, _now: float) -> list[Effect]:
        return self._handshake.claim(volunteer, message)

    def _prepared(self, volunteer: Volunteer, message: m.Prepared, now: float) -> list[Effect]:
        if volunteer.place is None:
            return []
        volunteer.flops_per_second = message.flops_per_second or volunteer.flops_per_second
        line = self.line
        effects = self._relapsed(volunteer, now) if volunteer.life_cycle is LifeCycle.READY else []
        if self.line != line:
            return effects  # the run went back, and asks everybody to prepare
        volunteer.life_cycle = LifeCycle.PREPARED
        return effects + self._make_room(now)

    def _ready(self, volunteer: Volunteer, message: m.Ready, now: float) -> list[Effect]:
        complete = self._handshake.holds(volunteer, message.held, message.version)
        if not complete or volunteer.life_cycle is LifeCycle.READY:
            return []
        told = self._barrier.fetched(volunteer, message.version, now)
        current, step = message.version == self.history.version, self._steps.fresh
        border = self._context.resting and not self._barrier.may_rest(volunteer)
        taken = border or self._late_joiners.takes(step, volunteer)
        if not (current and taken) or self._barrier.keeps_out(volunteer):
            volunteer.life_cycle = LifeCycle.PREPARED
            volunteer.missed += told  # else it could be late as often as it likes, for a wait of everybody's
            return self._make_room(now)
        volunteer.life_cycle, volunteer.missed = LifeCycle.READY, 0
        self._barrier.in_time(volunteer)
        self._agreement.hear(volunteer, message.held)
        line, effects = self.line, self._judge(now)
        if self.line != line or self.members.volunteers.get(volunteer.peer) is not volunteer:
            return effects
        if step is not None and self._late_joiners.takes(step, volunteer):
            assert volunteer.place is not None
            speed = self.members.rates()[volunteer.peer]
            entered = step.enter(volunteer.peer, volunteer.incarnation, volunteer.place, speed, now)
            return [*effects, *entered, *self._overlap(now)]
        return effects + self._make_room(now)

    def _make_room(self, now: float) -> list[Effect]:
        """Somebody can take a state: at a border, or to come into the step that runs."""
        return self._cross(now) if self._context.resting else self._admit(now)

    def _admit(self, now: float) -> list[Effect]:
        """Who is to come into the step that runs fetches its state."""
        step = self._steps.fresh
        return [] if step is None else self._late_joiners.fetch(step, now)

    def _paced(self, volunteer: Volunteer, message: m.Paced, _now: float) -> list[Effect]:
        volunteer.computing, volunteer.links = message.computing, message.links
        volunteer.measured(message.uplink)
        return []

    def _shuns(self, volunteer: Volunteer, message: m.Shuns, _now: float) -> list[Effect]:
        """Nothing passes between these any more: what is on its way there goes another one."""
        volunteer.shuns = frozenset(message.peers)
        return self._steps.part(volunteer.peer, message.peers)

    def _farewell(self, volunteer: Volunteer, _message: m.Farewell, now: float) -> list[Effect]:
        return [*self._lose({volunteer.peer: "said farewell"}, now), Disconnect(volunteer.peer)]

    # ── step border ──────────────────────────────────────────────────────────────────────────────────────────────

    def _cross(self, now: float) -> list[Effect]:
        """Between two steps: save, finish, move volunteers, let joiners fetch, or begin the next step."""
        context, arranging = self._context, self._rebalancing
        effects = self._checkpoints.begin(wanted=arranging.pending)
        if context.agenda.over:
            if context.stored:
                return effects + self._complete()
            context.state = CoordinatorState.WAITING
            return effects
        if arranging.waits(now):
            context.state = CoordinatorState.WAITING
            return effects
        if arranging.pending and context.stored:
            effects += arranging.enact()
        effects += self._barrier.admit_joiners(now)
        if self._barrier.must_wait(now):
            return effects
        return effects + self._begin_or_wait(now)

    def _begin_or_wait(self, now: float) -> list[Effect]:
        context = self._context
        if self.members.uncovered():
            self._barrier.wait(now)
            return []
        work = context.agenda.take()
        if work is None:
            context.state = CoordinatorState.WAITING
            return []
        context.state = CoordinatorState.TRAINING
        self._barrier.leave()
        begun = self._steps.open(work, now)
        return [*begun, *self._admit(now), *self._overlap(now)]

    def _overlap(self, now: float) -> list[Effect]:
        """The next steps begin before those under way are committed, if nobody and nothing waits for the border between two steps."""
        if not self._steps.may_overlap or self.members.uncovered():
            return []
        if self._rebalancing.pending or self._barrier.expects():
            return []
        return self._steps.overlap(now)

    def _waited(self, now: float) -> list[Effect]:
        if not self.members.uncovered():
            return self._cross(now)
        if self._barrier.too_late(now):
            return self._roll_back("the holders of the last version did not come back in time", now)
        return self._barrier.fill_gap(now)

    def _complete(self) -> list[Effect]:
        return self._end(f"all {self._context.config.steps} steps are committed", completed=True)

    def _end(self, why: str, *, completed: bool) -> list[Effect]:
        self._context.state = CoordinatorState.FINISHED
        given_up = self._steps.clear()
        record = [] if completed else [self._context.log(kind="halt", why=why, **given_up)]
        told = self._context.end = m.Finished(why=why, completed=completed)
        return [*record, *(Send(peer, told) for peer in self.members.volunteers), Halt(why, completed)]

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _in_step(self, volunteer: Volunteer, message: m.Message, now: float) -> list[Effect]:
        """A holder's word on a step in progress."""
        number = getattr(message, "step", -1)
        step = self._steps.numbered(number)
        if step is None and isinstance(message, m.Sealed):
            ids = {microbatch for part in message.contents for microbatch in part.ids}
            self._context.afterwards.late(number, volunteer.peer, ids)
        if step is None or volunteer.peer not in step.roster:
            return []
        return [*step.receive(volunteer.peer, message, now), *self._follow(step, now)]

    def _follow(self, step: CoordinatedStep, now: float) -> list[Effect]:
        """What became of the step, as the log says it and the run's state."""
        return [*quarrelled(self._context, step), *self._outcome(step, now)]

    def _outcome(self, step: CoordinatedStep, now: float) -> list[Effect]:
        if step.trouble is not None:
            return self._end(step.trouble, completed=False)
        if (failure := step.failed()) is not None:
            return self._could_not(failure, now)
        if out := step.sums.turned_out():
            return [*done_with(self._context, step.number, out), *self._fence(out, now)]
        found, line = found_out(self._context, step), self.line
        logged = found.logged
        if out := {peer: why for peer, why in found.out.items() if peer in self.members.volunteers}:
            logged += self._fence(out, now)
        if found.anew and self.line == line:
            return [*logged, *self._go_back(self.history.version, found.anew, now)]
        if out:
            return logged
        if step.sums.decision is not None:
            if differing := self._judge(now, last=True):
                return [*logged, *differing]
            if alone := refused(self._context, step, step.sums.decision):
                self._make_room_for_others(list(alone), now)
                return [*logged, *self._fence(alone, now)]
            self._checkpoints.settle()
            return [*logged, *self._commit(step, step.sums.decision, now)]
        if step.evaluated_only:
            self._steps.remove(step)
            self._context.state = CoordinatorState.WAITING
            return [self._context.log(**evaluation_record(step)), *self._cross(now)]
        self._context.state = (
            CoordinatorState.REDUCING if self._steps.first.sums.under_way else CoordinatorState.TRAINING
        )
        return logged

    def _could_not(self, failure: FailedMicrobatch, now: float) -> list[Effect]:
        """Nobody who holds some block can compute what the step asks: others are to try, if there are any, before it is the run's end."""
        for peer in failure.holders:
            self.members.volunteers[peer].slow = True
        replaceable = self.members.spare() is not None
        seconds = room_s(self._context.config)
        if self._context.failures.are_final(failure, seconds, now, replaceable=replaceable):
            return self._end(failure.why, completed=False)
        self._make_room_for_others(failure.holders, now)
        return self._fence(dict.fromkeys(failure.holders, failure.why), now)

    def _patience(self, now: float) -> list[Effect]:
        step = self._steps.first
        if mute := step.sums.mute(now):
            self._context.quarrels.waited_in_vain(mute)
            return self._fence(mute, now)
        if self._late_joiners.hopeless(step, now):
            return self._roll_back(f"nobody comes for block {step.orphaned[0]}", now)
        return [*self._steps.tick(now), *self._follow(step, now), *self._overlap(now)]

    def _commit(self, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float) -> list[Effect]:
        effects = commit(self._context, step, decision, now)
        self._steps.committed(step)
        self.members.outdate(step.roster)
        if not self._steps:
            self._context.state = CoordinatorState.WAITING
            return effects + self._cross(now)
        effects += self._checkpoints.begin(wanted=self._rebalancing.pending)
        following = self._steps.first
        return [
            *effects,
            *self._overlap(now),
            *following.comes_next(now),
            *self._follow(following, now),
        ]

    def _applied(self, volunteer: Volunteer, message: m.Applied, now: float) -> list[Effect]:
        if message.step != self.history.version - 1 or volunteer.life_cycle is not LifeCycle.READY:
            return []
        if volunteer.digests or not self._handshake.holds(volunteer, message.held, self.history.version):
            return []
        self._agreement.hear(volunteer, message.held)
        return [*self._judge(now), *self._seal(now)]

    def _judge(self, now: float, *, last: bool = False) -> list[Effect]:
        """Whose state is another than that of most has to fetch it; where nobody knows which is right, the run goes back to one that all had alike."""
        found = self._agreement.judge(last=last)
        out = dict.fromkeys(sorted(found.wrong), "its state is not that of most holders")
        effects = self._turn_out(out, found.made, now)
        if found.torn is None:
            return effects
        quarrels, line = self._context.quarrels, self.line
        why = f"holders of block {found.torn[0]} have different states"
        one = quarrels.blamed(found.torn[1])
        quarrels.turned_out(one, shunned=False)
        quarrels.waited_in_vain([one])
        effects += self._fence({one: why}, now)
        if self.line == line:
            effects += self._roll_back(why, now)
        self._checkpoints.soon()
        return effects

    def _seal(self, now: float) -> list[Effect]:
        """The checkpoint that is collected may be complete by now."""
        if false := self._checkpoints.false(now):
            return self._turn_out(false, false, now)
        effects = self._checkpoints.look(now)
        return effects + (self._cross(now) if effects and self._context.resting else [])

    _HANDLERS: Mapping[type, Callable[..., list[Effect]]] = {
        m.Claim: _claim,
        m.Prepared: _prepared,
        m.Ready: _ready,
        m.Sealed: _in_step,
        m.Evaluated: _in_step,
        m.Failed: _in_step,
        m.Reducing: _in_step,
        m.Missed: _in_step,
        m.Objection: _in_step,
        m.Vote: _in_step,
        m.Checked: _in_step,
        m.Compared: _in_step,
        m.Shown: _in_step,
        m.Proved: _in_step,
        m.Testimony: _in_step,
        m.Applied: _applied,
        m.Paced: _paced,
        m.Shuns: _shuns,
        m.Farewell: _farewell,
    }
