"""A simulated volunteer: the real member core, driven as the daemon drives it, with a virtual worker and virtual links.

A *process* lives from `start` to `kill`; within it a fenced volunteer gets a new incarnation, and a broken control
stream a new session. What was under way for an older process or session does not arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member import Effect, InStep, Member, Origin, Phase, StepEffect
from hetpeer.dht.credit import Pool
from hetpeer.peer.pressure import ACTIVATIONS, GRADIENTS, SHARDS
from hetpeer.peer.simulate.board import LOOK_S
from hetpeer.peer.simulate.boxes import Boxes
from hetpeer.peer.simulate.checks import require
from hetpeer.peer.simulate.lines import Frame, Line
from hetpeer.peer.simulate.worker import Worker
from hetpeer.peer.simulate.world import Gate
from hetpeer.stages.execution import effects as p
from hetpeer.stages.execution.routes import Hop
from hetpeer.stages.execution.slots import Drop, Merge
from hetpeer.stages.execution.window import Window

if TYPE_CHECKING:
    from hetpeer.peer.simulate.swarm import Swarm

Deliver = Callable[[Member, Origin, p.Handle], Iterable[Effect]]

PREPARE_S = (0.1, 1.0)
REJOIN_S = 0.2
FETCH_RETRY_S = 0.3


class Volunteer:
    """One process after another of the volunteer `name`."""

    def __init__(self, swarm: Swarm, name: str, speed: float, uplink: float) -> None:
        self.swarm = swarm
        self.name = name
        self.alive = False
        self.process = 0
        self.session = 0
        self.fetch_s = swarm.config.fetch_s
        """How long the transfer of one block's state takes."""
        self.poison: set[int] = set()
        """Work that is to fail (worker.py)."""
        self._speed, self._uplink = speed, uplink
        self._gate = Gate(swarm.world)
        self._incarnations = itertools.count(1)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, run: str = "sim") -> None:
        """A fresh process of a volunteer of `run`: nothing in memory but the manifest."""
        if self.alive:
            return
        swarm = self.swarm
        self.alive = True
        self._gate = Gate(swarm.world)
        self.process += 1
        self.boxes = Boxes()
        window = Window()
        self._lines: dict[str, Line] = {}
        self._introduced: set[str] = set()
        """Whom we have told that we came into the step in progress while it ran."""
        self._sent: set[tuple[e.StepId, int, Hop]] = set()
        self.worker = Worker(
            swarm.world,
            swarm.numerics,
            self.boxes,
            window,
            self._speed,
            self.poison,
            self._answer_of(self.process),
            swarm.config.ground,
        )
        self.snapshots: dict[tuple[m.Line, int, int], Any] = {}
        """(line, version, block) → state, copied for the coordinator to fetch."""
        self._preparing = 0
        self._fetching = 0
        hello = m.Hello(
            run=run, name=self.name, incarnation=next(self._incarnations), flops_per_second=self._speed
        )
        self.member = Member(self.name, hello, swarm.shape, window.depth)
        self.connect()
        self._look_at_board(self.process)

    def kill(self) -> None:
        """SIGKILL: memory and everything under way are gone."""
        if self.alive:
            self.alive = False
            self.swarm.noticed_death(self)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP for `seconds`: everything that arrives waits."""
        self._gate.close(seconds)

    @property
    def frozen(self) -> bool:
        return self._gate.closed

    def connect(self) -> None:
        """A new session with the coordinator; what is told waits until one is there."""
        self.session = next(self.swarm.sessions)
        self.perform(self.member.connected())

    def lost_session(self, session: int) -> Callable[[], None]:
        """The other end has closed `session`, or does not know it."""

        def reconnect(_core: Member) -> Iterable[Effect]:
            if self.session == session:
                self.connect()
            return ()

        process = self.process
        return lambda: self.later(process, reconnect)

    def later(self, process: int, action: Callable[[Member], Iterable[Effect]]) -> None:
        """Carry out `action` on the core now, or once thawed; dropped if that process is dead."""

        def act() -> None:
            if self.alive and process == self.process:
                self.perform(action(self.member))

        self._gate.enter(act)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """Our link to `peer` breaks or is back."""

        def changed(core: Member) -> Iterable[Effect]:
            if is_up:
                core.reachable(peer)
                return ()
            return core.unreachable(peer)

        self.later(self.process, changed)

    def _answer_of(self, process: int) -> Callable[[Callable[[Member], Iterable[Effect]]], None]:
        return lambda finish: self.later(process, finish)

    # ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in order."""
        for effect in effects:
            if not self.alive:
                return
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        swarm = self.swarm
        match effect:
            case InStep(step, inner):
                self._perform_in_step(step, inner)
            case e.Tell(message):
                swarm.tell(self, message)
            case e.Choose(places):
                self.perform(self.member.chosen(swarm.choice(self.name, places)))
            case e.Prepare(begin, end):
                self._prepare((begin, end))
            case e.FetchState():
                self._fetch(effect)
            case e.SaveState():
                self._snapshot(effect)
            case e.RecordApplied():
                swarm.checks.applied(self.name, effect, self.worker.before)
                versions = max(map(len, self.worker.states.values()))
                swarm.checks.keeps(self.name, versions, sum(not one.group for one in self.member.steps))
                if self._uplink:
                    swarm.tell(self, m.Paced(computing=0.0, links={}, uplink=self._uplink))
            case e.EndStep(step):
                self._sent = {sent for sent in self._sent if sent[0] != step}
                self._introduced.clear()
                for line in self._lines.values():
                    line.end_step(step.on_wire)
                self.boxes.end_step(step)
                self.boxes.end_step(step.on_wire)
                self.worker.clear_step(step) if not step.group else self.worker.drop_copies()
            case e.Leave():
                process = self.process
                swarm.world.after(REJOIN_S, lambda: self.later(process, self._rejoin))
            case e.Stop():
                self.alive = False
            case p.Release(handle):
                self.boxes.release(handle)

    def _perform_in_step(self, step: e.StepId, effect: StepEffect) -> None:
        worker = self.worker
        match effect:
            case p.RunForward():
                worker.forward(step, effect)
            case p.RunBackward():
                slots = self.member.slots(step)
                assert slots is not None
                self.swarm.checks.folding(self.name, slots, range(effect.key.begin, effect.end))
                worker.backward(step, effect)
            case p.ForgetGraph(key):
                worker.forget_graph(step, key)
            case Merge() | Drop():
                worker.merge_or_drop(step, effect)
            case e.SumParts():
                worker.sum(step, effect)
            case e.Inspect():
                worker.inspect(step, effect)
            case e.ApplyUpdate() | e.InstallAverage():
                worker.apply(step, effect)
            case e.KeepCopy():
                worker.keep_copy(step, effect)
            case p.Release(handle):
                self.boxes.release(handle)
            case _:
                self._send(step, effect)

    def _send(self, step: e.StepId, effect: StepEffect) -> None:
        origin = Origin(self.name, self.member.incarnation, step.on_wire)
        match effect:
            case p.SendActivation(number, route, attempt, handle):
                pool = ACTIVATIONS + len(route) - 1
                if (step, number, route[0]) in self._sent and (line := self._line(route[0].peer)) is not None:
                    line.nudge(pool, lambda core: core.nudge(origin, number, route, attempt))
                self._sent.add((step, number, route[0]))
                self._carry(
                    route[0].peer,
                    handle,
                    origin,
                    lambda core, at, h: core.activation(at, number, route, attempt, h),
                    pool,
                    nbytes=self.swarm.bundle(self.name, route[0].peer, route[0].begin),
                )
            case p.SendGradient(number, to, border, handle):
                self._carry(
                    to,
                    handle,
                    origin,
                    lambda core, at, h: core.gradient(at, number, border, h),
                    GRADIENTS,
                    nbytes=self.swarm.bundle(self.name, to, border, back=True),
                )
            case e.SendPart():
                self._send_part(step, effect)
            case e.SendResult(shard, to, handle):
                result = Origin(self.name, self.member.incarnation, step.on_wire, shard.plan)
                self._carry(
                    to,
                    handle,
                    result,
                    lambda core, at, h: core.result(at, shard.block, shard.index, h),
                    SHARDS,
                    shard.end - shard.begin,
                    nbytes=self.swarm.reduced(shard),
                )
            case _:
                raise AssertionError(effect)

    def _send_part(self, step: e.StepId, effect: e.SendPart) -> None:
        shard, process = effect.shard, self.process
        part = Origin(self.name, self.member.incarnation, step.on_wire, shard.plan)

        def leave(core: Member) -> Iterable[Effect]:
            if core.works_on(step):
                self.worker.export(
                    step,
                    effect,
                    lambda piece: self._carry(
                        shard.reducer,
                        piece,
                        part,
                        lambda core, at, h: core.part(at, shard.block, shard.index, h),
                        SHARDS,
                        shard.end - shard.begin,
                        nbytes=self.swarm.reduced(shard),
                    ),
                )
            return ()

        late = self.swarm.world.random.uniform(*self.swarm.config.part_s) if step.group else 0.0
        if late:
            self.swarm.world.after(late, lambda: self.later(process, leave))
        else:
            leave(self.member)

    def _carry(
        self,
        to: str,
        handle: p.Handle,
        origin: Origin,
        deliver: Deliver,
        pool: Pool,
        cost: int = 1,
        *,
        nbytes: float,
    ) -> None:
        """Send a tensor: the receiver makes a handle of its own, and learns from us what it belongs to."""
        if self.member.step is not None and self.member.step.entry and to not in self._introduced:
            self._introduce(to)
        receiver, value = self.swarm.volunteers[to], self.boxes.value(handle)
        if (line := self._line(to)) is not None:
            line.send(Frame(pool, cost, origin.step, value, lambda core, h: deliver(core, origin, h)))
            return
        self.swarm.carry(
            self, receiver, lambda core: deliver(core, origin, receiver.boxes.new(origin.step, value)), nbytes
        )

    # ── leftovers ────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_at_board(self, process: int) -> None:
        """Show what we keep for holders that we do not know; when idle, ask for what others keep for us."""
        swarm = self.swarm

        def look(core: Member) -> Iterable[Effect]:
            step, place = core.step, core.place
            if step is not None and place is not None:
                for border in core.leftovers():
                    swarm.board.post(border, self.name, step.on_wire)
                if core.is_idle:
                    for sender, theirs in swarm.board.read(range(*place)):
                        if theirs == step.on_wire and sender != self.name:
                            self._introduce(sender)
            return ()

        if self.alive and process == self.process:
            self.later(process, look)
            swarm.world.after(LOOK_S, lambda: self._look_at_board(process))

    def _introduce(self, to: str) -> None:
        """Say to `to` which blocks we hold in this step. What we send may overtake it."""
        step, place, swarm = self.member.step, self.member.place, self.swarm
        assert step is not None
        assert place is not None
        self._introduced.add(to)
        origin, receiver = Origin(self.name, self.member.incarnation, step.on_wire), swarm.volunteers[to]
        process = receiver.process

        def say() -> None:
            swarm.network.send(
                self.name, to, lambda: receiver.later(process, lambda core: core.introduced(origin, place))
            )

        swarm.world.after(swarm.board.random.choice((0.0, 0.0, 0.1)), say)

    def _line(self, to: str) -> Line | None:
        """The link with credit to another volunteer, if this history has such."""
        frames, receiver = self.swarm.config.credit, self.swarm.volunteers[to]
        if not frames or to == self.name:
            return None
        line = self._lines.get(to)
        if line is None or not line.stands:
            line = self._lines[to] = Line(self, receiver, frames)
        return line

    # ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self, place: m.Range) -> None:
        """Load the graphs of `place`; a later order takes the place of an earlier one."""
        self._preparing += 1
        order = self._preparing
        self.snapshots.clear()
        self.worker.unload()

        def finish(core: Member) -> Iterable[Effect]:
            if order != self._preparing:
                return ()
            self.worker.graphs_of = place
            return core.prepared(self._speed)

        process = self.process
        self.swarm.world.after(
            self.swarm.world.random.uniform(*PREPARE_S),
            lambda: self.later(process, lambda _: self._submit(finish)),
        )

    def _submit(self, finish: Callable[[Member], Iterable[Effect]]) -> Iterable[Effect]:
        self.worker.submit(0.0, finish)
        return ()

    def _rejoin(self, core: Member) -> Iterable[Effect]:
        self.perform(core.reborn(next(self._incarnations)))
        self.connect()
        return ()

    def _fetch(self, order: e.FetchState) -> None:
        """Load block after block, as long as it takes; a later order takes the place of an earlier one."""
        assert self.member.place is not None
        self._fetching += 1
        number, process = self._fetching, self.process
        missing = list(range(*self.member.place))
        digests: dict[int, str] = {}

        def go_on(core: Member) -> Iterable[Effect]:
            if number != self._fetching:
                return ()
            if not missing:
                return core.state_loaded(order.line, order.version, digests)
            block = missing[0]
            state = self._find(order, block)
            if state is None:
                self.swarm.world.after(FETCH_RETRY_S, lambda: self.later(process, go_on))
                return ()
            missing.pop(0)
            digests[block] = self.swarm.numerics.digest(state)
            self.worker.load(
                order.version,
                block,
                state,
                lambda: self.swarm.world.after(
                    self.swarm.world.random.uniform(*self.fetch_s), lambda: self.later(process, go_on)
                ),
            )
            return ()

        self.swarm.world.after(
            self.swarm.world.random.uniform(*self.fetch_s), lambda: self.later(process, go_on)
        )

    def _find(self, order: e.FetchState, block: int) -> Any:
        """The state from one of its holders, or from the coordinator's checkpoint; None if nobody has it now."""
        wanted = order.digests.get(block)
        for name in order.sources.get(block, ()):
            holder = self.swarm.volunteers[name]
            if holder is not self and holder.alive and not holder.frozen:
                state = holder.state(order.version, block)
                if state is not None and wanted in (None, self.swarm.numerics.digest(state)):
                    return state
        return self.swarm.sealed_state(order.origin, order.version, block)

    # ── states ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self, order: e.SaveState) -> None:
        """Copy what the order names; the worker still has it when the copy's turn comes."""

        def copy(_core: Member) -> Iterable[Effect]:
            for block, digest in order.digests.items():
                version = max(self.worker.states[block])
                state = self.worker.states[block][version]
                exact = (version, self.swarm.numerics.digest(state)) == (order.version, digest)
                require(exact, f"{self.name} is to copy version {order.version} of block {block}")
                self.snapshots[order.line, order.version, block] = state
            return ()

        self.worker.submit(0.0, copy)

    def state(self, version: int, block: int) -> Any:
        """What we give to whoever asks for `block` at `version`; None if we do not have it."""
        member = self.member
        if (member.line, version, block) in self.snapshots:
            return self.snapshots[member.line, version, block]
        if member.version != version or block not in member.digests or member.phase is Phase.APPLYING:
            return None
        states = self.worker.states[block]
        return states[version] if max(states) == version else None
