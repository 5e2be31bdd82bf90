"""Sizes and layouts of a place's tensors: everything that is checked before a byte of a peer's tensor is
taken.

For the head of a tensor: whether it is due here, the layout of its payload, the pool of grants that it
belongs to, and the bytes that it takes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hetpeer.averaging.member.tensor_heads import ActivationHead, GradientHead, Head, ShardHead
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.dht.streams.flow_control import Pool
from hetpeer.peer.transport.uplink import ACTIVATIONS, GRADIENTS, SHARDS, PoolNumbers
from hetpeer.stages.graph.block_spec import ITEM_BYTES, BlockSpec
from hetpeer.stages.ipc.arena import BundleLayout
from hetpeer.stages.pipeline.place_memory import Offered, Room
from hetpeer.stages.pipeline.recomputed_blocks import BlockActivations, recomputed_blocks
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.schedule_1f1b import blocks_left

FLOAT_BYTES = ITEM_BYTES["float32"]
"""Bytes of a number that is reduced: float32."""
BUNDLES = 1 / 8
MOST_BUNDLES = 256 << 20
"""Share of the main memory for a model that no place gets, and most bytes of it. It is for bundles, so that
few are written to the disk.
"""


def recomputing(
    offered: Offered, room: Room, segments: Sequence[Sequence[BlockSpec]], microbatches: int
) -> tuple[list[BlockSpec], Room]:
    """The blocks as they are held so that so many microbatches fit beside `room`: the cheapest of them
    recompute. And `room` with the activations that one of them makes again.

    `segments` of consecutive blocks share one memory; between them, bundles pass.
    """
    specs = [spec for segment in segments for spec in segment]
    blocks = [BlockActivations.of(spec) for spec in specs]
    crossing = sum(_crossing(offered, segment) for segment in segments)
    free = offered.device - room.device - microbatches * crossing
    chosen = recomputed_blocks(blocks, free, microbatches)
    held = [spec.recomputing() if spec.index in chosen else spec for spec in specs]
    again = max((one.saved for one in blocks if one.block in chosen), default=0)
    return held, replace(room, device=room.device + again)


def microbatches_in(offered: Offered, room: Room, segments: Sequence[Sequence[BlockSpec]]) -> int:
    """Microbatches of `segments` of consecutive blocks that fit beside `room` between forward and backward.

    The segments share one memory. `room`: what the place takes without microbatches. A microbatch takes what
    autograd keeps, and the bundles that enter and leave, forward and backward; a GPU only has a copy of what
    leaves.
    """
    each = sum(_activations(segment) + _crossing(offered, segment) for segment in segments)
    return max(offered.device - room.device, 0) // max(each, 1)


def bundles_beside(
    ram_bytes: int, room: Room, specs: Sequence[BlockSpec], microbatches: int, *, apart: bool
) -> int:
    """Bytes of main memory for bundles, beside `room` and `microbatches` microbatches.

    At least what one microbatch's bundles take. `apart`: microbatches are in a GPU's memory.
    """
    workers = room.host if apart else room.device + microbatches * _activations(specs)
    return max(ram_bytes - workers, _bundles(specs))


def _activations(specs: Sequence[BlockSpec]) -> int:
    return sum(spec.activation_bytes for spec in specs)


def _crossing(offered: Offered, specs: Sequence[BlockSpec]) -> int:
    """Bytes that one microbatch's bundles take beside its activations, where these are."""
    return _leaving(specs) if offered.apart else _bundles(specs)


def _bundles(specs: Sequence[BlockSpec]) -> int:
    """Bytes of one microbatch's bundles: what enters and leaves, both ways."""
    first = specs[0].at(specs[0].batch)
    return 2 * (sum(tensor.nbytes for tensor in first.inputs.values()) + _leaving(specs))


def _leaving(specs: Sequence[BlockSpec]) -> int:
    """Bytes of what leaves in a forward."""
    last = specs[-1].at(specs[-1].batch)
    return sum(tensor.nbytes for tensor in last.outputs.values())


class TensorSchema:
    """Sizes and layouts for the holder of the blocks `specs`, in order."""

    def __init__(self, specs: Sequence[BlockSpec], manifest: Manifest) -> None:
        self.specs: Mapping[int, BlockSpec] = {spec.index: spec for spec in specs}
        self.training = manifest.training
        self.microbatches = manifest.training.microbatches
        """Training microbatches of a step; higher ids are held-out microbatches."""
        self.seed = manifest.seed
        self.ties = Ties(manifest.ties)
        self.links = manifest.links
        self.trust = manifest.trust
        self.robust = manifest.averaging is not None and manifest.averaging.robust
        self.tolerance = manifest.tolerance
        self.pools = PoolNumbers.of_run(len(manifest.blocks), manifest.training.staleness, manifest.delays)
        self._elements = {block.index: block.vector_count for block in manifest.blocks}
        self._batches: dict[int, int] = {}
        """Microbatch → its samples."""
        self._layouts: dict[tuple[int, bool, int, bool], BundleLayout] = {}

    @property
    def ids(self) -> int:
        """Number of ids of a step: training microbatches, then held-out ones. An id is smaller than this."""
        return self.training.ids

    def batch(self, microbatch: int) -> int:
        """Samples of a microbatch."""
        if microbatch not in self._batches:
            self._batches[microbatch] = self.training.samples_of(microbatch)
        return self._batches[microbatch]

    def input_layout(self, block: int, microbatch: int, *, gradients: bool = False) -> BundleLayout:
        """Layout of the bundle (or of its `gradients`) that enters `block`, which is held here."""
        return self._layout(block, microbatch, entering=True, gradients=gradients)

    def output_layout(self, end: int, microbatch: int, *, gradients: bool = False) -> BundleLayout:
        """Layout of the bundle (or its `gradients`) that leaves our block `end`-1; empty after the loss."""
        return self._layout(end - 1, microbatch, entering=False, gradients=gradients)

    def _layout(self, block: int, microbatch: int, *, entering: bool, gradients: bool) -> BundleLayout:
        """Layout of the bundle that enters or leaves `block`, or of that bundle's `gradients`.

        Cached: a layout depends on the number of samples, not on the id. The loss is no part of a bundle.
        """
        batch = self.batch(microbatch)
        key = (block, entering, batch, gradients)
        if key not in self._layouts:
            spec = self.specs[block]
            specs = spec.inputs if entering else {n: s for n, s in spec.outputs.items() if n != spec.loss}
            fixed = {name: tensor.at(batch) for name, tensor in specs.items()}
            self._layouts[key] = BundleLayout.of(fixed, gradients=gradients)
        return self._layouts[key]

    def shard_layout(self, elements: int) -> BundleLayout:
        """Layout of a piece of a block's vector; without padding, as pieces are joined."""
        nbytes = elements * ITEM_BYTES["float32"]
        return BundleLayout({"shard": (0, nbytes)}, nbytes, {"shard": "float32"})

    def holds(self, block: int) -> bool:
        """Whether `block` is held here."""
        return block in self.specs

    def elements(self, block: int) -> int:
        """Length of a block's vector; also of blocks that are not held here."""
        return self._elements.get(block, 0)

    @property
    def blocks(self) -> int:
        """Number of the model's blocks."""
        return len(self._elements)

    def goes_on(self, route: Route) -> bool:
        """Whether the hops of `route` follow one another without gaps and stay within the model."""
        there = all(hop.begin < hop.end <= self.blocks for hop in route)
        return there and all(one.end == other.begin for one, other in pairwise(route))

    @property
    def observed(self) -> frozenset[int]:
        """Blocks whose results concern us."""
        return frozenset(block for block in self._elements if self.observes(block))

    def observes(self, block: int) -> bool:
        """Whether results of `block` concern us: it is held here, or tied to a block that is."""
        return self.holds(block) or any(self.holds(other) for other in self.ties.partners(block))


def is_due(head: Head, schema: TensorSchema) -> bool:
    """Whether the tensor is about blocks that we hold, or tied to one of them."""
    match head:
        case ActivationHead():
            return schema.holds(head.route[0].begin) and head.route[0].begin > 0
        case GradientHead():
            return schema.holds(head.border - 1)
        case ShardHead():
            concerns = schema.holds if head.kind == "part" else schema.observes
            return concerns(head.block) and head.begin <= head.end <= schema.elements(head.block)


def layout_of(schema: TensorSchema, head: Head) -> BundleLayout:
    """Layout of the decoded payload that arrives with `head`."""
    match head:
        case GradientHead():
            return schema.output_layout(head.border, head.id, gradients=True)
        case ActivationHead():
            return schema.input_layout(head.route[0].begin, head.id)
        case ShardHead():
            return schema.shard_layout(head.end - head.begin)


def kind_of(head: Head) -> Pool:
    """The first pool of grants of a tensor's kind."""
    match head:
        case ActivationHead():
            return ACTIVATIONS
        case GradientHead():
            return GRADIENTS
        case _:
            return SHARDS


def pool_of(head: Head, schema: TensorSchema) -> Pool:
    """The pool of grants that a tensor belongs to."""
    if isinstance(head, ActivationHead):
        return schema.pools.of(blocks_left(head.route), head.step)
    return kind_of(head)


def cost_of(head: Head, nbytes: int, schema: TensorSchema, *, sending: bool) -> int:
    """Bytes that a tensor with a payload of `nbytes` takes at its receiver, room to decode it included."""
    match head:
        case ActivationHead() if head.coded is not None:
            layout = schema.output_layout if sending else schema.input_layout
            return nbytes + layout(head.route[0].begin, head.id).nbytes
        case GradientHead() if head.coded is not None:
            layout = schema.input_layout if sending else schema.output_layout
            return nbytes + layout(head.border, head.id, gradients=True).nbytes
        case ShardHead() if head.coded is not None:
            return nbytes + (head.end - head.begin) * FLOAT_BYTES
        case _:
            return nbytes
