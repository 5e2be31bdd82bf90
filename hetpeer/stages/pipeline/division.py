"""Division of a place among the devices of a volunteer: each has some consecutive blocks, its segment. Pure.

division = Division(begin=4, ends=(7, 9))  # blocks 4 to 6 on the first device, 7 and 8 on the second
division.device_of(7)  # 1
division.segments(5, 9)  # ((5, 7), (7, 9))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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


def divide(
    begin: int, sizes: Sequence[int], flops: Sequence[float], rooms: Sequence[int], speeds: Sequence[float]
) -> Division | None:
    """The division of the blocks from `begin` on whose slowest device is fastest; None if none fits.

    `sizes` and `flops` of each block, in bytes and FLOPs of a microbatch; `rooms` in bytes and `speeds` in
    FLOP/s of each device. Of equally fast divisions the one with the most blocks on the last devices.

        divide(0, [2, 2, 2], [1.0, 1.0, 1.0], rooms=[6, 6], speeds=[2.0, 1.0])  # ends (2, 3)
    """
    count = len(sizes)
    filled, worked = [0, *accumulate(sizes)], [0.0, *accumulate(flops)]
    best = [0.0] + [math.inf] * count
    # seconds of the slowest of the devices so far, if these have so many blocks
    chosen: list[list[int]] = []
    for room, speed in zip(rooms, speeds, strict=True):
        then, first = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(count + 1):
            for start in range(end + 1):
                if filled[end] - filled[start] <= room:
                    seconds = max(best[start], (worked[end] - worked[start]) / max(speed, 1.0))
                    if seconds < then[end]:
                        then[end], first[end] = seconds, start
        best = then
        chosen.append(first)
    if best[count] == math.inf:
        return None
    ends, end = [], count
    for first in reversed(chosen):
        ends.append(begin + end)
        end = first[end]
    return Division(begin, tuple(reversed(ends)))


def sure_room(rooms: Sequence[int], largest: int) -> int:
    """Bytes such that any place of so many bytes can be divided, if no block has more than `largest`.

    Filled one after another, each device but the last may leave less than a block's bytes free. One device
    alone has its room in any case.
    """
    return max(sum(rooms) - (len(rooms) - 1) * largest, *rooms)
