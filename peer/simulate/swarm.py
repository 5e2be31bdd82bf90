"""A simulated swarm: the real coordinator core, simulated volunteers, seeded faults, and the checks.

Checks while it runs: every update applied anywhere is the exact sum of the step's ids; holders that applied the same
step of the same line have the same bits; no tensor is used after its release. Checks at the end: the run finished in
time after the last fault (liveness), and the final state of every block is that of one big machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member import Effect as MemberEffect
from hetpeer.averaging.member import Member
from hetpeer.bootstrap import coordinator as c
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.membership import BlockCost
from hetpeer.peer.simulate.numerics import Numerics
from hetpeer.peer.simulate.volunteer import Volunteer
from hetpeer.peer.simulate.world import Network, World
from hetpeer.stages.execution.effects import Handle

COORDINATOR = "coordinator"
TICK_S = 0.25


class ViolationError(AssertionError):
    """An invariant does not hold; the message says which and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """Shape of the simulated run."""

    volunteers: int = 4
    layouts: tuple[tuple[tuple[int, int], ...], ...] = (((0, 2), (2, 4)), ((0, 1), (1, 4)))
    steps: int = 6
    microbatches: int = 6
    evaluation_microbatches: int = 2
    slot_capacity: int = 2
    checkpoint_every: int = 3
    clip_norm: float | None = None
    latency_s: tuple[float, float] = (0.005, 0.12)


@dataclass(slots=True)
class _Box:
    value: Any
    released: bool = False


@dataclass(slots=True)
class Coverage:
    """Which (state, event) cells were reached, of the coordinator and of the members."""

    coordinator: Counter[tuple[str, str]] = field(default_factory=Counter)
    member: Counter[tuple[str, str]] = field(default_factory=Counter)


class Swarm:
    """One history. `numerics` is the arithmetic of all volunteers."""

    def __init__(self, seed: int, config: SwarmConfig, numerics: Numerics, coverage: Coverage) -> None:
        self.config = config
        self.numerics = numerics
        self.coverage = coverage
        self.world = World(seed)
        self.network = Network(self.world, config.latency_s)
        self.coordinator: c.Coordinator | None = None
        self.reign = 0
        self.log: list[Mapping[str, Any]] = []
        self.store: dict[tuple[int, int], Any] = {(0, b): numerics.initial(b) for b in range(numerics.blocks)}
        self.completed: bool | None = None
        self.faults = 0
        self.hooks: list[Callable[[str], None]] = []
        self.poison: set[tuple[str, int]] = set()
        self._applied: dict[tuple[int, int, int, int], str] = {}
        self._boxes = itertools.count()
        self._tensors: dict[Handle, _Box] = {}
        speeds = [1.0, 0.5, 2.0, 1.0, 0.7, 1.5]
        names = [f"v{i}" for i in range(config.volunteers)]
        self.volunteers = {n: Volunteer(self, n, speeds[i % len(speeds)]) for i, n in enumerate(names)}

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, limit_s: float) -> None:
        """Start everybody and go on until the run is finished; ViolationError if it is not after `limit_s`."""
        self.start_coordinator()
        for index, volunteer in enumerate(self.volunteers.values()):
            self.world.after(0.3 * index, volunteer.start)
        self.world.run(limit_s, lambda: self.completed is not None)
        if not self.completed:
            state = self.coordinator.state if self.coordinator else None
            raise ViolationError(
                f"liveness: not finished after {self.world.now:.0f} virtual seconds ({state})"
            )
        self._check_end()

    def start_coordinator(self) -> None:
        """A new reign from the log."""
        history = History.of(self.log)
        costs = [BlockCost(memory_bytes=1, flops=1.0)] * self.numerics.blocks
        cfg = self.config
        config = c.CoordinatorConfig(
            run="sim",
            steps=cfg.steps,
            microbatches=cfg.microbatches,
            evaluation_microbatches=cfg.evaluation_microbatches,
            evaluate_every=2,
            checkpoint_every=cfg.checkpoint_every,
            clip_norm=cfg.clip_norm,
            layouts=cfg.layouts,
            costs=costs,
            stall_s=8.0,
            reduce_s=6.0,
            sync_s=10.0,
        )
        self.reign += 1
        self.coordinator = c.Coordinator(config, history, self.world.now)
        self._perform(self.coordinator.start())
        self._tick(self.reign)

    def crash_coordinator(self, away_s: float) -> None:
        """The coordinator dies; its log stays. Volunteers find out and come back to its successor."""
        if self.coordinator is None:
            return
        self.coordinator = None
        self.world.after(away_s, self._restart)

    def _restart(self) -> None:
        self.start_coordinator()
        for volunteer in self.volunteers.values():
            self.world.after(self.world.random.uniform(0.1, 2.0), volunteer.reconnector())

    def _tick(self, reign: int) -> None:
        if self.coordinator is None or reign != self.reign or self.completed is not None:
            return
        for volunteer in self.volunteers.values():
            if volunteer.alive and self.world.now >= volunteer.frozen_until:
                self.tell(volunteer, m.Heartbeat())
        self._note("tick")
        self._perform(self.coordinator.tick(self.world.now))
        self.world.after(TICK_S, lambda: self._tick(reign))

    def _perform(self, effects: Iterable[c.Effect]) -> None:
        """Carry out effects in order; a hook may crash the coordinator between two of them."""
        reign = self.reign
        for effect in effects:
            if self.coordinator is None or reign != self.reign:
                return
            match effect:
                case c.Record(record):
                    self.log.append(dict(record))
                    self.happened(f"record {record['kind']}")
                case c.Send(to, message):
                    self._deliver(to, message)
                case c.Halt(_, completed):
                    self.completed = completed
                case _:
                    pass

    def _deliver(self, to: str, message: m.Message) -> None:
        volunteer = self.volunteers[to]
        life, reign = volunteer.incarnation, self.reign

        def arrive() -> None:
            if volunteer.alive and volunteer.member is not None and volunteer.session == reign:
                cell = (volunteer.member.phase.value, message.kind)
                self.coverage.member[cell] += 1
                volunteer.later(lambda core: core.receive(message), life=life)

        self.network.send(COORDINATOR, to, arrive)

    def tell(self, volunteer: Volunteer, message: m.Message) -> None:
        """A message to the coordinator. Those of an older session or of a dead life do not arrive."""
        life, reign, name = volunteer.incarnation, volunteer.session, volunteer.name
        self.happened(f"tell {message.kind}")

        def arrive() -> None:
            stale = volunteer.incarnation != life or reign != self.reign
            if self.coordinator is None or (stale and not isinstance(message, m.Hello)):
                return
            self._note(message.kind)
            self._perform(self.coordinator.receive(name, message, self.world.now))

        self.network.send(name, COORDINATOR, arrive)

    def carry(
        self,
        sender: Volunteer,
        to: str,
        value: Any,
        deliver: Callable[[Member, Handle], Iterable[MemberEffect]],
    ) -> None:
        """A tensor from one volunteer to another (or to itself); sometimes twice, as a re-send would."""
        receiver = self.volunteers[to]
        life = receiver.incarnation
        copies = 2 if self.world.random.random() < 0.05 else 1
        for _ in range(copies):
            arrive = self._arrival(receiver, life, value, deliver)
            self.network.send(sender.name, to, arrive)

    def _arrival(
        self,
        receiver: Volunteer,
        life: int,
        value: Any,
        deliver: Callable[[Member, Handle], Iterable[MemberEffect]],
    ) -> Callable[[], None]:
        return lambda: receiver.later(lambda core: deliver(core, self.box(value)), life=life)

    def fetch(
        self, volunteer: Volunteer, line: m.Line, version: int, sources: Mapping[int, tuple[str, ...]]
    ) -> None:
        """Copy states from a holder that has `version`, or from the checkpoint store; retried until one has."""
        assert volunteer.member is not None
        life = volunteer.incarnation
        states: dict[int, Any] = {}
        for block in range(*(volunteer.member.place or (0, 0))):
            for name in sources.get(block, ()):
                holder = self.volunteers[name]
                if holder.alive and holder.states.get(block, (None,))[0] == version:
                    states[block] = holder.states[block][1]
            if block not in states and (version, block) in self.store:
                states[block] = self.store[version, block]
        if len(states) == len(range(*(volunteer.member.place or (0, 0)))):
            self.world.after(
                0.2,
                lambda: volunteer.later(lambda _: self._load(volunteer, line, version, states), life=life),
            )
        else:
            self.world.after(
                0.3,
                lambda: volunteer.later(
                    lambda core: self._fetch_again(core, volunteer, line, version, sources), life=life
                ),
            )

    def _load(
        self, volunteer: Volunteer, line: m.Line, version: int, states: dict[int, Any]
    ) -> list[MemberEffect]:
        volunteer.load(line, version, states)
        return []

    def _fetch_again(
        self,
        core: Member,
        volunteer: Volunteer,
        line: m.Line,
        version: int,
        sources: Mapping[int, tuple[str, ...]],
    ) -> list[MemberEffect]:
        if core.line == line:
            self.fetch(volunteer, line, version, sources)
        return []

    def save(self, volunteer: Volunteer, version: int, block: int, state: Any) -> None:
        """Upload one block's state to the coordinator's checkpoint store."""

        def arrive() -> None:
            if self.coordinator is None:
                return
            self.store[version, block] = state
            self._note("saved")
            digest = self.numerics.digest(state)
            self._perform(self.coordinator.saved(version, block, digest, self.world.now))

        self.network.send(volunteer.name, COORDINATOR, arrive)

    def noticed_death(self, name: str) -> None:
        """Streams of a killed process break: the coordinator and its neighbours see it at once."""

        def broken() -> None:
            if self.coordinator is not None:
                self._note("broken")
                self._perform(self.coordinator.broken(name, self.world.now))

        self.world.after(0.05, broken)
        for other in self.volunteers.values():
            if other.alive and other.name != name and self.world.random.random() < 0.5:
                self.world.after(0.3, other.link_down(name))

    def happened(self, what: str) -> None:
        """Something fault hooks may want to strike at."""
        for hook in list(self.hooks):
            hook(what)

    def poisoned(self, volunteer: str, microbatch: int) -> bool:
        """Whether this microbatch fails at this volunteer (once)."""
        key = (volunteer, microbatch)
        if key in self.poison:
            self.poison.discard(key)
            return True
        return False

    # ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────

    def box(self, value: Any) -> Handle:
        handle = next(self._boxes)
        self._tensors[handle] = _Box(value)
        return handle

    def unbox(self, handle: Handle) -> Any:
        box = self._tensors[handle]
        if box.released:
            raise ViolationError(f"tensor {handle} is used after its release")
        return box.value

    def release(self, handle: Handle) -> None:
        self._tensors[handle].released = True

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def record_applied(self, volunteer: Volunteer, record: e.RecordApplied) -> None:
        """Every update applied anywhere: exactly the step's ids, and the same bits at every holder."""
        for cover in record.covers:
            ids = Counter(i for _, held in cover.slots for i in held)
            if ids != Counter(range(self.config.microbatches)):
                raise ViolationError(f"step {record.step.number} block {cover.block}: counted {dict(ids)}")
            line, number = record.step
            key = (line.term, line.view, number, cover.block)
            state = record.states[cover.block]
            if self._applied.setdefault(key, state) != state:
                raise ViolationError(f"step {number} block {cover.block}: holders differ at {volunteer.name}")

    def _check_end(self) -> None:
        history = History.of(self.log)
        if sorted(history.commits) != list(range(self.config.steps)):
            raise ViolationError(f"committed steps {sorted(history.commits)}")
        for block in range(self.numerics.blocks):
            final = self.numerics.digest(self.store[self.config.steps, block])
            self.check_final(block, final)

    def check_final(self, block: int, digest: str) -> None:
        """The final state of `block` is that of one big machine. Numerics without an exact answer skip it."""
        expected = getattr(self.numerics, "expected", None)
        if expected is None:
            return
        want = expected(block, self.config.steps, self.config.microbatches)
        if digest != want:
            raise ViolationError(f"block {block} ended in another state than that of one machine")

    def _note(self, event: str) -> None:
        if self.coordinator is not None:
            self.coverage.coordinator[self.coordinator.state.value, event] += 1
