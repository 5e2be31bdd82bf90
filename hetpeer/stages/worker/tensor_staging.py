"""Tensors between the arena and the device: names, shapes and dtypes from the graph, bytes from an extent.

On a CPU a tensor that is read *is* the arena's memory; on a GPU it is a copy. A GPU copies asynchronously
only from and to pinned memory, and pinning the arena would fill all of it with real memory. So each lane (a
thread of the worker, worker_loop.py) has two pinned buffers: one is copied while the other is filled. Each
lane has a CUDA stream of its own, so reading, writing and encoding do not wait for a microbatch's kernels.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block.exact_numerics import first_not_finite
from hetpeer.stages.graph.block_spec import TensorSpec
from hetpeer.stages.graph.interpreter import SYMBOLS
from hetpeer.stages.ipc.arena import Extent, SharedMemory
from hetpeer.stages.ipc.worker_messages import Command, Result
from hetpeer.stages.links.value_codec import values_at

BUFFER_BYTES = 4 << 20
"""Bytes of each of a lane's two pinned buffers: a third of a millisecond on PCIe 4.0."""

Execute = Callable[[Command[Any]], Result]


class Copier:
    """Copies tensors between the arena and a CPU: a tensor that is read *is* the arena's memory."""

    @classmethod
    def of(cls, device: torch.device) -> Copier:
        """The copier for a lane on `device`; each lane has its own."""
        return PinnedCopier(device) if device.type == "cuda" else cls()

    def up(self, tensor: Tensor) -> Tensor:
        """`tensor`, contiguous in the arena, on the device; on a CPU the arena's memory itself."""
        return tensor

    def down(self, tensor: Tensor, place: Tensor) -> None:
        """Copy `tensor` to `place`, contiguous in the arena, of the same shape and dtype; done on return."""
        place.copy_(tensor)

    def add(self, tensor: Tensor, place: Tensor) -> None:
        """Add `tensor`, on the device, to `place` in main memory, contiguous; done on return."""
        place.add_(tensor)

    def put(self, tensor: Tensor, place: Tensor) -> None:
        """Copy `tensor`, contiguous in main memory, to `place` on the device. It may change afterwards."""
        place.copy_(tensor)

    def lane(self, execute: Execute) -> Execute:
        """`execute` as this lane runs it."""
        return execute


class PinnedCopier(Copier):
    """The copier of a GPU, for one thread; it copies in the thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._free = [_event() for _ in self._buffers]

    def up(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the GPU, through the pinned buffers; the arena may change afterwards."""
        found = torch.empty_like(tensor, device=self._device)
        self.put(tensor, found)
        return found

    def put(self, tensor: Tensor, place: Tensor) -> None:
        for turn, (source, target) in enumerate(_pieces(tensor, place)):
            buffer, free = self._turn(turn, source)
            buffer.copy_(source)
            target.copy_(buffer, non_blocking=True)
            free.record()

    def down(self, tensor: Tensor, place: Tensor) -> None:
        """Copy to `place` through the pinned buffers; complete on return."""
        for buffer, target in self._landed(tensor, place):
            target.copy_(buffer)

    def add(self, tensor: Tensor, place: Tensor) -> None:
        """Add each piece to `place` where it lands; complete on return."""
        for buffer, target in self._landed(tensor, place):
            target.add_(buffer)

    def _landed(self, tensor: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece of `tensor` in main memory, and its target; the next one is on its way meanwhile."""
        arriving: collections.deque[tuple[int, Tensor, Tensor]] = collections.deque()

        def first() -> tuple[Tensor, Tensor]:
            turn, source, target = arriving.popleft()
            return self._turn(turn, source)[0], target

        for turn, (source, target) in enumerate(_pieces(tensor.contiguous(), place)):
            buffer, free = self._turn(turn, source)
            buffer.copy_(source, non_blocking=True)
            free.record()
            arriving.append((turn, source, target))
            if len(arriving) == len(self._buffers):
                yield first()
        while arriving:
            yield first()

    def lane(self, execute: Execute) -> Execute:
        """`execute` on the lane's own stream."""

        def on_stream(command: Command[Any]) -> Result:
            with torch.cuda.stream(self._stream):
                return execute(command)

        return on_stream

    def _turn(self, turn: int, piece: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """The buffer for `piece`, number `turn`, and its event, once the last copy through it is complete."""
        free = self._free[turn % len(self._free)]
        free.synchronize()
        return self._buffers[turn % len(self._buffers)][: piece.nbytes].view(piece.dtype), free


def _event() -> torch.cuda.Event:
    """An event; one that was never recorded counts as complete."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _pieces(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The elements of both, of one number, in pieces of `source` that fit into a buffer."""
    if not source.numel():
        return []
    size = BUFFER_BYTES // source.element_size()
    parts = (tensor.detach().view(-1) for tensor in (source, target))
    return list(zip(*(torch.split(part, size) for part in parts), strict=True))


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
        self.copier = copier

    def read(
        self, where: str, specs: Mapping[str, TensorSpec], extents: Mapping[str, Extent]
    ) -> dict[str, torch.Tensor]:
        """The tensors of `specs`, on the device. Raises CommandError if names or sizes differ."""
        return {name: self.copier.up(place) for name, place in self._places(where, specs, extents).items()}

    def read_finite(
        self, where: str, specs: Mapping[str, TensorSpec], extents: Mapping[str, Extent]
    ) -> dict[str, torch.Tensor]:
        """As `read`; also raises NotFiniteError. They are looked at in the arena: no device is waited for."""
        places = self._places(where, specs, extents)
        refuse_not_finite({where: places})
        return {name: self.copier.up(place) for name, place in places.items()}

    def write(
        self,
        where: str,
        specs: Mapping[str, TensorSpec],
        extents: Mapping[str, Extent],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy `tensors` into their extents; the caller has looked at them. Raises CommandError, writing
        nothing.
        """
        for name, place in self._places(where, specs, extents).items():
            self.copier.down(tensors[name].detach(), place)

    def floats(self, extent: Extent, elements: int) -> torch.Tensor:
        """The first `elements` float32 values of an extent, in the arena. CommandError if it is shorter."""
        if elements * FLOAT32_BYTES > extent.nbytes:
            raise CommandError(f"an extent of {extent.nbytes} bytes does not hold {elements} float32 values")
        return values_at(self._memory.view(extent)[: elements * FLOAT32_BYTES], torch.float32)

    def flat(self, dtype: str, extent: Extent) -> torch.Tensor:
        """An extent as a 1-D tensor in the arena. Raises CommandError if the size does not fit the dtype."""
        view, kind = self._memory.view(extent), SYMBOLS["dtype"].get(dtype)
        if not isinstance(kind, torch.dtype) or len(view) % kind.itemsize:
            raise CommandError(f"an extent of {len(view)} bytes is no tensor of {dtype}")
        return values_at(view, kind)

    def up(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the arena, on the device."""
        return self.copier.up(tensor)

    def down(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        """Copy a tensor on the device to a place in the arena."""
        self.copier.down(tensor, place)

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
            places[name] = values_at(view, SYMBOLS["dtype"][spec.dtype]).view(spec.sizes)
        return places


def refuse_not_finite(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raise NotFiniteError for the first tensor with a NaN or an infinity. A device is waited for once.

    `groups`: where tensors are, in words → tensors by name.
    """
    named = [
        (where, name, tensor)
        for where, tensors in groups.items()
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    ]
    bad = first_not_finite(
        [
            tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001 (coalescing would add them up)
            for _, _, tensor in named
        ]
    )
    if bad is not None:
        where, name, _ = named[bad]
        raise NotFiniteError(f"{where}: {name!r}")
