"""The sums of a reduce in the order in which they come, each put or added where it belongs in its block."""

from __future__ import annotations

from typing import Final

import numpy as np

from hetpeer.averaging import effects as e
from hetpeer.peer.training.landed_vector import LandedVector
from hetpeer.peer.transport.tensor_schema import FLOAT_BYTES, TensorSchema
from hetpeer.peer.transport.tensor_store import Tensor, TensorStore
from hetpeer.stages.ipc.arena import Extent

PAIR: Final = 2
"""Uses of a parameter that may be added in any order."""


class LandedSums:
    """Vectors of the blocks of one place, in the arena that `store` keeps."""

    def __init__(self, store: TensorStore, schema: TensorSchema) -> None:
        self._store = store
        self._schema = schema
        self._landing: dict[tuple[e.StepId, int, int], Extent] = {}
        """Step, plan, block → where its sums land."""
        self._adding: dict[tuple[e.StepId, int, int], tuple[Tensor, LandedVector]] = {}
        """Step, plan, block → where its sums and those of tied parameters land."""

    def land(self, step: e.StepId, work: e.Land) -> None:
        """Move a sum to its place in the block's vector, for which there is room from the first sum on."""
        shard = work.shard
        assert isinstance(work.handle, Tensor)
        if not (work.closely or self._is_kept_apart(shard.block)):
            self._add_up(step, shard, work.handle)
            return
        if (shard.begin, shard.end) == (work.begin, work.end):
            return  # it is all of the vector
        key, room = (step, shard.plan, shard.block), None
        if key not in self._landing:
            room = self._store.new_sum(step, (work.end - work.begin) * FLOAT_BYTES)
            self._landing[key] = room.extent
        self._store.land(work.handle, self._landing[key], (shard.begin - work.begin) * FLOAT_BYTES)
        if room is not None:
            self._store.release(room)  # it belongs to those that have landed in it

    def _is_kept_apart(self, block: int) -> bool:
        """Whether sums of `block` are not added to others before all have come.

        They are not if they may be asked for, or if the order of several additions counts. Those of a block
        without tied parameters are added to nothing.
        """
        ties = self._schema.ties.of(block)
        return not ties or self._schema.trust.spot_checks > 0 or any(len(uses) > PAIR for _, uses in ties)

    def _add_up(self, step: e.StepId, shard: e.Shard, tensor: Tensor) -> None:
        """Add a sum to the vectors of ours that it counts for: of its block, and of those tied to it."""
        values = np.frombuffer(self._store.view(tensor), np.float32)
        own = [(shard.block, shard.begin, values)] if self._schema.holds(shard.block) else []
        for use, uses in self._schema.ties.of(shard.block):
            first, last = max(use.begin, shard.begin), min(use.end, shard.end)
            own += [
                (
                    other.block,
                    other.begin + first - use.begin,
                    values[first - shard.begin : last - shard.begin],
                )
                for other in uses
                if other != use and first < last and self._schema.holds(other.block)
            ]
        for block, begin, piece in own:
            self._vector(step, shard.plan, block)[1].add(begin, piece)
        if own:
            block, begin, piece = own[0]
            room, _ = self._vector(step, shard.plan, block)
            place = Extent(room.extent.offset + begin * FLOAT_BYTES, len(piece) * FLOAT_BYTES)
            self._store.settle(tensor, room.extent, place)
            self._store.release(room)  # it belongs to those that have landed in it

    def _vector(self, step: e.StepId, plan: int, block: int) -> tuple[Tensor, LandedVector]:
        """Where the sum of `block` lands under `plan`."""
        key = (step, plan, block)
        if key not in self._adding:
            room = self._store.new_sum(step, self._schema.elements(block) * FLOAT_BYTES)
            self._adding[key] = room, LandedVector(np.frombuffer(self._store.view(room), np.float32))
        return self._adding[key]

    def has_added(self, step: e.StepId, plan: int, block: int) -> bool:
        """Whether the sum of `block` has those of its tied parameters in it; it is forgotten."""
        return self._adding.pop((step, plan, block), None) is not None

    def end_step(self, step: e.StepId) -> None:
        """Forget `step`; what has landed is freed by the store."""
        self._landing = {key: extent for key, extent in self._landing.items() if key[0] != step}
        self._adding = {key: vector for key, vector in self._adding.items() if key[0] != step}
