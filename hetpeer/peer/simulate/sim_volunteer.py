"""Simulated volunteer: the real member core, driven as the daemon drives it, with a virtual worker and
virtual links.

A *process* lives from `start` to `kill`; within it a fenced volunteer gets a new incarnation, and a broken
control stream a new session. Events for an older process or session do not arrive. Sending is in
sim_sender.py, fetching and giving states in sim_states.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effect_queue import EffectQueue
from hetpeer.averaging.effects import Effect, InStep, StepEffect
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.position import choose_place
from hetpeer.peer.simulate.network.sim_links import SimTensors
from hetpeer.peer.simulate.network.world import Gate
from hetpeer.peer.simulate.sim_sender import LOOK_S, SimSender
from hetpeer.peer.simulate.sim_states import SimStates
from hetpeer.peer.simulate.sim_worker import SimWorker
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import Drop, Merge
from hetpeer.stages.pipeline.place_memory import Offered
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_swarm import SimSwarm

PREPARE_S = (0.1, 1.0)
REJOIN_S = 0.2


class SimVolunteer:
    """Volunteer `name`: one process after another.

    `speed` in FLOP/s with hardware, else relative; `uplink` in bytes/s; `seat`: (cluster, first block) of the
    place that it takes if that is open.
    """

    worker_class: ClassVar[type[SimWorker]] = SimWorker

    def __init__(
        self, swarm: SimSwarm, name: str, speed: float, uplink: float, seat: tuple[int, int] | None
    ) -> None:
        self.swarm = swarm
        self.name = name
        self.alive = False
        self.process = 0
        self.session = 0
        self.fetch_s = swarm.config.fetch_s
        """Least and most seconds that the transfer of one block's state takes."""
        self.speed, self._uplink = speed, uplink
        self._seat = seat
        self._gate = Gate(swarm.world)
        self._incarnations = itertools.count(1)

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, run: str = "sim") -> None:
        """Start a process of a volunteer of `run`, with nothing in memory but the manifest."""
        if self.alive:
            return
        swarm = self.swarm
        self.alive = True
        swarm.network.open(self.name)
        self._gate = Gate(swarm.world)
        self.process += 1
        self._effects: EffectQueue[Effect] = EffectQueue(self._carry_out)
        self.boxes = SimTensors()
        window, later = InFlightWindow(), partial(self.later, self.process)
        self.worker = self.worker_class(
            swarm.world,
            swarm.numerics,
            self.boxes,
            window,
            self.speed,
            later,
            swarm.config.hardware,
            list(swarm.volunteers).index(self.name),
            swarm.config.fails_at,
        )
        self.conduct = self.worker.conduct = swarm.conduct_of(self)
        self._preparing = 0
        hello = m.Hello(
            run=run,
            name=self.name,
            incarnation=next(self._incarnations),
            flops_per_second=self.speed,
            uplink=self._uplink,
        )
        self.member = Member(self.name, hello, swarm.shape, window)
        self._sending = SimSender(swarm, self.name, self.member, self.boxes, self.worker, later, self.perform)
        self._states = SimStates(swarm, self.name, self.member, self.worker, later, lambda: self.fetch_s)
        self.connect()
        self._look_at_board(self.process)

    def kill(self) -> None:
        """Kill the process (SIGKILL): its memory and all events for it are lost."""
        if self.alive:
            self.alive = False
            self._effects.close()
            self.swarm.noticed_death(self)

    def freeze(self, seconds: float) -> None:
        """Stop the process (SIGSTOP) for `seconds`: events wait."""
        self._gate.close(seconds)

    @property
    def frozen(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP."""
        return self._gate.closed

    def _paced(self) -> m.Paced:
        """Pace of this volunteer, as far as that is simulated."""
        place = self.member.place
        return m.Paced(
            computing=0.0 if place is None else self.worker.microbatch_s(*place),
            links=self.swarm.traffic.seconds(self.name),
            uplink=self._uplink,
        )

    def connect(self) -> None:
        """Open a session with the coordinator; messages wait until there is a coordinator."""
        self.session = next(self.swarm.sessions)
        self.perform(self.member.connected())

    def lost_session(self, session: int) -> Callable[[], None]:
        """Action to connect again, if the coordinator has closed `session` or does not know it."""

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

    def link_lost(self, peer: str) -> None:
        """Tell the core that the link to `peer` is down."""
        self.later(self.process, lambda core: core.work.unreachable(peer))

    # ── effects ─────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carry out effects, behind those that wait already."""
        self._effects.perform(effects)

    def _carry_out(self, effect: Effect) -> None:
        """Carry out one effect of the core."""
        swarm = self.swarm
        match effect:
            case InStep(step, inner):
                self._perform_in_step(step, inner)
            case e.Tell(message):
                swarm.tell(self, message)
                self.conduct.said(message)
            case e.Choose(places):
                self.perform(self.member.life.chosen(self._choice(places)))
            case e.Prepare(begin, end):
                self._prepare((begin, end))
            case e.FetchState():
                if self.conduct.fetches_states():
                    self._states.fetch(effect)
            case e.SaveState():
                self._states.copy(effect)
            case e.RecordApplied():
                if not self.conduct.applies_at_once():
                    swarm.observer.applied(self.name, effect, self.worker.before)
                versions = max(map(len, self.worker.states.values()))
                swarm.observer.keeps(self.name, versions, sum(not one.group for one in self.member.work.ids))
                if self._uplink:
                    swarm.tell(self, self._paced())
            case e.EndStep(step):
                self._sending.end_step(step)
                self.boxes.end_step(step)
                self.boxes.end_step(step.on_wire)
                self.worker.clear_step(step)
            case e.Leave():
                process = self.process
                swarm.world.after(REJOIN_S, lambda: self.later(process, self._rejoin))
            case e.Stop():
                self.alive = False
                self._effects.close()
            case p.Release(handle):
                self.boxes.release(handle)

    def _perform_in_step(self, step: e.StepId, effect: StepEffect) -> None:
        """Carry out one effect of a step, at the worker or the sender."""
        worker = self.worker
        match effect:
            case p.RunForward():
                worker.forward(step, effect)
            case p.RunBackward():
                slots = self.member.work.slots(step)
                assert slots is not None
                self.swarm.observer.folding(self.name, slots, range(effect.key.begin, effect.end))
                worker.backward(step, effect)
            case p.ForgetGraph(key):
                worker.forget_graph(step, key)
            case Merge() | Drop():
                worker.merge_or_drop(step, effect)
            case e.SumParts():
                worker.sum(step, effect)
            case e.Inspect():
                worker.inspect(step, effect)
            case e.InspectSlot():
                worker.inspect_slot(step, effect)
            case e.Land():  # a value lies nowhere
                pass
            case e.ApplyUpdate():
                worker.apply(step, effect)
            case p.CompareBundle() | e.ShowMarks() | e.ProveSums() | e.TestifyParts():
                self.conduct.answer(step, effect)
            case p.Release(handle):
                self.boxes.release(handle)
            case _:
                self._sending.send(step, effect)

    # ── joining ─────────────────────────────────────────────────────────────────────────────────────────────

    def _choice(self, places: Sequence[m.Place]) -> m.Place:
        """Open place that it takes: its seat if that is open.

        Else with hardware as the daemon chooses, with memory for any place; without, the one with the fewest
        holders.
        """
        if self.swarm.config.hardware is not None:
            seats = [place for place in places if place.open and (place.cluster, place.begin) == self._seat]
            return choose_place(seats or places, Offered(device=sys.maxsize))
        return min(
            (place for place in places if place.open),
            key=lambda q: ((q.cluster, q.begin) != self._seat, q.holders, q.cluster, q.begin),
        )

    def _prepare(self, place: m.Range) -> None:
        """Load the graphs of `place`; a later order replaces an earlier one."""
        self._preparing += 1
        order = self._preparing
        self._states.give_up()
        self.worker.unload()

        def finish(core: Member) -> Iterable[Effect]:
            if order != self._preparing:
                return ()
            self.worker.graphs_of = place
            return core.life.prepared(self.speed)

        def load(_core: Member) -> Iterable[Effect]:
            self.worker.submit(0.0, finish)
            return ()

        process = self.process
        self.swarm.world.after(
            self.swarm.world.random.uniform(*PREPARE_S),
            lambda: self.later(process, load),
        )

    def _rejoin(self, core: Member) -> Iterable[Effect]:
        self.perform(core.reborn(next(self._incarnations)))
        self.connect()
        return ()

    def _look_at_board(self, process: int) -> None:
        if self.alive and process == self.process:
            self.later(process, self._sending.look_at_board)
            self.swarm.world.after(LOOK_S, lambda: self._look_at_board(process))

    def state(self, cluster: int, version: int, block: int) -> Any:
        """State of `block` at `version` of `cluster` for another peer; None if it is not here."""
        return self._states.give(version, block) if cluster == self.member.line.cluster else None
