"""Where the vectors of a block lie: the device, main memory and the scratch file (docs/memory.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hetpeer.stages.block.block_state import Numbers, Vector
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.worker.holding.scratch_file import ScratchFile
from hetpeer.stages.worker.holding.stored_vector import InFile, InMemory, StoredVector
from hetpeer.stages.worker.tensor_staging import Copier

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The places for one block's vectors."""

    device: torch.device
    own_memory: bool = False
    """Whether the device has memory of its own, as a GPU has: weights there are copies of others' numbers."""
    offload: Offload = Offload.NONE
    cast: bool = False
    """Whether weights that are copies are kept in bfloat16 where autocast casts them anyway."""
    scratch: ScratchFile | None = None
    """None: everything stays in memory."""
    copier: Copier = field(default_factory=Copier)
    """Carries tensors between the device and main memory."""

    @property
    def apart(self) -> bool:
        """Whether the update runs in other memory than the weights that compute uses."""
        return self.own_memory and self.offload is not Offload.NONE

    @property
    def updating(self) -> torch.device:
        """The device whose processor runs the update, and in whose memory sums are."""
        return CPU if self.apart else self.device

    @property
    def slots(self) -> int | None:
        """Number of slots that may be in memory; None: any."""
        if self.scratch is None:
            return None
        return 1 if self.offload is Offload.DISK else 2

    @property
    def sum_among_slots(self) -> bool:
        """Whether the sum of a reduce, which is in main memory, takes the place of a slot there."""
        return self.apart or not self.own_memory

    def kept(self, numbers: Numbers | None, count: int) -> StoredVector:
        """A copy of `numbers` where what only the update needs lies; None: `count` zeros.

        Raises `LocalError` HP-DISK-007, HP-DISK-008, and as reading the numbers does; nothing is kept then.
        """
        if self.offload is Offload.DISK and self.scratch is not None:
            kept: StoredVector = InFile(self.scratch, count)
        else:
            kept = InMemory(torch.empty(count, device=self.updating))
        try:
            kept.fill(numbers or _Zeros(count))
        except BaseException:
            kept.free()
            raise
        return kept

    def sum_in_memory(self, count: int) -> torch.Tensor:
        """Room for a sum, of undefined content."""
        return torch.empty(count, device=self.updating)

    def land(self, part: torch.Tensor, place: torch.Tensor, *, add: bool) -> None:
        """Copy a gradient, on the device, to its place in a sum, or add it there."""
        if part.is_sparse:
            if not add:
                place.zero_()
            place.index_add_(0, *(tensor.to(place.device) for tensor in summed_rows(part)))
        elif self.apart:
            (self.copier.add if add else self.copier.down)(part, place)
        elif add:
            place.add_(part)
        else:
            place.copy_(part)


@dataclass(frozen=True, slots=True)
class _Zeros:
    """`count` zeros."""

    count: int

    def read(self, begin: int, end: int) -> Vector:
        return np.zeros(end - begin, dtype=np.float32)


def summed_rows(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows in order, their gradients) of a table's sparse gradient, in main memory.

    A row that is named several times is summed in the order of the tokens, as torch's dense backward does it
    on a processor, whatever the device. A row that is not named would have +0.0 added, which changes no bit:
    such sums begin at +0.0 and never come to -0.0.
    """
    indices, values = gradient._indices()[0].cpu(), gradient._values().cpu()  # noqa: SLF001 (coalescing adds up)
    rows, place = torch.unique(indices, return_inverse=True)
    return rows, torch.zeros(len(rows), *values.shape[1:]).index_add_(0, place, values)
