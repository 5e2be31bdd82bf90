"""Copies between the arena and a device: none on a CPU; a CUDA stream and pinned buffers for each lane on a
GPU.

Pinning the arena would fill all of it with real memory, and from pageable memory a GPU copies only
synchronously. So a lane has two pinned buffers, one copied while the other is filled. Its own stream keeps
reading, writing and encoding for a link from queueing behind the kernels of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetpeer.stages.ipc.worker_messages import Command, Result

BUFFER_BYTES = 4 << 20
"""Bytes of each of a lane's two pinned buffers: a third of a millisecond on PCIe 4.0."""

Execute = Callable[[Command[Any]], Result]


class Copier:
    """The copier of a CPU: a tensor that is read *is* the arena's memory."""

    @classmethod
    def of(cls, device: torch.device) -> Copier:
        """The copier for a lane on `device`; each lane has its own."""
        return PinnedCopier(device) if device.type == "cuda" else cls()

    def up(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor in main memory, on the device. If copied, it may be changed when
        this returns.
        """
        return tensor

    def down(self, tensor: Tensor, place: Tensor) -> None:
        """Copy to `place`, a contiguous tensor of the same shape and dtype in main memory; complete on
        return.
        """
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
        """A copy on the GPU, through the pinned buffers."""
        found = torch.empty_like(tensor, device=self._device)
        for turn, (source, target) in enumerate(_pieces(tensor, found)):
            buffer, free = self._turn(turn)
            buffer[: len(source)].copy_(source)
            target.copy_(buffer[: len(source)], non_blocking=True)
            free.record()
        return found

    def down(self, tensor: Tensor, place: Tensor) -> None:
        """Copy to `place` through the pinned buffers; complete on return."""
        arriving: list[tuple[int, Tensor]] = []
        for turn, (source, target) in enumerate(_pieces(tensor.contiguous(), place)):
            buffer, free = self._turn(turn)
            buffer[: len(source)].copy_(source, non_blocking=True)
            free.record()
            arriving.append((turn, target))
            if len(arriving) == len(self._buffers):
                self._land(*arriving.pop(0))
        for one in arriving:
            self._land(*one)

    def lane(self, execute: Execute) -> Execute:
        """`execute` on the lane's own stream."""

        def on_stream(command: Command[Any]) -> Result:
            with torch.cuda.stream(self._stream):
                return execute(command)

        return on_stream

    def _turn(self, turn: int) -> tuple[Tensor, torch.cuda.Event]:
        """The buffer and event for piece number `turn`, once the last copy through it is complete."""
        free = self._free[turn % len(self._free)]
        free.synchronize()
        return self._buffers[turn % len(self._buffers)], free

    def _land(self, turn: int, target: Tensor) -> None:
        buffer, _ = self._turn(turn)
        target.copy_(buffer[: len(target)])


def _event() -> torch.cuda.Event:
    """An event; one that was never recorded counts as complete."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _pieces(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The bytes of both in pieces that fit into a buffer."""
    if not source.numel():
        return []
    parts = (tensor.detach().view(-1).view(torch.uint8) for tensor in (source, target))
    return list(zip(*(torch.split(part, BUFFER_BYTES) for part in parts), strict=True))
