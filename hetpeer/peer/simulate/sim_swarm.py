"""Simulated swarm: the real cores of one coordinator and some volunteers, a virtual network between them, and
a disk.

The coordinator's log and store survive its crashes, its sessions do not. What happens is told to an observer
(sim_hooks.py) while it happens; at the end the run is complete (liveness) and its final state that of one big
machine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect as MemberEffect
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.service.core_interface import Core
from hetpeer.bootstrap.state import effects as d
from hetpeer.bootstrap.state.context import whole_run
from hetpeer.peer.simulate.network.sim_links import SimLink
from hetpeer.peer.simulate.network.sim_uplinks import SimUplinks
from hetpeer.peer.simulate.network.world import SimNetwork, World
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_coordinator import SimCoordinator
from hetpeer.peer.simulate.sim_hooks import ConductOf, SimObserver, ViolationError, honest
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.peer.simulate.sim_sender import SimTaskBoard, TensorTraffic
from hetpeer.peer.simulate.sim_states import SimCheckpointStore
from hetpeer.peer.simulate.sim_volunteer import SimVolunteer
from hetpeer.peer.transport.uplink import PoolNumbers

COORDINATOR = "coordinator"
BEAT_S = 1.0
DIAL_RETRY_S = 0.5
ECHO_S = 0.2
LINGER_S = 3.0
TRY_S = 2.0
"""Seconds in which the coordinator's machine computes a microbatch."""
"""Seconds that the coordinator stays when the run is over."""


class SimSwarm:
    """One history: `seed` and `config` determine it.

    `numerics` is the arithmetic of all volunteers. `observer` hears what happens, `conduct_of` makes the
    conduct of each process of a volunteer (sim_hooks.py). Example: `SimSwarm(7, SwarmConfig(),
    Symbols(4)).run(900.0)`.
    """

    volunteer_class: ClassVar[type[SimVolunteer]] = SimVolunteer

    def __init__(
        self,
        seed: int,
        config: SwarmConfig,
        numerics: Symbols,
        observer: SimObserver | None = None,
        conduct_of: ConductOf = honest,
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.shape = config.member(numerics)
        self.pools = PoolNumbers.of_run(numerics.blocks, config.staleness, config.delays)
        """Pools of grants for activations."""
        self.world = World(seed)
        names = [f"v{number}" for number in range(config.volunteers)]
        carrier = None if config.hardware is None else SimUplinks(self.world, names, config.hardware)
        self.network = SimNetwork(self.world, config.latency_s, carrier)
        self.traffic = TensorTraffic(self.world, self.network, carrier, config, numerics.sizes)
        self.board = SimTaskBoard(self.world, seed)
        self.observer = observer or SimObserver()
        self.conduct_of = conduct_of
        self.log: list[Mapping[str, Any]] = []
        self.banned: set[str] = set()
        self.completed: bool | None = None
        self.hooks: list[Callable[[str], None]] = []
        """Called with `tell KIND` (a volunteer sends that message) or `record KIND` (a record is logged)."""
        self.sessions = itertools.count(1)
        self._said: dict[tuple[str, str], m.Message] = {}
        """(receiver, kind) → the last such message."""
        self.host = SimCoordinator(self.world, self.observer, self._new_core, self._carry_out)
        self._channels: dict[str, int] = {}
        """Volunteer → its session with the coordinator."""
        machines = zip(names, itertools.cycle(config.speeds), itertools.cycle(config.uplinks))
        seats = dict(zip(names, config.seats, strict=False))
        self.volunteers = {
            name: self.volunteer_class(self, name, speed, uplink, seats.get(name))
            for name, speed, uplink in machines
        }
        self.store = SimCheckpointStore(self.world, self.host, self.volunteers, numerics, self.log)

    @property
    def coordinator(self) -> Core | None:
        """Core of the coordinator; None while it is down."""
        return self.host.core

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, limit_s: float) -> None:
        """Start everybody and go on until the run is complete.

        Raises `ViolationError` if it is not after `limit_s`.
        """
        self.start()
        self.world.run(limit_s, lambda: self.completed is not None)
        for name in self.volunteers:
            self.stream_broken(name)
            self.stream_resumed(name)
        self.world.run(self.world.now + LINGER_S, lambda: False)
        if self.completed is None:
            state = self.coordinator.state if self.coordinator else None
            raise ViolationError(
                f"liveness: not finished after {self.world.now:.0f} virtual seconds ({state})"
            )
        if not self.completed:
            raise ViolationError(f"the run was halted: {self.log[-1]}")
        self.observer.ended(self.store.last())

    def start(self) -> None:
        """Start the coordinator and, one after the other, all volunteers."""
        self.start_coordinator()
        self._beat()
        self._echo()
        for index, volunteer in enumerate(self.volunteers.values()):
            self.world.after(0.3 * index, volunteer.start)

    def start_coordinator(self) -> None:
        """Start the coordinator from its log, in a new term."""
        self._channels = {}
        self.host.start()

    def _new_core(self) -> Core:
        return Coordinator(whole_run(self._core_config(), History.of(self.log)), self.world.now)

    def _core_config(self) -> d.CoordinatorConfig:
        return self.config.coordinator(self.numerics)

    def open_link(self, sender: SimVolunteer, receiver: SimVolunteer) -> SimLink | None:  # noqa: ARG002
        """New link with flow control from one volunteer to another; None: tensors wait for no grant."""
        return None

    def _beat(self) -> None:
        for volunteer in self.volunteers.values():
            if volunteer.alive and not volunteer.frozen and volunteer.name in self._channels:
                self.tell(volunteer, m.Heartbeat())
        self.world.after(BEAT_S, self._beat)

    def _carry_out(self, effect: d.Effect) -> None:
        """Carry out an effect of the coordinator."""
        match effect:
            case d.Record(record):
                self.write(dict(record))
            case d.Send(to, message):
                self._check_promise(to, message)
                self._deliver(to, message)
            case d.Disconnect(peer):
                session = self._channels.pop(peer, None)
                if session is not None:
                    self.network.send(COORDINATOR, peer, self.volunteers[peer].lost_session(session))
            case d.CollectCheckpoint():
                self.store.collect(effect)
            case d.TryMicrobatch(_, batch, number):
                found = None
                if self.config.fails_at(batch, number) is not None:
                    found = d.BadSample(f"sample {number} of shard {batch}", "its loss is not finite")
                self.world.after(TRY_S, lambda: self.host.later(lambda: self._tried(effect, found)))
            case d.Halt(_, completed):
                self.completed = completed

    def _tried(self, trial: d.TryMicrobatch, found: d.BadSample | None) -> None:
        self.host.event("tried", lambda core, now: core.tried(trial, found, now))

    def _check_promise(self, to: str, message: m.Message) -> None:
        """Tell the observer about a plan, or about a commit to a volunteer that works on its step."""
        if isinstance(message, m.Plan) and self.coordinator is not None:
            self.observer.planned(self.coordinator.working(), message)
        if isinstance(message, m.Commit):
            volunteer = self.volunteers[to]
            if volunteer.alive and _works_on(volunteer.member, message):
                self.observer.committed(to, holds=volunteer.member.work.holds(message))

    def write(self, record: dict[str, Any]) -> None:
        """Append a record to the durable log."""
        self.log.append(record)
        if record["kind"] == "banned":
            self.banned.add(record["peer"])
        self.observer.recorded(record)
        self.happened(f"record {record['kind']}")

    # ── the control streams ─────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, to: str, message: m.Message) -> None:
        """Send a message of the coordinator; it is lost if the session or process ends before it arrives."""
        volunteer, session = self.volunteers.get(to), self._channels.get(to)
        if volunteer is None or session is None:
            return
        process = volunteer.process

        def receive(core: Member) -> Iterable[MemberEffect]:
            if volunteer.session != session:
                return ()
            self._said[to, message.kind] = message
            self.observer.member_message(core.phase.value, message.kind)
            if isinstance(message, m.Plan) and not message.group and core.phase is not Phase.APPLYING:
                # one that applies an update looks at what else has arrived afterwards, in order
                slots = core.work.slots(StepId(message.line, message.step))
                if slots is not None:
                    self.observer.plan_arrived(to, slots, message)
            return core.receive(message)

        self.network.send(COORDINATOR, to, lambda: volunteer.later(process, receive))

    def tell(self, volunteer: SimVolunteer, message: m.Message) -> None:
        """Send a message to the coordinator; it is lost if the coordinator does not know the session."""
        process, session, name = volunteer.process, volunteer.session, volunteer.name
        if not volunteer.conduct.says(message):
            return
        self.happened(f"tell {message.kind}")

        def arrive() -> None:
            if volunteer.process != process or volunteer.session != session:
                return
            if self.coordinator is None and name not in self._channels:
                self.world.after(DIAL_RETRY_S, lambda: self.host.later(arrive))
                return
            if isinstance(message, m.Hello):
                self._channels[name] = session
                if name in self.banned:  # admission itself is not simulated
                    self._deliver(name, m.Rejected(reason="banned", why="banned"))
                    del self._channels[name]
                    return
            if self._channels.get(name) == session:
                self._said[name, f"from {message.kind}"] = message
                self.host.event(message.kind, lambda core, now: core.receive(name, message, now))

        self.network.send(name, COORDINATOR, lambda: self.host.later(arrive))

    def _echo(self) -> None:
        """Repeat, now and then, a message of an older term or view or of a past step: it changes nothing."""
        (name, _), message = self.world.random.choice(list(self._said.items()) or [(("", ""), m.Heartbeat())])
        volunteer = self.volunteers.get(name)
        self.world.after(ECHO_S, self._echo)
        if volunteer is None or not volunteer.alive:
            return  # its streams are closed

        def to_volunteer(core: Member) -> Iterable[MemberEffect]:
            if not is_past(message, core.line, core.version or 0):
                return ()
            self.observer.member_message(core.phase.value, message.kind)
            return core.receive(message)

        def to_coordinator() -> None:
            core = self.coordinator
            over = core is not None and core.state is d.CoordinatorState.FINISHED
            if core is not None and (over or self._is_past(core, message)):
                self.host.event(message.kind, lambda core, now: core.receive(name, message, now))

        if self._said.get((name, message.kind)) is message:
            volunteer.later(volunteer.process, to_volunteer)
        else:
            self.host.later(to_coordinator)

    def _is_past(self, core: Core, message: m.Message) -> bool:
        """Whether `message` is of an older term or view, or of a past step, for the coordinator."""
        assert isinstance(core, Coordinator)
        return is_past(message, core.line, core.history.version)

    def stream_broken(self, name: str) -> None:
        """Break the control stream of `name`, as the coordinator sees it."""
        session = self._channels.get(name)

        def broken() -> None:
            if session is not None and self._channels.get(name) == session:
                self.host.event("broken", lambda core, now: core.broken(name, now))

        self.host.later(broken)

    def stream_resumed(self, name: str) -> None:
        """Resume the control stream of `name`; nothing was lost."""
        session = self._channels.get(name)

        def resumed() -> None:
            if session is not None and self._channels.get(name) == session:
                self.host.event("resumed", lambda core, now: core.resumed(name, now))

        self.host.later(resumed)

    def noticed_death(self, volunteer: SimVolunteer) -> None:
        """Break the streams of a killed process: the coordinator and some volunteers see it soon."""
        name = volunteer.name
        self.network.close(name)
        self.world.after(0.05, lambda: self.stream_broken(name))
        for other in self.volunteers.values():
            if other is not volunteer and other.alive and self.world.random.random() < 0.5:
                self.world.after(0.3, functools.partial(other.link_lost, name))

    def happened(self, what: str) -> None:
        """Call the hooks with the moment `what`."""
        for hook in list(self.hooks):
            hook(what)


def _works_on(core: Member, message: m.Commit) -> bool:
    """Whether `message` is of a step that `core` has in progress."""
    wanted = StepId(message.line, message.step)
    return not message.group and any(step.on_wire == wanted for step in core.work.ids)


def is_past(message: m.Message, line: m.TermView, version: int) -> bool:
    """Whether `message` is of an older term or view than `line`, or of a step before `version`."""
    theirs = getattr(message, "line", None)
    if not isinstance(theirs, m.TermView) or isinstance(message, m.Welcome):
        return False
    number: int = getattr(message, "step", version)
    return (theirs.term, theirs.view, number) < (line.term, line.view, version)
