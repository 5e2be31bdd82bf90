"""Division of a place among the devices of a volunteer: each has some consecutive blocks, its segment. Pure.

division = Division(begin=4, ends=(7, 9))  # blocks 4 to 6 on the first device, 7 and 8 on the second
division.device_of(7)  # 1
division.segments(5, 9)  # ((5, 7), (7, 9))
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Division:
    """The place from block `begin` on: device d has the blocks up to `ends[d]` that no device before it has.

    `ends` ascend. A device may have no block at all.
    """

    begin: int
    ends: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices, also of those without a block."""
        return len(self.ends)

    @property
    def at_work(self) -> int:
        """Number of devices that have blocks."""
        return sum(begin < end for begin, end in pairwise((self.begin, *self.ends)))

    def device_of(self, block: int) -> int:
        """Index of the device that has `block`; of a block outside the place, that of the nearest block."""
        return next((device for device, end in enumerate(self.ends) if block < end), self.devices - 1)

    def segments(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """The blocks [begin, end) of the place as one range for each device that has any, in order."""
        borders = sorted({begin, end, *(border for border in self.ends if begin < border < end)})
        return tuple(pairwise(borders))
