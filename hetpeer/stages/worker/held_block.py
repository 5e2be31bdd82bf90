"""A block as the worker holds it: its graph, its state as flat vectors on the device, and its slots.

Parameters and BatchNorm's running values are views into one flat float32 vector, so that the optimizer, the
reduce and the state file see one vector and the graph sees its tensors. A slot is a vector of the same
layout: the sum of some microbatches' gradients and weighted statistics.

A step uses the parameters with which it began, at every holder and in both directions, whatever has been
committed meanwhile (docs/asynchronous.md; weight stashing of PipeDream, Narayanan et al., SOSP 2019): updates
make new versions of the vector while earlier steps still compute with older ones. If no older version is in
use, the update is in place and there is one vector.

BatchNorm's running values are a sum over microbatches, so that exactly-once holds for them too. Microbatch by
microbatch, torch does r ← (1 - m) r + m x. Over a step's M microbatches in the order of their ids that is
r ← (1 - m)^M r + Σ m (1 - m)^(M-1-i) xᵢ: the summands travel behind the gradient (docs/graph.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hetpeer.stages.block.block import Block, flat_views, statistic_views
from hetpeer.stages.block.block_state import BlockState, file_bytes, layout_of
from hetpeer.stages.block.exact_scalars import float32, power
from hetpeer.stages.block.parameter_groups import BlockRules
from hetpeer.stages.graph.block_spec import BlockSpec, momentum, running_values
from hetpeer.stages.ipc.vector_commands import PARAMETERS, Apply
from hetpeer.stages.operators.names import BATCH_NORM
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.worker.tensor_staging import CommandError
from hetpeer.stages.worker.vector_sums import CodecLosses


class Weights:
    """One version: the flat float32 `vector` of parameters and statistics, and the block bound to it."""

    def __init__(self, vector: torch.Tensor, block: Block) -> None:
        spec = block.spec
        self.vector = vector
        self.statistics = vector[spec.parameter_count :]
        self.parameters = {
            name: view.detach().requires_grad_() for name, view in flat_views(spec, vector).items()
        }
        """Leaves of the autograd graph: views of the flat vector."""
        self.block = block.on(self.parameters, statistic_views(spec, self.statistics))

    @classmethod
    def first(
        cls, spec: BlockSpec, vector: torch.Tensor, buffers: Mapping[str, torch.Tensor], device: torch.device
    ) -> Weights:
        """The weights of a block that was just loaded."""
        own = flat_views(spec, vector), statistic_views(spec, vector[spec.parameter_count :])
        return cls(vector, Block(spec, own[0], buffers, own[1], device))

    def copy(self) -> Weights:
        """A copy in memory of its own."""
        return Weights(self.vector.clone(), self.block)


class WeightVersions:
    """The versions of one block in use, from `version` on."""

    def __init__(self, version: int, weights: Weights) -> None:
        self._held = {version: weights}

    @property
    def version(self) -> int:
        """Number of the newest version."""
        return max(self._held)

    @property
    def newest(self) -> Weights:
        """The newest weights."""
        return self._held[self.version]

    def at(self, version: int) -> Weights:
        """The weights of `version`. Raises CommandError if they are not here."""
        if version not in self._held:
            there = ", ".join(map(str, sorted(self._held)))
            raise CommandError(f"version {version} is not here, but {there}")
        return self._held[version]

    def advance(self, needed: int) -> Weights:
        """The next version, still with the newest one's numbers, which the caller changes.

        Versions before `needed` are forgotten; the newest is changed in place if it is one of them.
        """
        version, newest = self.version, self.newest
        self._held = {v: weights for v, weights in self._held.items() if v >= needed}
        self._held[version + 1] = newest.copy() if version in self._held else newest
        return self._held[version + 1]


class RunningStatistics:
    """The running values of a block's BatchNorms, and their momenta."""

    def __init__(self, spec: BlockSpec) -> None:
        self._norms: dict[str, tuple[float, list[str]]] = {}
        rates: dict[str, float] = {}
        for node in spec.nodes:
            if node.op == BATCH_NORM:
                names = [spec.statistics[value.name] for value in running_values(node)]
                self._norms[node.name] = (momentum(node), names)
                rates |= dict.fromkeys(names, momentum(node))
        self._parts = [(rates[name], tensor.count) for name, tensor in spec.statistic_specs.items()]

    def weighted(self, here: Pass) -> dict[str, torch.Tensor]:
        """Running value → one microbatch's summand; `here` has the microbatch's place in the step."""
        result: dict[str, torch.Tensor] = {}
        for call, (rate, names) in self._norms.items():
            assert here.draw is not None
            weight = float32(_weight(rate, here.draw.microbatches, here.draw.microbatch))
            for name, statistic in zip(names, here.statistics[call], strict=True):
                result[name] = statistic * weight
        return result

    def update(
        self, running: torch.Tensor, added: torch.Tensor, microbatches: int, skipped: Sequence[int] = ()
    ) -> None:
        """Apply a committed step in place: `running` decays, and the microbatches' sum `added` is added.

        A `skipped` microbatch counts as if it had shown the running values themselves.
        """
        begin = 0
        for rate, count in self._parts:
            part = slice(begin, begin + count)
            kept = power(1.0 - rate, microbatches)
            for microbatch in skipped:
                kept += _weight(rate, microbatches, microbatch)
            running[part].mul_(float32(kept)).add_(added[part])
            begin += count


def _weight(rate: float, microbatches: int, microbatch: int) -> float:
    """Weight of a microbatch's statistics in the running values after its step."""
    return rate * power(1.0 - rate, microbatches - 1 - microbatch)


class HeldBlock:
    """One block's tensors on `device`. `buffers` are kept as given; the state's vectors are taken over."""

    def __init__(
        self,
        spec: BlockSpec,
        buffers: Mapping[str, torch.Tensor],
        state: BlockState,
        rules: BlockRules,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self._averages = state.averages
        self._rules = rules
        vector = torch.from_numpy(state.parameters).to(device)
        self._versions = WeightVersions(state.version, Weights.first(spec, vector, buffers, device))
        self._optimizer = {
            name: torch.from_numpy(state.optimizer[name]).to(device)
            if name in state.optimizer
            else torch.zeros_like(vector)
            for name in rules.keeps
        }
        if rules.outer is not None and self.version == 0:
            rules.outer.begin(**self._averaged())
        self._running = RunningStatistics(spec)
        self._slots: dict[int, dict[int, torch.Tensor]] = {}
        """Step → slot → its sum."""
        self._copy: tuple[int, torch.Tensor] | None = None
        """Version and vector at the start of an averaging that runs beside steps; None: there is none."""
        self.losses = CodecLosses(spec.vector_count)
        """Rounding errors of the lossy codecs of reduces, to be added to later vectors."""

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._versions.version

    def weights(self, version: int) -> Weights:
        """The weights of a step that began at `version`. Raises CommandError if they are not here."""
        return self._versions.at(version)

    def state(self) -> BlockState:
        """The newest state as numpy vectors: on a CPU the memory itself, not a copy."""
        return BlockState(
            version=self.version,
            parameters=self.vector.cpu().numpy(),
            optimizer={
                name: vector.cpu().numpy() for name, vector in self._optimizer.items() if self.version
            },
            averages=self._averages,
        )

    def update(self, gradient: torch.Tensor, how: Apply) -> None:
        """Version s → s + 1; drops the slots of step s and versions that nobody needs.

        Raises CommandError if the version for which the gradient was computed is not here.
        """
        gradient, coefficient = self._compensated(gradient, how)
        self._slots.pop(self.version, None)
        updates = self.version - self._averages
        after = self._versions.advance(how.needed)
        for segment in self._rules.segments:
            part = slice(segment.begin, segment.end)
            segment.rule.apply(
                parameters=after.vector[part],
                state={name: vector[part] for name, vector in self._optimizer.items()},
                gradient=gradient[part],
                coefficient=coefficient,
                update=updates + 1,
                step=how.batch + 1,
                workers=how.workers,
            )
        added = gradient[self.spec.parameter_count :]
        self._running.update(after.statistics, added, how.microbatches, how.skipped)

    def _compensated(self, gradient: torch.Tensor, how: Apply) -> tuple[torch.Tensor, float]:
        """(gradient corrected for the change since its version, remaining factor): DC-ASGD, if asked for."""
        if not how.compensation or how.base == self.version:
            return gradient, how.coefficient
        own, rest = gradient[: self.spec.parameter_count], gradient[self.spec.parameter_count :]
        change = self.vector - self._versions.at(how.base).vector
        # g ← c g; g ← g + λ g² (w - w_base), one IEEE operation after the other
        clipped = own * float32(how.coefficient)
        more = (clipped * clipped).mul_(change[: len(own)]).mul_(float32(how.compensation))
        return torch.cat([clipped.add_(more), rest]), 1.0

    def install(self, total: torch.Tensor, coefficient: float, plan: int) -> None:
        """Install an average, version s → s + 1: parameters and statistics become `total` · `coefficient`.

        Then are added: the rounding errors of our part under `plan`; the outer rule's step, if any; and what
        local steps changed since `keep_copy`, if the averaging ran beside them. The optimizer's state stays
        (docs/averaging.md).
        """
        self._slots.clear()
        copied, copy = self._copy or (self.version, self.vector)
        # what local steps have made of `copy`; None: there have been none
        trained = None if copied == self.version else self.vector.clone()
        vector = self._versions.advance(self.version + 1).vector
        torch.mul(total, float32(coefficient), out=vector)
        of_parts, _ = PARAMETERS
        if (lost := self.losses.lost(of_parts, plan)) is not None:
            vector.add_(lost)
        if self._rules.outer is not None:
            self._rules.outer.apply(**self._averaged())
        if trained is not None:
            vector.sub_(copy).add_(trained)
        self._averages += 1

    def _averaged(self) -> dict[str, Any]:
        """Arguments of an outer rule: parameters and their state; running statistics are only averaged."""
        own = slice(self.spec.parameter_count)
        kept = {name: vector[own] for name, vector in self._optimizer.items()}
        return {"parameters": self.vector[own], "state": kept}

    def keep_copy(self) -> None:
        """Keep a copy of the present vector, to be averaged."""
        self._copy = (self.version, self.vector.clone())

    def drop_copy(self) -> None:
        """Forget the vector that `keep_copy` kept."""
        self._copy = None

    @property
    def vector(self) -> torch.Tensor:
        """The newest flat parameters and statistics."""
        return self._versions.newest.vector

    @property
    def copy(self) -> torch.Tensor:
        """The vector that `keep_copy` kept. Raises CommandError if there is none."""
        if self._copy is None:
            raise CommandError(f"block {self.spec.index} has no copy")
        return self._copy[1]

    # ── slots of each step ─────────────────────────────────────────────────────────────────────────────────

    def room(self, step: int, slot: int) -> torch.Tensor:
        """The vector of `slot`, or a new one of undefined content that `fold` will make the slot's."""
        held = self._slots.get(step, {}).get(slot)
        return torch.empty_like(self.vector) if held is None else held

    def fold(
        self,
        step: int,
        slot: int,
        room: torch.Tensor,
        gradients: Mapping[str, torch.Tensor | None],
        here: Pass,
    ) -> None:
        """Add one microbatch's gradients, by parameter name, and its statistics, from the pass that made
        them.

        None is a parameter without a gradient. The first microbatch's gradients *are* the sum: nothing is
        added to zeros, so -0.0 keeps its sign.
        """
        slots = self._slots.setdefault(step, {})
        first = slot not in slots
        places = {
            **flat_views(self.spec, room),
            **statistic_views(self.spec, room[self.spec.parameter_count :]),
        }
        parts = {**gradients, **self._running.weighted(here)}
        for name, place in places.items():
            part = parts[name]
            if first:
                place.zero_() if part is None else place.copy_(part)
            elif part is not None:
                place.add_(part)
        slots[slot] = room

    def slot(self, step: int, slot: int) -> torch.Tensor:
        """The flat sum of a slot. Raises CommandError if there is none."""
        held = self._slots.get(step, {}).get(slot)
        if held is None:
            raise CommandError(f"block {self.spec.index} has no slot {slot} of step {step}")
        return held

    def merge_slot(self, step: int, source: int, target: int) -> None:
        """Add `source` to `target`, or make it `target` if there is none yet; `source` is forgotten."""
        vector = self.slot(step, source)
        if source != target:
            slots = self._slots[step]
            del slots[source]
            slots[target] = slots[target].add_(vector) if target in slots else vector

    def drop_slot(self, step: int, slot: int) -> None:
        """Forget a slot, if it is there."""
        self._slots.get(step, {}).pop(slot, None)

    def clear_slots(self, step: int) -> None:
        """Forget all slots of `step`."""
        self._slots.pop(step, None)


def dump_bytes(spec: BlockSpec, rules: BlockRules) -> int:
    """Most bytes of the block's state file."""
    return file_bytes(layout_of(spec), 1 + len(rules.keeps))
