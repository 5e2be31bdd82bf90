"""A place on the devices of this machine: kind of offload, division, and room for microbatches. Pure.

Devices with memory of their own each have room for their segment alone. Workers on the processor share one
memory. Where GPUs and the processor work side by side, the processor's part of main memory counts as that of
one more device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpeer.peer.training.volunteer_figures import Offer
from hetpeer.peer.transport.tensor_schema import microbatches_in, recomputing
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.pipeline.division import Division, divide
from hetpeer.stages.pipeline.place_memory import Choice, Offered, PlaceDemand, Room, choices


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlocks:
    """Blocks as they are held, what they take without microbatches, and how many of these fit beside."""

    specs: list[BlockSpec]
    room: Room
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOnDevices:
    """Where the blocks of a place lie, `demands` of each of them."""

    demands: Sequence[PlaceDemand]
    choice: Choice
    division: Division
    fits: bool
    """Whether each device has room for its segment."""

    @classmethod
    def of(
        cls, begin: int, demands: Sequence[PlaceDemand], flops: Sequence[float], offer: Offer
    ) -> PlaceOnDevices:
        """The place from block `begin` on, with the first kind of offload for which it can be divided.

        If there is none: with the kind that lacks the fewest bytes, divided by speed alone.
        """
        tried = [(choice, sizes) for choice, sizes in choices(demands, offer.memory)]
        for choice, sizes in tried:
            division = divide(begin, sizes, flops, offer.rooms_of_devices, offer.speeds_of_devices)
            missing = choice.missing.host + choice.missing.disk
            if not offer.memory.apart:  # one memory for all
                missing += choice.missing.device
            if division is not None and not missing:
                return cls(demands=demands, choice=choice, division=division, fits=True)
        choice, sizes = min(tried, key=lambda one: one[0].missing.total)
        endless = [sum(sizes)] * len(offer.rooms_of_devices)
        division = divide(begin, sizes, flops, endless, offer.speeds_of_devices)
        assert division is not None
        return cls(demands=demands, choice=choice, division=division, fits=False)

    def held(self, specs: Sequence[BlockSpec], microbatches: int, offer: Offer) -> HeldBlocks:
        """The blocks as they are held so that so many microbatches can be under way, the cheapest recomputing
        (recomputed_blocks.py).
        """
        held: list[BlockSpec] = []
        most, device = [], 0
        for offered, room, segments in self._memories(specs, offer):
            some, beside = recomputing(offered, room, segments, microbatches)
            most.append(microbatches_in(offered, beside, _cut(some, [len(one) for one in segments])))
            held += some
            device += beside.device
        room = replace(self.choice.room, device=device, host=self.choice.room.host + offer.beside_gpus)
        return HeldBlocks(specs=held, room=room, most=min(most))

    def _memories(
        self, specs: Sequence[BlockSpec], offer: Offer
    ) -> list[tuple[Offered, Room, list[Sequence[BlockSpec]]]]:
        """Each memory with blocks in it: what is offered of it, what they take without microbatches, and the
        segments.
        """
        begin = self.division.begin
        ranges = self.division.segments(begin, begin + len(specs))
        if not offer.memory.apart:
            segments = [specs[one - begin : end - begin] for one, end in ranges]
            return [(offer.memory, self._room(self.demands, offer), segments)]
        found = []
        for one, end in ranges:
            here = slice(one - begin, end - begin)
            offered = replace(offer.memory, device=offer.rooms_of_devices[self.division.device_of(one)])
            found.append((offered, self._room(self.demands[here], offer), [specs[here]]))
        return found

    def _room(self, demands: Sequence[PlaceDemand], offer: Offer) -> Room:
        """Room of blocks without microbatches."""
        apart, kind = offer.memory.apart, self.choice.kind
        whole = PlaceDemand.of_all(demands)
        room = whole.room(kind, apart=apart, spills=self.choice.spills)
        return replace(room, device=room.device - whole.active(kind, apart=apart))


def _cut(specs: Sequence[BlockSpec], lengths: Sequence[int]) -> list[Sequence[BlockSpec]]:
    found, begin = [], 0
    for length in lengths:
        found.append(specs[begin : begin + length])
        begin += length
    return found
