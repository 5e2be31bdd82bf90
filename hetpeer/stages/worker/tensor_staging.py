"""Tensors between the arena and the device: names, shapes and dtypes from the graph, bytes from an extent.

On a CPU a tensor that is read *is* the arena's memory; on a GPU it is a copy (device_copy.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block.exact_numerics import is_finite
from hetpeer.stages.graph.block_spec import TensorSpec
from hetpeer.stages.graph.call_schema import SYMBOLS
from hetpeer.stages.ipc.arena import Extent, SharedMemory
from hetpeer.stages.worker.device_copy import Copier

FLOAT32_BYTES = 4


class CommandError(LocalError):
    """The command does not fit what the worker holds. Nothing was changed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "HP-WORK-001",
            what,
            why="the daemon and its compute worker do not agree on what is held",
            fix="start hetpeer again; if it stays, report it with what -vv prints",
        )


class NotFiniteError(LocalError):
    """A tensor holds NaN or infinity and goes no further (I6). Nothing was changed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "HP-NUM-001",
            f"{what} is not finite",
            why="training diverges, or a peer sent bad numbers",
            fix="if the run stops of it, make it again with a lower learning rate",
        )


class Staging:
    """Reads and writes tensors in the shared memory for one lane. `where` names them in errors."""

    def __init__(self, memory: SharedMemory, copier: Copier) -> None:
        self._memory = memory
        self._copier = copier

    def read(
        self, where: str, specs: Mapping[str, TensorSpec], extents: Mapping[str, Extent]
    ) -> dict[str, torch.Tensor]:
        """The tensors of `specs`, on the device. Raises CommandError if names or sizes differ."""
        return {name: self._copier.up(place) for name, place in self._places(where, specs, extents).items()}

    def write(
        self,
        where: str,
        specs: Mapping[str, TensorSpec],
        extents: Mapping[str, Extent],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy `tensors` into their extents. Raises CommandError, NotFiniteError before anything
        is written.
        """
        places = self._places(where, specs, extents)
        refuse_not_finite(where, tensors)
        for name, place in places.items():
            self._copier.down(tensors[name].detach(), place)

    def floats(self, extent: Extent, elements: int) -> torch.Tensor:
        """The first `elements` float32 values of an extent, in the arena itself. Raises CommandError if it is
        shorter.
        """
        if elements * FLOAT32_BYTES > extent.nbytes:
            raise CommandError(f"an extent of {extent.nbytes} bytes does not hold {elements} float32 values")
        return _tensor(self._memory.view(extent)[: elements * FLOAT32_BYTES], torch.float32)

    def flat(self, dtype: str, extent: Extent) -> torch.Tensor:
        """An extent as a 1-D tensor in the arena itself. Raises CommandError if the size does not fit the
        dtype.
        """
        view, kind = self._memory.view(extent), SYMBOLS["dtype"].get(dtype)
        if not isinstance(kind, torch.dtype) or len(view) % kind.itemsize:
            raise CommandError(f"an extent of {len(view)} bytes is no tensor of {dtype}")
        return _tensor(view, kind)

    def up(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the arena, on the device."""
        return self._copier.up(tensor)

    def down(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a tensor on the device to a place in the arena."""
        self._copier.down(tensor, place)

    def raw(self, extent: Extent) -> memoryview:
        """The extent's bytes in the arena."""
        return self._memory.view(extent)

    def _places(
        self, where: str, specs: Mapping[str, TensorSpec], extents: Mapping[str, Extent]
    ) -> dict[str, torch.Tensor]:
        if different := specs.keys() ^ extents.keys():
            raise CommandError(f"{where}: {min(different)!r} is only in the command or only in the graph")
        places = {}
        for name, spec in specs.items():
            view = self._memory.view(extents[name])
            if len(view) != spec.nbytes:
                raise CommandError(
                    f"{where}: {name!r} takes {spec.nbytes} bytes and its extent has {len(view)}"
                )
            places[name] = _tensor(view, SYMBOLS["dtype"][spec.dtype]).view(spec.sizes)
        return places


def refuse_not_finite(where: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise NotFiniteError for the first tensor with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor.detach()):
            raise NotFiniteError(f"{where}: {name!r}")


def _tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(view, dtype=dtype) if len(view) else torch.empty(0, dtype=dtype)
