"""A model that is larger than memory, on its author's machine (docs/memory.md).

The author's machine makes a model's first parameters before anybody else has a part of it. What does not fit
into a quarter of the free memory lies in nameless files that are mapped: the system reads and writes what is
in use. So may what a forward keeps for its backward. The numbers are the same. Once the run has a block's
state in a file, the parameters are read from there, and are not on the disk twice.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetpeer.bootstrap.run.durable_files import disk_errors, leave_room
from hetpeer.dht.base.file_pieces import FilePart, OpenFile
from hetpeer.stages.block.device import survey
from hetpeer.stages.block.tensor_file import read_tensors

LEAST_BYTES = 16 << 20
"""Smaller parameters are in memory."""
LEAST_KEPT = 1 << 20
"""Smaller tensors that a backward needs are in memory."""
SPARE = 8
"""The disk must have room for this fraction of the parameters besides: the state that is written first."""
PLAIN = frozenset({"dtype", "device", "requires_grad"})
"""Arguments of `torch.empty` besides the size with which a tensor may lie in a file."""


class LargeTensorsInFiles(TorchFunctionMode):
    """While active, `torch.empty` makes large tensors in files once `memory_bytes` are used up by others.

    torch's layers make their parameters with it. The files lie in `folder`; None: among the temporary files.
    `memory_bytes` None: a quarter of the free memory. `planned` builds the model without weights: before the
    first file it says how much the disk has to hold. Raises `LocalError` HP-DISK-002 if it has no such room.

        with LargeTensorsInFiles():
            model = build()
    """

    def __init__(
        self,
        folder: Path | None = None,
        memory_bytes: int | None = None,
        planned: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self._left = survey().ram_free_bytes // 4 if memory_bytes is None else memory_bytes
        self._folder = folder or Path(tempfile.gettempdir())
        self._planned = planned

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.keys() <= PLAIN and torch.get_default_device().type == "cpu":
            device, dtype = kwargs.get("device"), kwargs.get("dtype") or torch.get_default_dtype()
            size = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)
            nbytes = math.prod(size) * dtype.itemsize
            if torch.device(device or "cpu").type == "cpu" and nbytes >= LEAST_BYTES:
                self._left -= nbytes
                if self._left < 0:
                    self._check_room()
                    made = _in_file(self._folder, size, dtype)
                    return made.requires_grad_(bool(kwargs.get("requires_grad")))
        return function(*args, **kwargs)

    def _check_room(self) -> None:
        """Before the first file, compare the disk with the whole model."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        try:
            with torch.random.fork_rng(devices=()), torch.device("meta"):
                model = planned()
            needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        except Exception:  # noqa: BLE001 - the author's code may not work without weights: its size is unknown
            return
        leave_room(self._folder, needed + needed // SPARE)


@contextmanager
def kept_in_files(model: nn.Module, folder: Path, memory_bytes: int) -> Iterator[None]:
    """Context of a forward: what its backward needs lies in files in `folder` beyond `memory_bytes`.

    Parameters and buffers stay where they are. Raises `LocalError` HP-DISK-002.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    left = memory_bytes

    def pack(tensor: Tensor) -> Tensor:
        nonlocal left
        if tensor.nbytes < LEAST_KEPT or tensor.untyped_storage().data_ptr() in own:
            return tensor
        left -= tensor.nbytes
        if left >= 0:
            return tensor
        with torch.no_grad():
            return _in_file(folder, tensor.shape, tensor.dtype).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def lies_in_file(tensor: Tensor) -> bool:
    """Whether a tensor is mapped from a nameless file."""
    return tensor.untyped_storage().filename is not None


def read_from(path: Path, tensors: Mapping[str, Sequence[Tensor]]) -> None:
    """Map `tensors`, by their names in the safetensors file `path`, from there; nobody may change them then.

    Where they were before is free once nobody else has them. Raises OSError.
    """
    with path.open("rb") as file:
        whole = np.memmap(file, dtype=np.uint8, mode="r")
    stored, _ = read_tensors(FilePart.whole(path), path.name)
    for name, same in tensors.items():
        one = stored[name]
        content = whole[one.begin : one.begin + one.nbytes]
        for tensor in same:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it cannot be written: nobody does
                there = torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)
                tensor.set_(there)  # type: ignore[call-overload]


def _in_file(folder: Path, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of undefined content, mapped from a file that ends with it."""
    count = math.prod(size)
    with disk_errors(folder, count * dtype.itemsize):
        file = OpenFile.nameless(folder)
        os.posix_fallocate(file.descriptor, 0, count * dtype.itemsize)
    name = f"/proc/self/fd/{file.descriptor}"
    return torch.from_file(name, shared=True, size=count, dtype=dtype).view(tuple(size))
