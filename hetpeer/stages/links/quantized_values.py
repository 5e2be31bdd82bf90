"""Values as steps of 8 or 4 bits, with a scale for each group."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from hetpeer.stages.links.value_codec import ValueCodec, values_at

if TYPE_CHECKING:
    from torch import Tensor


class QuantizedValues(ValueCodec):
    """Scales (bfloat16, one for each group), then the steps of all values.

    Most steps are small: their entropy is 3.5 of 4 bits, or 7.4 of 8, for normal values, and less for others.
    """

    squeezable = True
    group: ClassVar[int]
    """Values that share a scale; fewer for fewer bits."""
    steps: ClassVar[int]
    """Steps of a group's largest value."""

    @abstractmethod
    def step_bytes(self, count: int) -> int:
        """Bytes of the steps of `count` values."""

    @abstractmethod
    def pack(self, steps: Tensor) -> Tensor:
        """int8 steps, an even number of them, as bytes."""

    @abstractmethod
    def unpack(self, data: Tensor) -> Tensor:
        """int8 steps from such bytes; there may be one more than was packed."""

    def nbytes(self, count: int) -> int:
        return 2 * -(-count // self.group) + self.step_bytes(count)

    def encode(self, flat: Tensor, target: memoryview) -> None:
        import torch

        groups = -(-len(flat) // self.group)
        missing = groups * self.group - len(flat)
        padded = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
        table = padded.view(groups, self.group)
        # Not divided by `steps`: a GPU multiplies by the reciprocal anyway, and both must write the same
        # bytes.
        scales = _rounded_up(table.abs().amax(1) * (1 / self.steps))
        inverse = torch.where(scales > 0, 1 / scales, 0.0).nan_to_num(posinf=0.0)
        steps = (table * inverse[:, None]).round_().clamp_(-self.steps, self.steps).to(torch.int8).view(-1)
        values_at(target[: 2 * groups], torch.bfloat16).copy_(scales)
        place = values_at(target[2 * groups :], torch.int8)
        place.copy_(self.pack(steps)[: len(place)])

    def decode(self, data: memoryview, count: int) -> Tensor:
        import torch

        group = self.group
        groups = -(-count // group)
        scales = values_at(data[: 2 * groups], torch.bfloat16).float()
        steps = self.unpack(values_at(data[2 * groups :], torch.int8))[:count]
        full = count // group * group
        found = torch.empty(count)
        torch.mul(
            steps[:full].view(-1, group), scales[: full // group, None], out=found[:full].view(-1, group)
        )
        if full < count:
            torch.mul(steps[full:], scales[-1], out=found[full:])
        return found


class INT8(QuantizedValues):
    """A byte for each value, a scale for 256."""

    name = "int8"
    tolerance = 0.2
    gentler = ("bf16",)
    group, steps = 256, 127

    def step_bytes(self, count: int) -> int:
        return count

    def pack(self, steps: Tensor) -> Tensor:
        return steps

    def unpack(self, data: Tensor) -> Tensor:
        return data


class INT4(QuantizedValues):
    """Half a byte for each value, a scale for 64. Steps are so coarse that equal work sends other bundles."""

    name = "int4"
    tolerance = 0.5
    gentler = ("bf16", "int8")
    repeatable = False
    group, steps = 64, 7

    def step_bytes(self, count: int) -> int:
        return -(-count // 2)

    def pack(self, steps: Tensor) -> Tensor:
        """Two steps in a byte, the first in its lower half."""
        return (steps[0::2] & 0x0F) | (steps[1::2] << 4)

    def unpack(self, data: Tensor) -> Tensor:
        import torch

        return torch.stack([(data << 4) >> 4, data >> 4], dim=1).view(-1)


def _rounded_up(scales: Tensor) -> Tensor:
    """Round up to a bfloat16, so that no value is beyond the last step."""
    import torch

    bits = scales.view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)
