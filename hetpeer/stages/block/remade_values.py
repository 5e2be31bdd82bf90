"""Values that autograd does not keep, because the block makes them again from constants that it owns.

A frozen weight in float32 takes up to eight times the bytes of its stored form
(operators/frozen_operators.py). Autograd would keep it from each microbatch's forward to its backward.
Instead it keeps a recipe, and the backward makes the weight once more. So one weight at a time is in float32,
not all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hetpeer.stages.graph.block_spec import BlockSpec, OperatorCall
from hetpeer.stages.graph.interpreter import Observer, Program
from hetpeer.stages.operators.frozen_operators import FAMILY
from hetpeer.stages.operators.own_operators import Pass


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Call whose result a saved tensor is a view of, and the view."""

    call: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class RemadeValues:
    """The values of one block that can be made again; most blocks have none."""

    def __init__(self, spec: BlockSpec, owned: Mapping[str, Tensor], device: torch.device) -> None:
        """`owned`: value name → tensor, for the block's constants at least."""
        self._owned = owned
        self._device, self._autocast = device, spec.autocast
        self._programs = {
            node.name: (Program([node], (node.name,), device), tuple(node.references()))
            for node in spec.nodes
            if node.op in FAMILY and spec.buffers.keys() >= set(node.references())
        }

    def __bool__(self) -> bool:
        return bool(self._programs)

    @contextmanager
    def forward(self) -> Iterator[Observer]:
        """Context of one forward pass, whose calls the observer must see. Autograd keeps recipes in it."""
        calls: dict[int, tuple[str, weakref.ref[torch.UntypedStorage]]] = {}  # by id of a living storage

        def observe(node: OperatorCall, result: Any) -> None:
            if node.name in self._programs:
                storage = result.untyped_storage()
                key = id(storage)
                # An id is given again once its owner is gone, so the entry goes with it.
                calls[key] = node.name, weakref.ref(storage, lambda _: calls.pop(key, None))

        def pack(tensor: Tensor) -> Tensor | _Recipe:
            call, _ = calls.get(id(tensor.untyped_storage()), ("", None))
            if not call:
                return tensor.detach()  # the tensor itself would refer to its own graph, and never be freed
            return _Recipe(call, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, self._unpack):
            yield observe

    def _unpack(self, kept: Tensor | _Recipe) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        program, reads = self._programs[kept.call]
        with (
            torch.no_grad(),
            torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast),
        ):
            made: Tensor = program.run({name: self._owned[name] for name in reads}, Pass(None))[kept.call]
            return made.as_strided(kept.sizes, kept.strides, kept.offset)
