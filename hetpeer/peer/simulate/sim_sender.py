"""Sending of a simulated volunteer: tensors, with flow control or without, introductions, and the task board.

A late joiner introduces itself to every volunteer that it sends to, and to those whose notes on the board say
that they keep leftovers for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import effects as e
from hetpeer.averaging.effects import Effect, Shard, StepEffect, StepId
from hetpeer.averaging.member.held_step import Bundle
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.position import Origin
from hetpeer.dht.streams.flow_control import Pool
from hetpeer.peer.simulate.network.sim_links import SimFrame, SimLink, SimTensors
from hetpeer.peer.simulate.network.sim_uplinks import SimUplinks
from hetpeer.peer.simulate.network.world import SimNetwork, World
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_worker import Answer, SimWorker
from hetpeer.peer.transport.uplink import GRADIENTS, SHARDS
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.routes import Hop
from hetpeer.stages.pipeline.schedule_1f1b import blocks_left

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_swarm import SimSwarm
    from hetpeer.peer.simulate.sim_volunteer import SimVolunteer

Deliver = Callable[[Member, Origin, p.Handle], Iterable[Effect]]

DUPLICATE_LATE_S = (0.5, 30.0)
"""Seconds by which the second copy of a doubled tensor is late, if it is late."""
LOOK_S = 0.5
APPEARS_S, LOST = (0.05, 1.0), 0.1
TTL_S = 5.0


@dataclass(eq=False)
class TensorTraffic:
    """Tensors on `network`. Without `uplinks` bytes cost no time and are not counted."""

    _world: World
    _network: SimNetwork
    _uplinks: SimUplinks | None
    _config: SwarmConfig
    _sizes: Mapping[int, int]

    def bundle(self, sender: str, to: str, border: int, *, back: bool = False) -> float:
        """Bytes of the activation that enters block `border`, or of its gradient, which goes `back`."""
        return 0.0 if self._uplinks is None else self._uplinks.bundle(sender, to, border, back=back)

    def seconds(self, sender: str) -> dict[str, float]:
        """Receiver → seconds of the largest bundle of `sender`; empty without uplinks."""
        return {} if self._uplinks is None else self._uplinks.seconds(sender)

    def reduced(self, shard: Shard) -> float:
        """Bytes of a part or of the sum of `shard`."""
        hardware = self._config.hardware
        if hardware is None:
            return 0.0
        part = (shard.end - shard.begin) / self._sizes[shard.block]
        return hardware.reduced(shard.block) * part

    def carry(
        self,
        sender: str,
        receiver: SimVolunteer,
        deliver: Callable[[Member], Iterable[Effect]],
        nbytes: float,
    ) -> None:
        """Carry a tensor to another volunteer; sometimes twice, and the second copy may be late."""
        process, random, send = receiver.process, self._world.random, self._network.send
        send(sender, receiver.name, lambda: receiver.later(process, deliver), nbytes)
        if random.random() < self._config.duplicates:
            delay = random.choice((0.0, random.uniform(*DUPLICATE_LATE_S)))
            self._world.after(
                delay, lambda: send(sender, receiver.name, lambda: receiver.later(process, deliver))
            )


class SimTaskBoard:
    """Notes about leftovers.

    They appear late, are sometimes lost, and expire; as in the DHT, nobody decides anything here.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.random = random.Random(f"board {seed}")  # noqa: S311 - repeatable, not secret
        """Randomness of its own, so that the board does not change histories without leftovers."""
        self._world = world
        self._notes: dict[tuple[int, str], tuple[StepId, float]] = {}

    def post(self, border: int, sender: str, step: StepId) -> None:
        """Note that `sender` keeps bundles that enter block `border`; it may be lost."""
        if self.random.random() < LOST:
            return

        def appear() -> None:
            self._notes[border, sender] = step, self._world.now + TTL_S

        self._world.after(self.random.uniform(*APPEARS_S), appear)

    def read(self, blocks: range) -> list[tuple[str, StepId]]:
        """(sender, step) of the notes about any of `blocks`."""
        return [
            (sender, step)
            for (border, sender), (step, until) in self._notes.items()
            if border in blocks and until > self._world.now
        ]


@dataclass(eq=False)
class SimSender:
    """Sends what `member` orders, from volunteer `name` of `swarm`.

    `later` calls the core when the process comes to it; `perform` carries out effects of a call that was made
    already.
    """

    _swarm: SimSwarm
    _name: str
    _member: Member
    _boxes: SimTensors
    _worker: SimWorker
    _later: Answer
    _perform: Callable[[Iterable[Effect]], None]
    _links: dict[str, SimLink] = field(default_factory=dict)
    _introduced: set[str] = field(default_factory=set)
    """Volunteers that know that this one entered the step in progress while it ran."""
    _sent: set[tuple[e.StepId, int, Hop]] = field(default_factory=set)

    def end_step(self, step: e.StepId) -> None:
        """Drop tensors of `step` that wait to be sent."""
        self._sent = {sent for sent in self._sent if sent[0] != step}
        self._introduced.clear()
        for link in self._links.values():
            link.end_step(step.on_wire)

    # ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, step: e.StepId, effect: StepEffect) -> None:
        """Carry out an effect that sends a tensor."""
        traffic, origin = self._swarm.traffic, self._origin(step)
        match effect:
            case p.SendActivation():
                self._send_activation(step, effect)
            case p.SendGradient(number, to, border, handle, check):
                self._carry(
                    to,
                    self._worker.conduct.bundle_sent(effect, self._boxes.value(handle)),
                    origin,
                    lambda core, at, h: core.work.gradient(at, number, border, h, check),
                    GRADIENTS,
                    nbytes=traffic.bundle(self._name, to, border, back=True),
                )
            case e.SendPart():
                self._send_part(step, effect)
            case e.SendResult(shard, to, handle) if (conduct := self._worker.conduct).sends_result(to):
                self._carry(
                    to,
                    conduct.result_sent(to, self._boxes.value(handle)),
                    self._origin(step, shard.plan),
                    lambda core, at, h: core.work.result(at, shard.block, shard.index, h, shard.length),
                    SHARDS,
                    shard.end - shard.begin,
                    nbytes=traffic.reduced(shard),
                )
            case e.ShareUplink() | e.SendResult():  # a line here carries one thing after the other
                pass
            case _:
                raise AssertionError(effect)

    def _origin(self, step: e.StepId, plan: int | None = None) -> Origin:
        return Origin(self._name, self._member.life.hello.incarnation, step.on_wire, plan)

    def _send_activation(self, step: e.StepId, effect: p.SendActivation) -> None:
        """Send an activation; one that was sent before is preceded by a nudge."""
        number, route, attempt = effect.id, effect.route, effect.attempt
        to, origin = route[0].peer, self._origin(step)
        pool = self._swarm.pools.of(blocks_left(route), step.number)
        bundle = Bundle(number, route, attempt, effect.check, effect.asks)
        if not (effect.check or effect.asks):
            if (step, number, route[0]) in self._sent and (link := self._link(to)) is not None:
                link.nudge(pool, lambda core: core.work.nudge(origin, number, route, attempt))
            self._sent.add((step, number, route[0]))
        self._carry(
            to,
            self._worker.conduct.bundle_sent(effect, self._boxes.value(effect.handle)),
            origin,
            lambda core, at, h: core.work.activation(at, bundle, h),
            pool,
            nbytes=self._swarm.traffic.bundle(self._name, to, route[0].begin),
        )

    def _send_part(self, step: e.StepId, effect: e.SendPart) -> None:
        """Send our part of a shard to its reducer, once the worker has exported it."""
        shard, swarm = effect.shard, self._swarm
        if not self._worker.conduct.sends_parts():
            return
        origin = self._origin(step, shard.plan)

        def carry(piece: p.Handle) -> None:
            self._carry(
                shard.reducer,
                self._boxes.value(piece),
                origin,
                lambda core, at, h: core.work.part(at, shard.block, shard.index, h),
                SHARDS,
                shard.end - shard.begin,
                nbytes=swarm.traffic.reduced(shard),
            )

        def leave(core: Member) -> Iterable[Effect]:
            held = core.work.find(step)
            reduction = None if held is None else held.vote.reduction
            if reduction is not None and reduction.number == shard.plan:  # parts of older plans stay
                self._worker.export(step, effect, carry)
            return ()

        late = swarm.world.random.uniform(*swarm.config.part_s) if step.group else 0.0
        if late:
            swarm.world.after(late, lambda: self._later(leave))
        else:
            leave(self._member)

    def _carry(
        self,
        to: str,
        value: Any,
        origin: Origin,
        deliver: Deliver,
        pool: Pool,
        cost: int = 1,
        *,
        nbytes: float,
    ) -> None:
        """Send the `value` of a tensor; the receiver gives it a handle of its own.

        A tensor for the volunteer itself is there at once, as in the daemon.
        """
        if to == self._name:
            handle = self._boxes.new(origin.step, value, to)
            self._perform(deliver(self._member, origin, handle))
            return
        if self._member.work.step is not None and self._member.work.step.entry and to not in self._introduced:
            self._introduce(to)
        receiver = self._swarm.volunteers[to]
        if (link := self._link(to)) is not None:
            link.send(SimFrame(pool, cost, origin.step, value, lambda core, h: deliver(core, origin, h)))
            return
        self._swarm.traffic.carry(
            self._name,
            receiver,
            lambda core: deliver(core, origin, receiver.boxes.new(origin.step, value, self._name)),
            nbytes,
        )

    def _link(self, to: str) -> SimLink | None:
        """Link with flow control to another volunteer; None if this history has none."""
        if to == self._name:
            return None
        link = self._links.get(to)
        if link is None or not link.stands:
            volunteers = self._swarm.volunteers
            link = self._swarm.open_link(volunteers[self._name], volunteers[to])
            if link is not None:
                self._links[to] = link
        return link

    # ── leftovers ───────────────────────────────────────────────────────────────────────────────────────────

    def look_at_board(self, core: Member) -> Iterable[Effect]:
        """Post leftovers for blocks without a known holder; when idle, ask others for those of this place."""
        step, place, board = core.work.step, core.place, self._swarm.board
        if step is not None and place is not None:
            for border in core.work.leftovers():
                board.post(border, self._name, step.on_wire)
            if core.work.is_idle:
                for sender, theirs in board.read(range(*place)):
                    if theirs == step.on_wire and sender != self._name:
                        self._introduce(sender)
        return ()

    def _introduce(self, to: str) -> None:
        """Tell `to` which blocks this volunteer holds in this step. Tensors may overtake that."""
        step, place, swarm = self._member.work.step, self._member.place, self._swarm
        assert step is not None
        assert place is not None
        self._introduced.add(to)
        origin, receiver = self._origin(step), swarm.volunteers[to]
        process = receiver.process

        def say() -> None:
            swarm.network.send(
                self._name,
                to,
                lambda: receiver.later(process, lambda core: core.work.introduced(origin, place)),
            )

        swarm.world.after(swarm.board.random.choice((0.0, 0.0, 0.1)), say)
