"""The coordinator: who takes part, which step runs, when it is committed.

Pure: messages and time in, effects out; the daemon and the simulator drive the same object. This file answers
the events; machine.py has all transitions between states. Everything that must outlive a term goes through
`Record` effects, which the driver makes durable before it carries out the next effect; after a restart the
folded log (`History`) is all that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.handshake import Handshake
from hetpeer.bootstrap.coordinator.machine import Event, Machine
from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.bootstrap.coordinator.run_policy import RunPolicy
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import (
    BadSample,
    CollectCheckpoint,
    CoordinatorState,
    Disconnect,
    Effect,
    TryMicrobatch,
)
from hetpeer.bootstrap.state.planned_seats import PlannedSeats
from hetpeer.bootstrap.state.timeouts import Leases
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState
from hetpeer.bootstrap.state.work_shares import rates


class Coordinator:
    """One term of a coordinator. `start` gives the first effects. `policy`: of a grouped run's cluster.

    >>> Coordinator(whole_run(config, History.of(records)), now=0.0).start()  # doctest: +SKIP
    [Record(record={'kind': 'reign', 'term': 1})]
    """

    due_at = math.inf
    """As in a grouped run, where `tick` is due at other times than the regular ones."""

    def __init__(self, context: CoordinatorContext, now: float, policy: RunPolicy | None = None) -> None:
        self._context = context
        self._begun = now
        self.members, self.history = context.members, context.history
        self.leases = Leases(context, now)
        self.seats = PlannedSeats(context.history, context.members, now)
        self.handshake = Handshake(context, self.seats)
        self.machine = Machine(context, now, policy)

    def start(self) -> list[Effect]:
        """First effects: the term is durable before we speak in its name. A complete run ends at once."""
        if self._context.agenda.over and self._context.history.stored:
            return self.machine.complete()
        effects = [self._context.log(kind="reign", term=self.line.term), *self._planned()]
        self.seats.look(self._begun)
        return effects

    def _planned(self) -> list[Effect]:
        """Put the plan that was given into force, unless it was in force before."""
        plan, known = self._context.config.plan, self.history.plan
        if plan is None or (known is not None and known["id"] == plan.id):
            return []
        layouts = [[list(place) for place in layout] for layout in plan.layouts]
        planned = self._context.log(kind="planned", id=plan.id, layouts=layouts, plan=plan.document())
        self.members.arrange([[(b, e) for b, e in layout] for layout in self.history.arranged])
        return [planned]

    # ── what others see of it ───────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> CoordinatorState:
        """The state of docs/protocol.md."""
        return self._context.state

    @property
    def line(self) -> m.TermView:
        """Term and view that hold now."""
        return self._context.line

    @property
    def step(self) -> int | None:
        """The oldest step in progress."""
        steps = self.machine.steps
        return steps.first.number if steps else None

    @property
    def volunteers(self) -> int:
        """Volunteers that take part."""
        return len(self.members.volunteers)

    @property
    def done(self) -> int:
        """Committed steps."""
        return self.history.version

    @property
    def last(self) -> list[Mapping[str, Any]]:
        """The record of the last commit; empty before the first."""
        commit = self.history.commits.get(self.history.version - 1)
        return [] if commit is None else [commit]

    def working(self) -> dict[str, m.Range]:
        """Holder of the current version → its blocks."""
        return self.members.roster()

    @property
    def missing_blocks(self) -> Sequence[int]:
        """Blocks without a ready holder: the run waits for them."""
        return self.members.uncovered()

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """Answer a message of `peer` (the transport's word, not the message's)."""
        if isinstance(message, m.Hello):
            return self._hello(peer, message, now)
        volunteer = self.members.volunteers.get(peer)
        if volunteer is None:
            return [
                Disconnect(peer)
            ]  # it begins a new session, and keeps its state if that is still the run's
        if self.state is CoordinatorState.FINISHED:
            return []
        volunteer.heard(now)
        handler = self._HANDLERS.get(type(message))
        line = getattr(message, "line", None)
        if handler is None or (line is not None and line != self.line):
            return []
        effects: list[Effect] = handler(self, volunteer, message, now)
        return effects

    def broken(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` broke; it may come back within the grace."""
        self.leases.broken(peer, now)
        return []

    def resumed(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` is back and nothing was lost on the way."""
        if peer in self.members.volunteers:
            self.members.volunteers[peer].heard(now)
        return []

    def renewed(self, now: float) -> None:
        """All streams broke at once: our network process, or our line."""
        self.leases.renewed(now)

    def saved(self, order: CollectCheckpoint, block: int, digest: str, now: float) -> list[Effect]:
        """The state of `block` that `order` asks for has arrived and lies durably in the checkpoint store."""
        self.machine.checkpoints.saved(order, block, digest, now)
        return self.machine.seal(now)

    def not_saved(self, order: CollectCheckpoint, _now: float) -> list[Effect]:
        """The checkpoint that `order` asks for was not collected: it is tried again at the next barrier."""
        self.machine.checkpoints.failed(order)
        return []

    def tried(self, trial: TryMicrobatch, bad: BadSample | None, now: float) -> list[Effect]:
        """The microbatch of `trial` was computed here; None: it can be, or this machine cannot try."""
        return self.machine.tried(trial, bad, now)

    @property
    def may_arrange(self) -> bool:
        """Whether an arrangement would be heard: the run goes on, and no silent holder is awaited."""
        return self.state is not CoordinatorState.FINISHED and not self.machine.barrier.awaited

    def arrange(self, arrangement: Arrangement, now: float) -> list[Effect]:
        """A planner proposes who has which blocks: from the next barrier on, once that version is stored.

        A step that waits for a holder is given up for it. Nothing happens if others are here by now than
        those it was made for. Raises `ValueError` for an arrangement that does not fit the model.
        """
        machine = self.machine
        if not self.may_arrange or not machine.rebalancing.propose(arrangement, now):
            return []
        if orphaned := machine.steps.orphaned:
            return machine.roll_back(f"nobody comes for block {orphaned[0]}: others take it over", now)
        return machine.on(Event.ARRANGED, now)

    def tick(self, now: float) -> list[Effect]:
        """Check leases, graces and deadlines. To be called a few times a second."""
        if self.state is CoordinatorState.FINISHED:
            return []
        machine, pause_s = self.machine, self.leases.tick(now)
        machine.barrier.excuse(pause_s, now)
        self.seats.excuse(pause_s)
        self.seats.look(now)
        machine.barrier.look(now)
        effects = machine.on(Event.ROOM, now) if self._context.failures.wake(now) else []
        effects += machine.departures.lose(self.leases.expired(now), now, back=True)
        effects += machine.step_in(now)
        effects += machine.states.judge(now)
        effects += machine.seal(now)
        effects += machine.departures.see_off(now)
        effects += machine.on(Event.TICK, now)
        return effects + machine.barrier.backup_fetches.order(now)

    # ── messages of volunteers that join and leave ──────────────────────────────────────────────────────────

    def _hello(self, peer: str, hello: m.Hello, now: float) -> list[Effect]:
        refusal = self.handshake.refuse(peer, hello)
        if refusal:
            return refusal
        self._context.failures.met(peer)
        known = {peer: "came back as a new session"} if peer in self.members.volunteers else {}
        # one that missed the last commit may still hold its gradients (`Welcome.commit`)
        back = any(held.version in (self.history.version, self.history.version - 1) for held in hello.held)
        effects = self.machine.departures.lose(known, now, back=back)
        if not back:
            self.machine.barrier.awaits_no_more(peer, now)
        return [*effects, *self.handshake.welcome(peer, hello, now)]

    def _claim(self, volunteer: VolunteerState, message: m.Claim, now: float) -> list[Effect]:
        return self.handshake.claim(volunteer, message, now)

    def _prepared(self, volunteer: VolunteerState, message: m.Prepared, now: float) -> list[Effect]:
        """Note that `volunteer` has loaded its graphs; if it was ready, it has lost its state."""
        if volunteer.place is None:
            return []
        volunteer.flops_per_second = message.flops_per_second or volunteer.flops_per_second
        line, effects = self.line, list[Effect]()
        self.machine.barrier.awaits_no_more(volunteer.peer, now)
        if volunteer.life_cycle is LifeCycle.READY:
            effects = self.machine.departures.relapsed(volunteer, now)
        if self.line != line:
            return effects  # the run rolled back, and asks everybody to prepare
        volunteer.prepare()
        return effects + self.machine.on(Event.ROOM, now)

    def _ready(self, volunteer: VolunteerState, message: m.Ready, now: float) -> list[Effect]:
        """`volunteer` holds a version: it enters the running step, waits, or prepares for a later one."""
        machine, step = self.machine, self.machine.steps.fresh
        complete = volunteer.holds(message.held, message.version)
        if not complete or volunteer.life_cycle is LifeCycle.READY:
            return []
        if not machine.barrier.lets_in(volunteer, message.version, message.held, step, now):
            return machine.on(Event.ROOM, now)
        line, effects = self.line, machine.states.hear(volunteer, message.held, now)
        if self.line != line or self.members.volunteers.get(volunteer.peer) is not volunteer:
            return effects
        if step is not None and machine.barrier.takes(step, volunteer):
            assert volunteer.place is not None
            speed = rates(self.members.ready(), self.members.costs)[volunteer.peer]
            entered = step.enter(volunteer.peer, volunteer.incarnation, volunteer.place, speed, now)
            return [*effects, *entered, *machine.overlap(now)]
        return effects + machine.on(Event.ROOM, now)

    def _farewell(self, volunteer: VolunteerState, message: m.Farewell, now: float) -> list[Effect]:
        return self.machine.departures.farewell(volunteer, message.within_s, now)

    # ── messages of volunteers that work ────────────────────────────────────────────────────────────────────

    def _paced(self, volunteer: VolunteerState, message: m.Paced, _now: float) -> list[Effect]:
        volunteer.computing, volunteer.links = message.computing, message.links
        volunteer.measured(message.uplink)
        volunteer.moved(message.coordinate)
        return []

    def _shuns(self, volunteer: VolunteerState, message: m.Shuns, _now: float) -> list[Effect]:
        """Nothing passes between these any more: microbatches under way there take another route."""
        volunteer.shuns = frozenset(message.peers)
        return self.machine.steps.part(volunteer.peer, message.peers)

    def _in_step(self, volunteer: VolunteerState, message: m.Message, now: float) -> list[Effect]:
        """A holder reports on a step in progress."""
        number = getattr(message, "step", -1)
        step = self.machine.steps.numbered(number)
        if step is None and isinstance(message, m.Sealed):
            ids = {microbatch for part in message.contents for microbatch in part.ids}
            self._context.late_work.late(number, volunteer.peer, ids)
        if step is None or volunteer.peer not in step.roster:
            return []
        return [*step.receive(volunteer.peer, message, now), *self.machine.follow(step, now)]

    def _applied(self, volunteer: VolunteerState, message: m.Applied, now: float) -> list[Effect]:
        if message.step != self.history.version - 1 or volunteer.life_cycle is not LifeCycle.READY:
            return []
        if volunteer.digests or not volunteer.holds(message.held, self.history.version):
            return []
        return [*self.machine.states.hear(volunteer, message.held, now), *self.machine.seal(now)]

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
    """Message → handler in every state but FINISHED, in which nothing is answered."""
