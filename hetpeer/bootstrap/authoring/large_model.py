"""Parameters of a model that is larger than memory, in a nameless file among the temporary files.

An author's machine makes a model's first parameters before anybody else has a part of it. What does not fit
into half of the free memory lies in a file that is mapped: the system reads and writes what is in use. The
numbers are the same.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.file_pieces import OpenFile
from hetpeer.stages.block.device import survey

LEAST_BYTES = 16 << 20
"""Smaller tensors are in memory."""
PLAIN = frozenset({"dtype", "device", "requires_grad"})
"""Arguments of `torch.empty` besides the size with which a tensor may lie in a file."""


class LargeTensorsInFiles(TorchFunctionMode):
    """While active, `torch.empty` makes large tensors in files once `memory_bytes` are used up by others.

    torch's layers make their parameters with it. `memory_bytes` None: half of the free memory. Raises
    `LocalError` HP-DISK-002 if the disk has no room.

        with LargeTensorsInFiles():
            model = build()
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        super().__init__()
        self._left = survey().ram_free_bytes // 2 if memory_bytes is None else memory_bytes
        self._folder = Path(tempfile.gettempdir())

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
                    made = _in_file(self._folder, size, dtype)
                    return made.requires_grad_(bool(kwargs.get("requires_grad")))
        return function(*args, **kwargs)


def _in_file(folder: Path, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of undefined content, mapped from a file that ends with it."""
    count = math.prod(size)
    with disk_errors(folder):
        file = OpenFile.nameless(folder)
        os.posix_fallocate(file.descriptor, 0, count * dtype.itemsize)
    name = f"/proc/self/fd/{file.descriptor}"
    return torch.from_file(name, shared=True, size=count, dtype=dtype).view(tuple(size))
