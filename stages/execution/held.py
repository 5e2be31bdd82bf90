"""A block as the worker holds it: its graph, its state as flat vectors on the device, and its slots.

Parameters are views into one flat float32 vector, so the optimizer, the rings and the state file see one vector and the
graph sees its tensors. A slot is a vector of the same layout: the sum of some microbatches' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hetpeer.stages.execution.block import Block, flat_views
from hetpeer.stages.execution.staging import CommandError
from hetpeer.stages.execution.state import HEADER_BYTES_PER_TENSOR, PREFIXES, BlockState, Layout
from hetpeer.stages.graph.spec import BlockSpec


class UpdateRule(Protocol):
    """How a gradient changes a state; equal inputs must give equal bits on every holder (averaging/updates.py)."""

    def apply(
        self,
        *,
        parameters: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        coefficient: float,
        step: int,
    ) -> None:
        """Update number `step`, from 1, of the first three in place: flat float32 vectors on one device."""


class HeldBlock:
    """One block's tensors on `device`. `buffers` are kept as given; the state's vectors are taken over."""

    def __init__(
        self,
        spec: BlockSpec,
        buffers: Mapping[str, torch.Tensor],
        state: BlockState,
        rule: UpdateRule,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.version = state.version
        self._rule = rule
        self._parameters, self._exp_avg, self._exp_avg_sq = (
            torch.from_numpy(vector).to(device) for vector in state.vectors()
        )
        self.parameters = {
            name: view.detach().requires_grad_() for name, view in flat_views(spec, self._parameters).items()
        }
        """Leaves of the autograd graph: views of the flat vector."""
        self.block = Block(spec, self.parameters, buffers, device)
        self._slots: dict[int, torch.Tensor] = {}

    @property
    def layout(self) -> Layout:
        return layout(self.spec)

    def state(self) -> BlockState:
        """The state as numpy vectors: on a CPU the memory itself, not a copy."""
        vectors = [vector.cpu().numpy() for vector in (self._parameters, self._exp_avg, self._exp_avg_sq)]
        return BlockState(
            version=self.version, parameters=vectors[0], exp_avg=vectors[1], exp_avg_sq=vectors[2]
        )

    def update(self, gradient: torch.Tensor, coefficient: float) -> None:
        """Version s → s + 1. The slots belonged to the step that ends here."""
        self._slots.clear()
        self._rule.apply(
            parameters=self._parameters,
            exp_avg=self._exp_avg,
            exp_avg_sq=self._exp_avg_sq,
            gradient=gradient,
            coefficient=coefficient,
            step=self.version + 1,
        )
        self.version += 1

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────

    def room(self, slot: int) -> torch.Tensor:
        """The vector of `slot`, or a new one of undefined content that `fold` will make the slot's."""
        return self._slots[slot] if slot in self._slots else torch.empty_like(self._parameters)

    def fold(self, slot: int, room: torch.Tensor, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Add one microbatch's gradients, by parameter name; None is a parameter that had no part in it.

        The first microbatch's gradients *are* the sum: nothing is added to zeros, so -0.0 keeps its sign.
        """
        first = slot not in self._slots
        for name, place in flat_views(self.spec, room).items():
            gradient = gradients[name]
            if first:
                place.zero_() if gradient is None else place.copy_(gradient)
            elif gradient is not None:
                place.add_(gradient)
        self._slots[slot] = room

    def slot(self, slot: int) -> torch.Tensor:
        """The flat sum of a slot. Raises CommandError when there is none."""
        if slot not in self._slots:
            raise CommandError(f"block {self.spec.index} has no slot {slot}")
        return self._slots[slot]

    def merge_slot(self, source: int, target: int) -> None:
        """Add `source` into `target`, or make it `target` where there is none yet; `source` is gone then."""
        vector = self.slot(source)
        if source != target:
            del self._slots[source]
            self._slots[target] = self._slots[target].add_(vector) if target in self._slots else vector

    def drop_slot(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def clear_slots(self) -> None:
        self._slots.clear()


def layout(spec: BlockSpec) -> Layout:
    """Names and shapes of a block's parameters, as its state file has them."""
    return [(name, part.shape) for name, part in spec.parameter_specs.items()]


def dump_bytes(spec: BlockSpec) -> int:
    """Room that the block's state file needs at most: tensors, header and length prefix (state.py)."""
    names = sum(HEADER_BYTES_PER_TENSOR + 6 * len(name) for name in spec.parameter_specs)
    return len(PREFIXES) * (spec.parameter_bytes + names) + 512
