"""Simulated compute worker: one command after another, in the order in which they were submitted.

As in the daemon, slots and states change when a command runs, and a command's tensors are those of the moment
it was submitted. A command for another version of a state, or for blocks that are not loaded, is a violation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect
from hetpeer.averaging.member.member import Member
from hetpeer.peer.simulate.network.sim_links import SimTensors
from hetpeer.peer.simulate.network.sim_uplinks import SimHardware
from hetpeer.peer.simulate.network.world import World
from hetpeer.peer.simulate.sim_hooks import UNUSABLE, SimConduct, ViolationError
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.gradient_slots import Drop, Merge
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow

Finish = Callable[[Member], Iterable[Effect]]
Answer = Callable[[Finish], None]

FORWARD_S, BACKWARD_S, REDUCE_S, APPLY_S, LOAD_S = 0.05, 0.1, 0.01, 0.02, 0.05
"""Virtual seconds at speed 1: per block, per block, per call, per block, per block."""


@dataclass(eq=False)
class SimWorker:
    """Worker of one process. `answer` gives a result to the core; `boxes` are the process's tensors.

    `speed` is in FLOP/s if there is `hardware`, else relative to 1.
    """

    _world: World
    _numerics: Symbols
    boxes: SimTensors
    _window: InFlightWindow
    _speed: float
    _answer: Answer
    _hardware: SimHardware | None = None
    _device: int = 0
    """Its number in `hardware`."""
    _fails_at: Callable[[int, int], int | None] = lambda _batch, _number: None
    """(batch, id) → block at which anybody fails, as in `SwarmConfig.bad`."""
    states: dict[int, dict[int, Any]] = field(default_factory=dict)
    """Block → version → state; only versions that steps in progress compute with."""
    graphs_of: tuple[int, int] | None = None
    """Blocks whose graphs are loaded."""
    before: dict[int, str] = field(default_factory=dict)
    """Block → digest of the state to which the last update was applied."""
    conduct: SimConduct = field(default_factory=SimConduct)
    """Set by the volunteer before the first command comes."""
    slots: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """(step, slot, block) → sum."""
    _graphs: dict[tuple[int, p.TaskKey], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._busy_until = self._world.now

    def hang(self, seconds: float) -> None:
        """Do nothing for a while; the process itself goes on."""
        self._busy_until = max(self._busy_until, self._world.now) + seconds

    def submit(self, seconds: float, finish: Finish) -> None:
        """Run `finish` when everything before it is done and `seconds` of work have passed."""
        world = self._world
        self._busy_until = max(self._busy_until, world.now) + seconds * world.random.uniform(0.7, 1.5)
        world.at(self._busy_until, lambda: self._answer(finish))

    def _seconds(self, begin: int, end: int, *, backward: bool) -> float:
        """Seconds of a microbatch's forward or backward at the blocks [begin, end)."""
        hardware = self._hardware
        if hardware is None:
            return (BACKWARD_S if backward else FORWARD_S) * (end - begin) / self._speed
        each = hardware.backward_s if backward else hardware.forward_s
        carried_s = hardware.fold_s(self._device, begin, end) if backward else 0.0
        return sum(map(each, range(begin, end))) / self._speed + carried_s

    def microbatch_s(self, begin: int, end: int) -> float:
        """Seconds of a microbatch's forward and backward at the blocks [begin, end); 0 without hardware."""
        if self._hardware is None:
            return 0.0
        return self._seconds(begin, end, backward=False) + self._seconds(begin, end, backward=True)

    def besides(self, seconds: float) -> float:
        """Seconds of small work: 0 with hardware, where it hardly counts beside forwards and backwards."""
        return seconds if self._hardware is None else 0.0

    def clear_step(self, step: e.StepId) -> None:
        """Forget the graphs and slots of `step`, after the commands that wait."""

        def clear() -> None:
            self.slots = {key: held for key, held in self.slots.items() if key[0] != step.number}
            self._graphs = {key: kept for key, kept in self._graphs.items() if key[0] != step.number}
            self._window.end_step(step)
            self.conduct.step_over(step)

        self._change(clear)

    # ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, step: e.StepId, work: p.RunForward) -> None:
        """`RunForward` → `forward_done` or `work_failed`."""
        key = work.key
        bundle = None if work.source is None else self.boxes.value(work.source)
        if work.source is not None and work.train:
            self.conduct.used(step, key, key.begin, self.boxes.sender(work.source), bundle)
        if work.train and not key.check:
            self._window.begun((step, key), work.hops_after, self._world.now)

        def finish(core: Member) -> Iterable[Effect]:
            if self._is_bad(step, key, work.end) or self.conduct.computation_fails(2 * key.id):
                return core.work.work_failed(step, key, "non-finite output")
            blocks = range(key.begin, work.end)
            states = [self._state(block, step.version_of(key.id, block)) for block in blocks]
            kept, out = self._numerics.forward(states, key.begin, (step.batch, key.id), bundle)
            if work.train:
                self._graphs[step.number, key] = kept
            said = self.conduct.failures(step)
            if work.end == self._numerics.blocks:
                return [*said, *core.work.forward_done(step, key, None, out)]
            return [*said, *core.work.forward_done(step, key, self.boxes.new(step, out), None)]

        self.submit(self._seconds(key.begin, work.end, backward=False), finish)

    def backward(self, step: e.StepId, work: p.RunBackward) -> None:
        """`RunBackward` → `backward_done` or `work_failed`, which leaves rubbish in the slot."""
        key, numerics = work.key, self._numerics
        gradient = None if work.gradient is None else self.boxes.value(work.gradient)
        if work.gradient is not None:
            sender = self.boxes.sender(work.gradient)
            self.conduct.used(step, key, work.end, sender, gradient, back=True)

        def finish(core: Member) -> Iterable[Effect]:
            back, gradients = numerics.backward(self._graphs.pop((step.number, key)), gradient)
            broken = self.conduct.computation_fails(2 * key.id + 1)
            broken = broken or self._is_bad(step, key, work.end, back=True)
            for block, part in zip(range(key.begin, work.end), gradients, strict=True):
                if block in work.fold:
                    have = self.slots.get((step.number, work.slot, block))
                    terms = [g for g in (have, part, part if broken else None) if g is not None]
                    self.slots[step.number, work.slot, block] = numerics.add(terms)
            if broken:
                return core.work.work_failed(step, key, "non-finite gradient")
            if not key.check:
                self._window.finished((step, key), self._world.now)
            return core.work.backward_done(step, key, self.boxes.new(step, back) if key.begin > 0 else None)

        self.submit(self._seconds(key.begin, work.end, backward=True), finish)

    def _is_bad(self, step: e.StepId, key: p.TaskKey, end: int, *, back: bool = False) -> bool:
        """Whether nobody can compute the forward (`back`: the backward) of `key` before block `end`."""
        at = self._fails_at(step.batch, key.id)
        return at is not None and key.begin <= (-1 - at if back else at) < end

    def unload(self) -> None:
        """Unload the graphs, as those of another place are about to be loaded."""
        self._change(lambda: setattr(self, "graphs_of", None))

    def forget_graph(self, step: e.StepId, key: p.TaskKey) -> None:
        """Drop the kept forward of task `key` of `step`, in the worker's order."""
        self._change(lambda: self._graphs.pop((step.number, key), None))

    def merge_or_drop(self, step: e.StepId, change: Merge | Drop) -> None:
        """Merge a slot into another one, or drop it."""
        match change:
            case Merge(block, source, target):
                self._change(lambda: self._merge(step.number, block, source, target))
            case Drop(block, slot):
                self._change(lambda: self.slots.pop((step.number, slot, block), None))

    def _merge(self, step: int, block: int, source: int, target: int) -> None:
        both = [self.slots.get((step, target, block)), self.slots.pop((step, source, block))]
        self.slots[step, target, block] = self._numerics.add(g for g in both if g is not None)

    # ── reduce and apply ────────────────────────────────────────────────────────────────────────────────────

    def export(self, step: e.StepId, work: e.SendPart, send: Callable[[p.Handle], None]) -> None:
        """`SendPart`: copy our slot's elements of a shard, then send them."""

        def finish(_core: Member) -> Iterable[Effect]:
            shard = work.shard
            sums = self.slots[step.number, work.slot, shard.block]
            value = self._numerics.shard(sums, shard.begin, shard.end)
            send(self.boxes.new(step, self.conduct.part_sent(value, step, work)))
            return ()

        self.submit(0.0, finish)

    def sum(self, step: e.StepId, work: e.SumParts) -> None:
        """`SumParts` → `summed`."""
        parts = [self.boxes.value(handle) for handle in work.parts]

        def finish(core: Member) -> Iterable[Effect]:
            conduct = self.conduct
            bad = next((place for place, part in enumerate(parts) if part is UNUSABLE), conduct.objects(work))
            if bad is not None:
                return core.work.unusable(step, work.shard, bad, "it is spoilt")
            lengths = conduct.squared_lengths(step, work, parts) if not step.group else ()
            total = conduct.sum_made(self._numerics.add(parts), exact=not step.group)
            return core.work.summed(step, work.shard, self.boxes.new(step, total), lengths)

        self.submit(self.besides(REDUCE_S), finish)

    def inspect(self, step: e.StepId, work: e.Inspect) -> None:
        """`Inspect` → `inspected`."""
        shards = [self.boxes.value(handle) for handle in work.shards]
        self._vote(step, work, shards, lambda: self._numerics.join(shards))

    def _vote(
        self, step: e.StepId, work: e.Inspect, arrived: Sequence[Any], gradient: Callable[[], Any]
    ) -> None:
        """Vote on `gradient()`, which is made of the sums that have `arrived`."""
        numerics = self._numerics
        each = [self.boxes.value(handle) for handle in work.pieces] if work.closely else []

        def look(value: Any) -> e.Look:
            if value is UNUSABLE:
                return e.Look("spoilt", finite=False)
            return e.Look(numerics.inspect(work.block, value)[0], finite=True)

        def finish(core: Member) -> Iterable[Effect]:
            spoilt = any(value is UNUSABLE for value in arrived)
            total = UNUSABLE if spoilt else gradient()
            vote = self._vote_on(work.block, total)
            vote, looks = self.conduct.voted(step.number, vote, list(map(look, each)))
            return core.work.inspected(step, work.plan, vote, self.boxes.new(step, total), looks)

        self.submit(self.besides(REDUCE_S), finish)

    def inspect_slot(self, step: e.StepId, work: e.InspectSlot) -> None:
        """`InspectSlot` → `inspected`."""
        place = step.number, work.slot, work.block

        def finish(core: Member) -> Iterable[Effect]:
            total = self.slots[place] = self.conduct.sum_made(self.slots[place], exact=True)
            vote = self._vote_on(work.block, total)
            vote, looks = self.conduct.voted(step.number, vote, ())
            return core.work.inspected(step, work.plan, vote, e.SlotSum(work.slot), looks)

        self.submit(self.besides(REDUCE_S), finish)

    def _vote_on(self, block: int, total: Any) -> m.BlockVote:
        spoilt = total is UNUSABLE
        digest, norm = ("spoilt", math.inf) if spoilt else self._numerics.inspect(block, total)
        return m.BlockVote(block=block, digest=digest, squared_norm=norm, finite=not spoilt)

    def apply(self, step: e.StepId, work: e.ApplyUpdate) -> None:
        """`ApplyUpdate` → `applied`. A sum in a slot is what the slot holds when the command runs."""
        given = work.gradient
        arrived: Any = None if isinstance(given, e.SlotSum) else self.boxes.value(given)

        def after(before: Any) -> Any:
            if isinstance(given, e.SlotSum):
                return self._numerics.apply(
                    before, self.slots[step.number, given.slot, work.block], work.coefficient
                )
            return self._numerics.apply(before, arrived, work.coefficient)

        self._update(step, work.block, step.number, after, work.needed)

    def _update(
        self, step: e.StepId, block: int, version: int, after: Callable[[Any], Any], needed: int
    ) -> None:
        """Replace the state of `block` at `version` by `after` of it; `needed`: the oldest version kept."""

        def finish(core: Member) -> Iterable[Effect]:
            before = self._state(block, version)
            state = self.conduct.state_made(after(before))
            older = {v: held for v, held in self.states[block].items() if v >= needed}
            self.states[block] = {**older, version + 1: state}
            self.before[block] = self._numerics.digest(before)
            return core.applied(step, block, self._numerics.digest(state))

        self.submit(0.0 if self.conduct.applies_at_once() else self._update_s(block), finish)

    def _update_s(self, block: int) -> float:
        """Seconds of an update of `block`: with hardware, of its numbers' way between GPU, RAM and disk."""
        if self._hardware is None:
            return APPLY_S
        begin, end = self.graphs_of or (block, block + 1)
        return self._hardware.update_s(self._device, begin, end) / (end - begin)

    def load(self, version: int, block: int, state: Any, loaded: Callable[[], None]) -> None:
        """Replace the block's state by a fetched one, then call `loaded`."""

        def finish(_core: Member) -> Iterable[Effect]:
            self.states[block] = {version: state}
            loaded()
            return ()

        self.submit(self.besides(LOAD_S), finish)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────

    def _change(self, change: Callable[[], object]) -> None:
        """Queue a command that takes no time and has no result for the core."""

        def finish(_core: Member) -> Iterable[Effect]:
            change()
            return ()

        self.submit(0.0, finish)

    def _state(self, block: int, number: int) -> Any:
        if self.graphs_of is None or not self.graphs_of[0] <= block < self.graphs_of[1]:
            raise ViolationError(f"block {block} is run but not loaded (graphs of {self.graphs_of})")
        states = self.states[block]
        if number not in states:
            raise ViolationError(
                f"version {number} of block {block} is run, and versions {set(states)} are here"
            )
        return states[number]
