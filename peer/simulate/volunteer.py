"""A simulated volunteer: the real member core, driven with virtual time, a virtual worker and virtual links."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member import Effect, InStep, Member, Origin, StepEffect
from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.slots import Drop, Merge

if TYPE_CHECKING:
    from hetpeer.peer.simulate.swarm import Swarm


Deliver = Callable[[Member, Origin, p.Handle], Iterable[Effect]]


class Volunteer:
    """One life after another of the volunteer `name`; `start` begins a new one."""

    def __init__(self, swarm: Swarm, name: str, speed: float) -> None:
        self.swarm = swarm
        self.name = name
        self.speed = speed
        self.alive = False
        self.frozen_until = 0.0
        self.member: Member | None = None
        self._lives = itertools.count(1)
        self.incarnation = 0
        self.session = 0

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """A fresh process: nothing in memory but the manifest."""
        self.alive = True
        self._new_life()
        self.states: dict[int, tuple[int, Any]] = {}
        """Block → (version, state)."""
        self._reset_tensors()
        hello = m.Hello(run="sim", incarnation=self.incarnation, flops_per_second=self.speed)
        self.member = Member(self.name, hello, self.swarm.numerics.sizes, self.swarm.config.slot_capacity)
        self.connect()

    def _new_life(self) -> None:
        self.incarnation = next(self._lives)
        self._busy_until = self.swarm.world.now

    def _reset_tensors(self) -> None:
        self._slots: dict[tuple[int, int], Any] = {}
        self._graphs: dict[p.TaskKey, Any] = {}

    def connect(self) -> None:
        """A new session with the coordinator, as soon as one is there."""
        member = self.member
        if not self.alive or member is None:
            return
        if self.swarm.coordinator is None:
            self.swarm.world.after(0.5, self.reconnector())
            return
        self.session = self.swarm.reign
        self.perform(member.connected())

    def reconnector(self) -> Callable[[], None]:
        """`connect`, unless this life is over by then."""
        life = self.incarnation
        return lambda: self.connect() if self.incarnation == life else None

    def link_down(self, peer: str) -> Callable[[], None]:
        """Our link to `peer` breaks."""
        return lambda: self.later(lambda core: core.unreachable(peer))

    def link_up(self, peer: str) -> Callable[[], None]:
        """Our link to `peer` is back."""
        return lambda: self.later(lambda core: core.reachable(peer))

    def kill(self) -> None:
        """SIGKILL: memory and everything under way are gone."""
        self.alive = False
        self.member = None
        self.swarm.noticed_death(self.name)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP for `seconds`: everything that arrives waits."""
        self.frozen_until = max(self.frozen_until, self.swarm.world.now + seconds)

    def later(self, action: Callable[[Member], Iterable[Effect] | None], *, life: int | None = None) -> None:
        """Carry out `action` on the core now, or once thawed; dropped if this life is over."""
        life = self.incarnation if life is None else life
        if not self.alive or life != self.incarnation or self.member is None:
            return
        if self.swarm.world.now < self.frozen_until:
            wait = self.frozen_until - self.swarm.world.now
            self.swarm.world.after(wait, lambda: self.later(action, life=life))
            return
        self.perform(action(self.member) or ())

    # ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if not self.alive:
                return
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        assert self.member is not None
        swarm = self.swarm
        match effect:
            case InStep(step, inner):
                self._perform_in_step(step, inner)
            case e.Tell(message):
                swarm.tell(self, message)
            case e.Choose(places):
                place = min((q for q in places if q.open), key=lambda q: (q.holders, q.cluster, q.begin))
                self.perform(self.member.chosen(place))
            case e.Prepare():
                self._work(0.2, lambda core: core.prepared())
            case e.FetchState(line, version, sources, _digests):
                swarm.fetch(self, line, version, sources)
            case e.SaveState(version, blocks):
                for block in blocks:
                    swarm.save(self, version, block, self.states[block][1])
            case e.RecordApplied():
                swarm.record_applied(self, effect)
            case e.EndStep():
                self._reset_tensors()
            case e.Leave():
                self._new_life()
                swarm.world.after(0.2, self._rejoin(self.incarnation))
            case e.Stop():
                self.alive = False
            case p.Release(handle):
                swarm.release(handle)

    def _perform_in_step(self, step: e.StepId, effect: StepEffect) -> None:
        swarm, numerics = self.swarm, self.swarm.numerics
        match effect:
            case p.RunForward(key, end, source, _train):
                self._run_forward(step, key, end, source)
            case p.RunBackward():
                self._run_backward(step, effect)
            case p.ForgetGraph(key):
                self._graphs.pop(key, None)
            case Merge(block, source_slot, target):
                both = [self._slots.get((target, block)), self._slots.pop((source_slot, block))]
                self._slots[target, block] = numerics.add(g for g in both if g is not None)
            case Drop(block, slot):
                self._slots.pop((slot, block), None)
            case p.SendActivation(number, route, attempt, handle):
                to = route[0].peer
                self._carry(
                    to, handle, lambda core, at, h: core.activation(at, number, route, attempt, h), step
                )
            case p.SendGradient(number, to, border, handle):
                self._carry(to, handle, lambda core, at, h: core.gradient(at, number, border, h), step)
            case e.SendPart(shard, slot):
                part = swarm.box(numerics.shard(self._slots[slot, shard.block], shard.begin, shard.end))
                self._carry(
                    shard.reducer,
                    part,
                    lambda core, at, h: core.part(at, shard.block, shard.index, h),
                    step,
                    shard,
                )
            case e.SumParts(shard, parts):
                total = swarm.box(numerics.add(swarm.unbox(h) for h in parts))
                self._work(0.01, lambda core: core.summed(step, shard, total))
            case e.SendResult(shard, to, handle):
                self._carry(
                    to, handle, lambda core, at, h: core.result(at, shard.block, shard.index, h), step, shard
                )
            case e.Inspect(plan, block, shards):
                gradient = numerics.join([swarm.unbox(h) for h in shards])
                digest, norm = numerics.inspect(gradient)
                vote = m.BlockVote(block=block, digest=digest, squared_norm=norm, finite=True)
                boxed = swarm.box(gradient)
                self._work(0.01, lambda core: core.inspected(step, plan, vote, boxed))
            case e.ApplyUpdate(block, gradient, coefficient):
                self._apply(step, block, swarm.unbox(gradient), coefficient)
            case p.Release(handle):
                swarm.release(handle)
            case _:
                raise AssertionError(effect)

    def _rejoin(self, life: int) -> Callable[[], None]:
        def rejoin() -> None:
            if self.alive and self.incarnation == life and self.member is not None:
                self.perform(self.member.reborn(life))
                self.connect()

        return rejoin

    def _carry(
        self, to: str, handle: p.Handle, deliver: Deliver, step: e.StepId, shard: e.Shard | None = None
    ) -> None:
        """Send a tensor: the receiver gets a handle of its own, and learns from us what it belongs to."""
        origin = Origin(self.name, self.incarnation, step, None if shard is None else shard.plan)
        self.swarm.carry(self, to, self.swarm.unbox(handle), lambda core, h: deliver(core, origin, h))

    def _run_forward(self, step: e.StepId, key: p.TaskKey, end: int, source: Any) -> None:
        swarm = self.swarm
        if swarm.poisoned(self.name, key.id):
            self._work(0.01, lambda core: core.work_failed(step, key, "non-finite output"))
            return
        bundle = None if source is None else swarm.unbox(source)
        states = [self.states[b][1] for b in range(key.begin, end)]
        kept, out = swarm.numerics.forward(states, key.begin, (step.number, key.id), bundle)
        self._graphs[key] = kept
        last = end == swarm.numerics.blocks
        output, loss = (None, out) if last else (swarm.box(out), None)
        seconds = 0.05 * (end - key.begin) / self.speed
        self._work(seconds, lambda core: core.forward_done(step, key, output, loss))

    def _run_backward(self, step: e.StepId, work: p.RunBackward) -> None:
        numerics, swarm, graphs, slots = self.swarm.numerics, self.swarm, self._graphs, self._slots

        def finish(core: Member) -> Iterable[Effect]:
            if core.step == step and work.key in graphs and graphs is self._graphs:
                gradient = None if work.gradient is None else swarm.unbox(work.gradient)
                back, gradients = numerics.backward(graphs.pop(work.key), gradient)
                for block, part in zip(range(work.key.begin, work.end), gradients, strict=True):
                    if block in work.fold:
                        have = slots.get((work.slot, block))
                        slots[work.slot, block] = part if have is None else numerics.add((have, part))
                handle = swarm.box(back) if work.key.begin > 0 else None
                return core.backward_done(step, work.key, handle)
            return []

        self._work(0.1 * (work.end - work.key.begin) / self.speed, finish)

    def _apply(self, step: e.StepId, block: int, gradient: Any, coefficient: float) -> None:
        def finish(core: Member) -> Iterable[Effect]:
            if block not in self.states:
                return []
            state = self.swarm.numerics.apply(self.states[block][1], gradient, coefficient)
            self.states[block] = (step.number + 1, state)
            return core.applied(step, block, self.swarm.numerics.digest(state))

        self._work(0.02, finish)

    def load(self, line: m.Line, version: int, states: dict[int, Any]) -> None:
        """Fetched states go into the worker, behind whatever it still does."""

        def finish(core: Member) -> Iterable[Effect]:
            self.states = {block: (version, state) for block, state in states.items()}
            digests = {b: self.swarm.numerics.digest(s) for b, s in states.items()}
            return core.state_loaded(line, version, digests)

        self._work(0.1, finish)

    def _work(self, seconds: float, finish: Callable[[Member], Iterable[Effect]]) -> None:
        """The worker does one thing after another."""
        world, life = self.swarm.world, self.incarnation
        self._busy_until = max(self._busy_until, world.now) + seconds * world.random.uniform(0.7, 1.5)
        world.after(self._busy_until - world.now, lambda: self.later(finish, life=life))
