"""A simulated swarm: the real cores of one coordinator and some volunteers, a virtual network between them, and a disk.

The coordinator's log and store survive its crashes, its sessions do not. What must hold is watched by checks.py while
it happens; at the end the run is complete (liveness) and its final state that of one big machine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Shard, StepId
from hetpeer.averaging.holding import Shape
from hetpeer.averaging.member import Effect as MemberEffect
from hetpeer.averaging.member import Member, Phase
from hetpeer.averaging.reduction import LENGTH
from hetpeer.averaging.ties import Tie, Ties
from hetpeer.bootstrap import decisions as d
from hetpeer.bootstrap.arranging import Arrangement
from hetpeer.bootstrap.coordinator import Coordinator
from hetpeer.bootstrap.core import Core
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.membership import BlockCost
from hetpeer.bootstrap.reigning import over_all
from hetpeer.peer.simulate.board import Board
from hetpeer.peer.simulate.checks import Checks, ViolationError
from hetpeer.peer.simulate.coverage import Coverage
from hetpeer.peer.simulate.numerics import Numerics
from hetpeer.peer.simulate.volunteer import Volunteer
from hetpeer.peer.simulate.wires import Ground, Wires
from hetpeer.peer.simulate.world import Gate, Network, World

COORDINATOR = "coordinator"
TICK_S, BEAT_S = 0.25, 1.0
DIAL_RETRY_S = 0.5
COLLECT_RETRY_S, COLLECT_TRIES = 0.3, 15
SLOW_COLLECT_S, SLOW_COLLECTS = 8.0, 0.1
LATE_S = (0.5, 30.0)
ECHO_S = 0.2
LINGER_S = 3.0
"""The coordinator does not leave at once when the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """Shape of the simulated run."""

    volunteers: int = 4
    layouts: tuple[tuple[tuple[int, int], ...], ...] = (((0, 2), (2, 4)), ((0, 1), (1, 4)))
    steps: int = 8
    microbatches: int = 6
    evaluation_microbatches: int = 2
    evaluate_every: int = 2
    slot_capacity: int = 2
    ties: tuple[Tie, ...] = ()
    checkpoint_every: int = 3
    staleness: int = 0
    """Steps that begin before the one that they follow is committed."""
    clip_norm: float | None = None
    latency_s: tuple[float, float] = (0.005, 0.12)
    stall_s: float = 8.0
    reduce_s: float = 6.0
    sync_s: float = 10.0
    speeds: tuple[float, ...] = (1.0, 0.5, 2.0, 1.0, 0.7, 1.5)
    """Of the volunteers, in turn; at 1 a worker takes as long as worker.py says."""
    fetch_s: tuple[float, float] = (0.05, 0.3)
    """How long the transfer of one block's state takes."""
    uplinks: tuple[float, ...] = (0.0,)
    """What the volunteers say of theirs, in turn; 0: nothing. Only the shares of a reduce depend on it."""
    shard_length: int = LENGTH
    """Numbers that a shard has, as far as its share is cut."""
    part_s: tuple[float, float] = (0.0, 0.0)
    """How much later a part of an averaging leaves: lines are slow, and models large."""
    credit: int = 0
    """Bundles of each kind that a volunteer takes from another at a time; 0: any number."""
    duplicates: float = 0.05
    """Share of tensors that arrive twice."""
    ground: Ground | None = None
    """What blocks and lines cost; None: everything takes a moment."""
    seats: tuple[tuple[int, int], ...] = ()
    """(cluster, first block) of the place that each volunteer takes if it is open; none: they choose."""
    arranged_s: float = 0.0
    """Another division of the blocks is proposed so often; 0: never."""


class Swarm:
    """One history. `numerics` is the arithmetic of all volunteers."""

    def __init__(self, seed: int, config: SwarmConfig, numerics: Numerics, coverage: Coverage) -> None:
        self.config = config
        self.numerics = numerics
        self.shape = Shape(numerics.sizes, config.slot_capacity, Ties(config.ties), config.shard_length)
        self.world = World(seed)
        names = [f"v{number}" for number in range(config.volunteers)]
        self._wires = None if config.ground is None else Wires(self.world, names, config.ground)
        self.network = Network(self.world, config.latency_s, self._wires)
        self.board = Board(self.world, seed)
        self.checks = Checks(numerics, config.steps, config.microbatches, config.staleness)
        self.coordinator: Core | None = None
        self.log: list[Mapping[str, Any]] = []
        self.completed: bool | None = None
        self.faults = 0
        self.hooks: list[Callable[[str], None]] = []
        """Called with what has just happened; faults.py strikes at such moments."""
        self.sessions = itertools.count(1)
        self._said: dict[tuple[str, str], m.Message] = {}
        """(receiver, kind) → the last such message on a line of history."""
        self._coverage = coverage
        self._reign = 0
        self._saving = 0
        self._gate = Gate(self.world)
        self._channels: dict[str, int] = {}
        """Volunteer → its session that the coordinator knows."""
        self._store = {(0, 0, b): numerics.initial(b) for b in range(numerics.blocks)}
        """(cluster, version, block) → state."""
        machines = zip(names, itertools.cycle(config.speeds), itertools.cycle(config.uplinks))
        self.volunteers = {name: Volunteer(self, name, speed, uplink) for name, speed, uplink in machines}

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, limit_s: float) -> None:
        """Start everybody and go on until the run is finished; ViolationError if it is not after `limit_s`."""
        self.start_coordinator()
        self._beat()
        self._echo()
        for index, volunteer in enumerate(self.volunteers.values()):
            self.world.after(0.3 * index, volunteer.start)
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
        last = {b: self._store[*self._last_checkpoint, b] for b in range(self.numerics.blocks)}
        self.checks.ended(last)
        for tie in self.config.ties:
            if len({self.numerics.shared(last[block], begin, end) for block, begin, end in tie.uses}) > 1:
                raise ViolationError("the copies of a tied parameter differ")

    def start_coordinator(self) -> None:
        """A new reign from the log."""
        self._reign += 1
        self._channels = {}
        self.coordinator = self._new_core(self._coordinator_config())
        self._perform(self.coordinator.start())
        self._tick(self._reign)

    def _new_core(self, config: d.CoordinatorConfig) -> Core:
        return Coordinator(over_all(config, History.of(self.log)), self.world.now)

    def _coordinator_config(self) -> d.CoordinatorConfig:
        cfg = self.config
        return d.CoordinatorConfig(
            run="sim",
            steps=cfg.steps,
            sizes=[1] * cfg.microbatches,
            evaluation_microbatches=cfg.evaluation_microbatches,
            evaluate_every=cfg.evaluate_every,
            checkpoint_every=cfg.checkpoint_every,
            clip_norm=cfg.clip_norm,
            layouts=cfg.layouts,
            costs=[
                BlockCost(elements=self.numerics.sizes[block], memory_bytes=1, flops=1.0)
                for block in range(self.numerics.blocks)
            ],
            ties={b: self.shape.ties.partners(b) for b in range(self.numerics.blocks)},
            stall_s=cfg.stall_s,
            reduce_s=cfg.reduce_s,
            sync_s=cfg.sync_s,
            staleness=cfg.staleness,
        )

    def crash_coordinator(self, away_s: float) -> None:
        """The coordinator dies; its log stays. Volunteers find out and come back to its successor."""
        if self.coordinator is None:
            return
        self.coordinator = None
        self._gate.open()
        sessions, self._channels = self._channels, {}
        self.world.after(away_s, self.start_coordinator)
        for name, session in sessions.items():
            back = away_s + self.world.random.uniform(0.1, 2.0)
            self.world.after(back, self.volunteers[name].lost_session(session))

    def pause_coordinator(self, seconds: float) -> None:
        """SIGSTOP: what arrives waits, time-outs pass."""
        self._gate.close(seconds)

    def _tick(self, reign: int) -> None:
        def tick() -> None:
            if self.coordinator is not None and reign == self._reign:
                self._event("tick", lambda core, now: core.tick(now))
                self.world.after(TICK_S, lambda: self._tick(reign))

        self._gate.enter(tick)

    def _beat(self) -> None:
        for volunteer in self.volunteers.values():
            if volunteer.alive and not volunteer.frozen and volunteer.name in self._channels:
                self.tell(volunteer, m.Heartbeat())
        self.world.after(BEAT_S, self._beat)

    def arrange(self, arrangement: Arrangement) -> None:
        """A planner proposes who has which blocks."""

        def proposed(core: Core, now: float) -> Iterable[d.Effect]:
            assert isinstance(core, Coordinator)
            return core.arrange(arrangement, now)

        self._gate.enter(lambda: self._event("arrange", proposed))

    def _event(self, name: str, act: Callable[[Core, float], Iterable[d.Effect]]) -> None:
        """Something happens to the coordinator, if there is one."""
        core = self.coordinator
        if core is not None:
            self._coverage.coordinator[core.state.value, name] += 1
            self._perform(act(core, self.world.now))

    def _perform(self, effects: Iterable[d.Effect]) -> None:
        """Carry out effects in order; a hook may crash the coordinator between two of them."""
        reign = self._reign
        for effect in effects:
            if self.coordinator is None or reign != self._reign:
                return
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
                    self._collect(effect, {}, COLLECT_TRIES)
                case d.Halt(_, completed):
                    self.completed = completed

    def _check_promise(self, to: str, message: m.Message) -> None:
        """Plans are made of live holders, a commit is told to holders of its gradients."""
        if isinstance(message, m.Plan) and self.coordinator is not None:
            self.checks.planned(self.coordinator.working(), message)
        if isinstance(message, m.Commit):
            volunteer = self.volunteers[to]
            if volunteer.alive and _works_on(volunteer.member, message):
                self.checks.committed(to, volunteer.member.holds(message))

    def write(self, record: dict[str, Any]) -> None:
        """The record is durable."""
        self.log.append(record)
        self.checks.recorded(record)
        self.happened(f"record {record['kind']}")

    # ── the control streams ──────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self, to: str, message: m.Message) -> None:
        volunteer, session = self.volunteers.get(to), self._channels.get(to)
        if volunteer is None or session is None:
            return
        process = volunteer.process

        def receive(core: Member) -> Iterable[MemberEffect]:
            if volunteer.session != session:
                return ()
            self._said[to, message.kind] = message
            self._coverage.member[core.phase.value, message.kind] += 1
            if isinstance(message, m.Plan) and not message.group and core.phase is not Phase.APPLYING:
                # one that applies an update looks at what else has arrived afterwards, in order
                slots = core.slots(StepId(message.line, message.step))
                if slots is not None:
                    self.checks.plan_arrived(to, slots, message)
            return core.receive(message)

        self.network.send(COORDINATOR, to, lambda: volunteer.later(process, receive))

    def tell(self, volunteer: Volunteer, message: m.Message) -> None:
        """A message to the coordinator. Those of a session that it does not know do not arrive."""
        process, session, name = volunteer.process, volunteer.session, volunteer.name
        self.happened(f"tell {message.kind}")

        def arrive() -> None:
            if volunteer.process != process or volunteer.session != session:
                return
            if self.coordinator is None and name not in self._channels:
                self.world.after(DIAL_RETRY_S, lambda: self._gate.enter(arrive))
                return
            if isinstance(message, m.Hello):
                self._channels[name] = session
            if self._channels.get(name) == session:
                self._said[name, f"from {message.kind}"] = message
                self._event(message.kind, lambda core, now: core.receive(name, message, now))

        self.network.send(name, COORDINATOR, lambda: self._gate.enter(arrive))

    def _echo(self) -> None:
        """Somebody hears again what concerns a line of history or a step that is past: it must change nothing."""
        (name, _), message = self.world.random.choice(list(self._said.items()) or [(("", ""), m.Heartbeat())])
        volunteer = self.volunteers.get(name)
        self.world.after(ECHO_S, self._echo)
        if volunteer is None:
            return

        def to_volunteer(core: Member) -> Iterable[MemberEffect]:
            if not is_past(message, core.line, core.version or 0):
                return ()
            self._coverage.member[core.phase.value, message.kind] += 1
            return core.receive(message)

        def to_coordinator() -> None:
            core = self.coordinator
            over = core is not None and core.state is d.State.FINISHED
            if core is not None and (over or self._is_past(core, message)):
                self._event(message.kind, lambda core, now: core.receive(name, message, now))

        if self._said.get((name, message.kind)) is message:
            volunteer.later(volunteer.process, to_volunteer)
        else:
            self._gate.enter(to_coordinator)

    def _is_past(self, core: Core, message: m.Message) -> bool:
        """Whether `message` is of a line or a step that is past for the coordinator."""
        assert isinstance(core, Coordinator)
        return is_past(message, core.line, core.history.version)

    def stream_broken(self, name: str) -> None:
        """The coordinator sees the control stream of `name` break."""
        session = self._channels.get(name)

        def broken() -> None:
            if session is not None and self._channels.get(name) == session:
                self._event("broken", lambda core, now: core.broken(name, now))

        self._gate.enter(broken)

    def stream_resumed(self, name: str) -> None:
        """The control stream of `name` is back, and nothing was lost."""
        session = self._channels.get(name)

        def resumed() -> None:
            if session is not None and self._channels.get(name) == session:
                self._event("resumed", lambda core, now: core.resumed(name, now))

        self._gate.enter(resumed)

    def noticed_death(self, volunteer: Volunteer) -> None:
        """Streams of a killed process break: the coordinator and its neighbours see it at once."""
        name = volunteer.name
        self.world.after(0.05, lambda: self.stream_broken(name))
        for other in self.volunteers.values():
            if other is not volunteer and other.alive and self.world.random.random() < 0.5:
                self.world.after(0.3, functools.partial(other.link_changed, name, is_up=False))

    def stranger(self, message: m.Message) -> None:
        """Somebody who is no volunteer of this run says something."""
        self._gate.enter(
            lambda: self._event(message.kind, lambda core, now: core.receive("stranger", message, now))
        )

    # ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────

    def choice(self, name: str, places: Sequence[m.Place]) -> m.Place:
        """Which of the open `places` a volunteer takes."""
        seat = dict(zip(self.volunteers, self.config.seats, strict=False)).get(name)
        return min(
            (place for place in places if place.open),
            key=lambda q: ((q.cluster, q.begin) != seat, q.holders, q.cluster, q.begin),
        )

    def bundle(self, sender: str, to: str, border: int, *, back: bool = False) -> float:
        """Bytes of a microbatch that enters block `border`, or comes `back` from it, from one volunteer to another; 0 where bytes cost nothing."""
        return 0.0 if self._wires is None else self._wires.bundle(sender, to, border, back=back)

    def reduced(self, shard: Shard) -> float:
        """Bytes of a part or a result of `shard`."""
        ground = self.config.ground
        if ground is None:
            return 0.0
        part = (shard.end - shard.begin) / self.numerics.sizes[shard.block]
        return ground.reduced(shard.block) * part

    def carry(
        self,
        sender: Volunteer,
        receiver: Volunteer,
        deliver: Callable[[Member], Iterable[MemberEffect]],
        nbytes: float,
    ) -> None:
        """A tensor from one volunteer to another (or to itself); sometimes twice, the second time perhaps late."""
        process, random = receiver.process, self.world.random
        self.network.send(sender.name, receiver.name, lambda: receiver.later(process, deliver), nbytes)
        if random.random() < self.config.duplicates:
            delay = random.choice((0.0, random.uniform(*LATE_S)))
            self.world.after(
                delay,
                lambda: self.network.send(
                    sender.name, receiver.name, lambda: receiver.later(process, deliver)
                ),
            )

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────

    def _collect(self, order: d.CollectCheckpoint, states: dict[int, Any], tries: int) -> None:
        """Fetch the blocks' states from those who save them; one that cannot be had ends it."""
        reign, version, savers = self._reign, order.version, order.savers
        self._saving = version

        def fetch() -> None:
            if reign != self._reign or self.coordinator is None:
                return
            block = next(b for b in savers if b not in states)
            saver = self.volunteers[savers[block]]
            state = saver.state(version, block) if saver.alive and not saver.frozen else None
            if state is not None:
                states[block] = self._store[order.cluster, version, block] = state
                digest = self.numerics.digest(state)
                self._event("saved", lambda core, now: core.saved(version, block, digest, now))
                if len(states) < len(savers):
                    self._collect(order, states, COLLECT_TRIES)
            elif tries:
                self._collect(order, states, tries - 1)
            else:
                self.save_failed(version)

        slow = self.world.random.random() < SLOW_COLLECTS
        wait = (SLOW_COLLECT_S if slow else COLLECT_RETRY_S) * self.world.random.random()
        self.world.after(wait, lambda: self._gate.enter(fetch))

    @property
    def saving(self) -> int:
        """The version of the last checkpoint that was asked for."""
        return self._saving

    def save_failed(self, version: int) -> None:
        """The checkpoint of `version` cannot be collected or written."""
        self._event("not_saved", lambda core, now: core.not_saved(version, now))

    @property
    def _last_checkpoint(self) -> tuple[int, int]:
        """Its cluster and version."""
        sealed = [(r.get("cluster", 0), r["version"]) for r in self.log if r["kind"] == "checkpoint"]
        return sealed[-1] if sealed else (0, 0)

    def sealed_state(self, cluster: int, version: int, block: int) -> Any:
        """A block's state from a complete checkpoint; None if there is none of that version."""
        complete = version == 0 or any(
            r["kind"] == "checkpoint" and (r.get("cluster", 0), r["version"]) == (cluster, version)
            for r in self.log
        )
        return (
            self._store.get((cluster, version, block)) if complete and self.coordinator is not None else None
        )

    def happened(self, what: str) -> None:
        """Something fault hooks may want to strike at."""
        for hook in list(self.hooks):
            hook(what)


def _works_on(core: Member, message: m.Commit) -> bool:
    """Whether `message` is of a step that `core` has in progress."""
    wanted = StepId(message.line, message.step)
    return not message.group and any(step.on_wire == wanted for step in core.steps)


def is_past(message: m.Message, line: m.Line, version: int) -> bool:
    """Whether `message` is of an older line of history, or of a step that made a version before `version`."""
    theirs = getattr(message, "line", None)
    if not isinstance(theirs, m.Line) or isinstance(message, m.Welcome):
        return False
    number: int = getattr(message, "step", version)
    return (theirs.term, theirs.view, number) < (line.term, line.view, version)
