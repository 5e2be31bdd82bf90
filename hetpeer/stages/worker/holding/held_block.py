"""A block as the worker holds it: its graph, its state as flat vectors, and its slots.

Parameters and BatchNorm's running values are one flat float32 vector, so that the optimizer, the reduce and
the state file see one vector and the graph sees its tensors. A slot is a vector of the same layout: the sum
of some microbatches' gradients and weighted statistics. What lies where is the residence's to say
(docs/memory.md). If the weights on the device are copies, the vectors that are updated are the *masters*;
otherwise the newest weights are themselves updated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from hetpeer.stages.block.block import flat_views, statistic_views
from hetpeer.stages.block.block_state import Numbers, State, digest_of, layout_of
from hetpeer.stages.block.exact_scalars import float32
from hetpeer.stages.block.parameter_groups import BlockRules, OuterRule
from hetpeer.stages.block.state_file import file_bytes
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.parameter_reads import cast_parameters
from hetpeer.stages.ipc.vector_commands import PARAMETERS, Apply, Install
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.worker.holding.block_slots import BlockSlots
from hetpeer.stages.worker.holding.movement import Movement
from hetpeer.stages.worker.holding.residence import Residence
from hetpeer.stages.worker.holding.running_statistics import RunningStatistics
from hetpeer.stages.worker.holding.stored_vector import InMemory, StoredVector, pieces
from hetpeer.stages.worker.holding.weights import WeightLayout, Weights, WeightVersions
from hetpeer.stages.worker.tensor_staging import CommandError
from hetpeer.stages.worker.vector_sums import CodecLosses


class HeldBlock:
    """One block's tensors at `residence`. `buffers` are kept as given; the state's vectors are copied.

    Raises `LocalError` HP-DISK-007, HP-DISK-008 if the residence is a file without room, and as reading the
    state does; nothing is kept then.
    """

    def __init__(
        self,
        spec: BlockSpec,
        buffers: Mapping[str, Tensor],
        state: State,
        rules: BlockRules,
        residence: Residence,
    ) -> None:
        self.spec = spec
        self.residence = residence
        self.averages = state.averages
        """Number of updates that were averagings."""
        self._rules = rules
        given, count = state.numbers(), spec.vector_count
        with contextlib.ExitStack() as undo:

            def kept(name: str) -> StoredVector:
                found = residence.kept(given.get(name), count)
                undo.callback(found.free)
                return found

            layout = WeightLayout(spec, cast_parameters(spec) if residence.apart and residence.cast else ())
            weights = Weights.first(layout, buffers, residence.device)
            self._versions = WeightVersions(state.version, weights)
            self._masters = kept("") if residence.apart else None
            """None: the newest weights are their own masters."""
            for begin, end in pieces(0, count):
                weights.put(begin, torch.from_numpy(given[""].read(begin, end)), residence.copier)
            self._optimizer = {name: kept(name) for name in rules.keeps}
            if rules.outer is not None and self.version == 0:
                for begin, end in pieces(0, spec.parameter_count):
                    first = self._pieces_of_state(begin, end)
                    rules.outer.begin(parameters=self.vector.piece(begin, end), state=first)
                    self._keep_state(begin, first)
            undo.pop_all()
        self._running = RunningStatistics(spec)
        self._slots = BlockSlots(spec.index, spec.vector_count, residence)
        self._copy: tuple[int, StoredVector] | None = None
        """Version and vector at the start of an averaging that runs beside steps; None: there is none."""
        self._movement: Movement | None = None
        """The movement that was asked for last."""
        self.losses = CodecLosses(spec.vector_count)
        """Rounding errors of the lossy codecs of reduces, to be added to later vectors."""

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._versions.version

    def weights(self, version: int) -> Weights:
        """The weights of a step that began at `version`. Raises CommandError if they are not here."""
        return self._versions.at(version)

    @property
    def vector(self) -> StoredVector:
        """The newest flat parameters and statistics, as they are updated."""
        return InMemory(self._versions.newest.vector) if self._masters is None else self._masters

    def numbers(self) -> dict[str, Numbers]:
        """The newest state's vectors (`State.numbers`). At version 0 there are parameters only."""
        return {"": self.vector, **(self._optimizer if self.version else {})}

    def digest(self) -> str:
        """Digest of the newest state's bits (block_state.py)."""
        return digest_of(self.numbers(), self.version, self.averages)

    def free(self) -> None:
        """Give back what lies in the scratch file."""
        self._slots.clear()
        for vector in (*self._optimizer.values(), self._masters, self._copy and self._copy[1]):
            if vector is not None:
                vector.free()

    # ── updates ────────────────────────────────────────────────────────────────────────────────────────────

    def update(self, gradient: StoredVector, how: Apply) -> None:
        """Version s → s + 1; drops the slots of step s and versions that nobody needs.

        `gradient` is where updates run, or in the file; it is freed. Raises CommandError if the version for
        which it was computed is not here.
        """
        try:
            self._update(gradient, how)
        finally:
            gradient.free()

    def _update(self, gradient: StoredVector, how: Apply) -> None:
        base = self.base_of(how)
        self._slots.clear(self.version)
        update = self.version - self.averages + 1
        after = self._versions.advance(how.needed)
        masters = self.vector
        for segment in self._rules.segments:
            for begin, end in pieces(segment.begin, segment.end):
                parameters, part = masters.piece(begin, end), gradient.piece(begin, end)
                coefficient = how.coefficient
                if base is not None:
                    part = _compensated(
                        part, coefficient, how.compensation, parameters - self._here(base[begin:end])
                    )
                    coefficient = 1.0
                state = self._pieces_of_state(begin, end)
                segment.rule.apply(
                    parameters=parameters,
                    state=state,
                    gradient=part,
                    coefficient=coefficient,
                    update=update,
                    step=how.batch + 1,
                    workers=how.workers,
                )
                self._keep_state(begin, state)
                self._keep(masters, after, begin, parameters)
        first = self.spec.parameter_count
        if first < self.spec.vector_count:
            statistics = masters.piece(first, self.spec.vector_count)
            added = gradient.piece(first, self.spec.vector_count)
            self._running.update(statistics, added, how.microbatches, how.skipped)
            self._keep(masters, after, first, statistics)

    def install(self, total: Tensor, how: Install) -> None:
        """Install an average, version s → s + 1: parameters and statistics become a share of `total`.

        Then are added: the rounding errors of our part under its plan; the outer rule's step, if any, for the
        parameters; and what local steps changed since `keep_copy`, if the averaging ran beside them. The
        optimizer's state stays (docs/averaging.md). With sparse updates `total` is of movements.
        """
        if self._rules.outer is not None and self._rules.outer.sparse:
            self._follow(self._rules.outer, total, how)
        else:
            self._take_mean(total, how)
        self.averages += 1

    def _take_mean(self, total: Tensor, how: Install) -> None:
        self._slots.clear(self.version)
        copied, copy = self._copy or (self.version, None)
        trained = copy is not None and copied != self.version
        after = self._versions.advance(self.version + 1 if how.needed is None else how.needed)
        masters = self.vector
        of_parts, _ = PARAMETERS
        lost = self.losses.lost(of_parts, how.plan)
        own = self.spec.parameter_count
        for begin, end in (*pieces(0, own), *pieces(own, self.spec.vector_count)):
            place = masters.piece(begin, end)
            now = place.clone() if trained else None
            torch.mul(total[begin:end], float32(how.coefficient), out=place)
            if lost is not None:
                place.add_(lost[begin:end])
            if self._rules.outer is not None and end <= own:
                state = self._pieces_of_state(begin, end)
                self._rules.outer.apply(parameters=place, state=state)
                self._keep_state(begin, state)
            if now is not None and copy is not None:
                place.sub_(copy.piece(begin, end)).add_(now)
            self._keep(masters, after, begin, place)

    def _follow(self, outer: OuterRule, total: Tensor, how: Install) -> None:
        """Follow the mean movement. What others got of ours is found anew if we did not send it."""
        own = self.movement()
        self._slots.clear(self.version)
        after = self._versions.advance(self.version + 1 if how.needed is None else how.needed)
        masters = self.vector
        for begin, end in own.pieces:
            parameters, state = masters.piece(begin, end), self._pieces_of_state(begin, end)
            sent = own.read(begin, end).to(parameters.device)
            outer.follow(
                parameters=parameters, state=state, sent=sent, total=total[begin:end], share=how.coefficient
            )
            self._keep_state(begin, state)
            self._keep(masters, after, begin, parameters)

    def movement(self) -> Movement:
        """The movement of this version, as clusters send it. Raises CommandError if they send none."""
        outer = self._rules.outer
        if outer is None or not outer.sparse:
            raise CommandError(f"block {self.spec.index} sends no movements")

        def moved(begin: int, end: int) -> Tensor:
            state = self._pieces_of_state(begin, end)
            return outer.moved(parameters=self.vector.piece(begin, end), state=state)

        if self._movement is None or self._movement.version != self.version:
            ranges = self._rules.ranges or ((0, self.spec.parameter_count),)
            self._movement = Movement(self.version, ranges, moved)
        return self._movement

    def base_of(self, how: Apply) -> Tensor | None:
        """The vector of the version for which a stale gradient was computed; None: it is not to be corrected.

        Raises CommandError if its float32 numbers are not here.
        """
        if not how.compensation or how.base == self.version:
            return None
        return self._versions.at(how.base).vector

    def _pieces_of_state(self, begin: int, end: int) -> dict[str, Tensor]:
        """The optimizer's numbers [begin, end)."""
        return {name: vector.piece(begin, end) for name, vector in self._optimizer.items()}

    def _keep_state(self, begin: int, state: Mapping[str, Tensor]) -> None:
        """Store changed pieces of the optimizer's vectors."""
        for name, piece in state.items():
            self._optimizer[name].keep(begin, piece)

    def _keep(self, masters: StoredVector, weights: Weights, begin: int, piece: Tensor) -> None:
        """Store a changed piece of the masters, here and in the `weights` on the device."""
        if self._masters is not None:
            masters.keep(begin, piece)
            weights.put(begin, piece, self.residence.copier)

    def _here(self, weights: Tensor) -> Tensor:
        """A piece of weights where updates run."""
        return weights.to(self.residence.updating)

    def keep_copy(self) -> None:
        """Keep a copy of the present vector, to be averaged."""
        self.drop_copy()
        self._copy = (
            self.version,
            self.residence.kept(self.vector, self.vector.count),
        )

    def drop_copy(self) -> None:
        """Forget the vector that `keep_copy` kept."""
        if self._copy is not None:
            self._copy[1].free()
        self._copy = None
        self._slots.sum_gone()

    @property
    def copy(self) -> StoredVector:
        """The vector that `keep_copy` kept. Raises CommandError if there is none."""
        if self._copy is None:
            raise CommandError(f"block {self.spec.index} has no copy")
        return self._copy[1]

    # ── slots of each step ─────────────────────────────────────────────────────────────────────────────────

    def room(self, step: int, slot: int) -> Tensor:
        """The vector of `slot`, or a new one of undefined content that `fold` will make the slot's."""
        return self._slots.room(step, slot)

    def fold(
        self, step: int, slot: int, room: Tensor, gradients: Mapping[str, Tensor | None], here: Pass
    ) -> None:
        """Add one microbatch's gradients, by parameter name, and its statistics, from the pass that made
        them.

        None is a parameter without a gradient. The first microbatch's gradients *are* the sum: nothing is
        added to zeros, so -0.0 keeps its sign.
        """
        first = (step, slot) not in self._slots
        places = {
            **flat_views(self.spec, room),
            **statistic_views(self.spec, room[self.spec.parameter_count :]),
        }
        parts = {**gradients, **self._running.weighted(here)}
        for name, place in places.items():
            part = parts[name]
            if part is not None:
                self.residence.land(part, place, add=not first)
            elif first:
                place.zero_()
        self._slots.put(step, slot, room)

    def slot(self, step: int, slot: int) -> StoredVector:
        """The flat sum of a slot. Raises CommandError if there is none."""
        return self._slots.at(step, slot)

    def make_way(self) -> None:
        """Make room for the sum that a reduce of this block makes."""
        self._slots.make_way()

    def slot_inspected(self, step: int, slot: int) -> None:
        """Note that a slot was found finite: until it changes it may be the gradient of an update."""
        self._slots.inspected(step, slot)

    def take_inspected(self, slot: int | None) -> StoredVector:
        """Take an inspected slot of the newest version's step away. Raises CommandError if it has changed."""
        return self._slots.take(self.version, slot)

    def merge_slot(self, step: int, source: int, target: int) -> None:
        """Add `source` to `target`, or make it `target` if there is none yet; `source` is forgotten."""
        self._slots.merge(step, source, target)

    def drop_slot(self, step: int, slot: int) -> None:
        """Forget a slot, if it is there."""
        self._slots.drop(step, slot)

    def clear_slots(self, step: int) -> None:
        """Forget all slots of `step`."""
        self._slots.clear(step)


def _compensated(gradient: Tensor, coefficient: float, strength: float, change: Tensor) -> Tensor:
    """A piece of the gradient, clipped and corrected for the `change` since its version (DC-ASGD)."""
    # g ← c g; g ← g + λ g² (w - w_base), one IEEE operation after the other
    clipped = gradient * float32(coefficient)
    return clipped.add_((clipped * clipped).mul_(change).mul_(float32(strength)))


def dump_bytes(spec: BlockSpec, rules: BlockRules) -> int:
    """Most bytes of the block's state file."""
    return file_bytes(layout_of(spec), 1 + len(rules.keeps))
