"""Bundles between blocks as links change them, for one machine that computes a run again.

If the settings alone say how a bundle is coded (`LinkSettings.repeats`), everybody who sends it sends the
same bytes, and one machine gets what arrived. Which borders a bundle crossed follows from the holders that
the logs name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetpeer.bootstrap.log.evidence import FoldingOrder
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.graph.block_spec import ITEM_BYTES
from hetpeer.stages.links.adaptive_ratio import AdaptiveRatio
from hetpeer.stages.links.codec import FLOATING, Codec, room
from hetpeer.stages.links.tensor_codecs import decode, encode, kept_of_tensor
from hetpeer.stages.worker.microbatch_tasks import BlockPass

Bundle = Mapping[str, Tensor]


def crossings(orders: Sequence[FoldingOrder], microbatch: int) -> frozenset[int]:
    """Blocks that `microbatch` entered from another peer, by the order of each block's sum.

    >>> order = [[("a", ((0, 1),))], [("a", ((0,),)), ("b", ((1,),))]]
    >>> crossings(order, 0), crossings(order, 1)
    (frozenset(), frozenset({1}))
    """
    holders = [
        next((holder for holder, runs in order if any(microbatch in run for run in runs)), "")
        for order in orders
    ]
    return frozenset(block for block in range(1, len(holders)) if holders[block] != holders[block - 1])


class CodedBorders:
    """The links of a run whose settings `links` say how each bundle is coded; of another run, none at all."""

    def __init__(self, links: LinkSettings) -> None:
        self._links = links
        self.code = links.lossy and links.repeats
        """Whether bundles change on their way."""

    def activations(self, sender: BlockPass, batch: int) -> Bundle:
        """The bundle that leaves the block `sender`, as it arrives, in a step that trains `batch`."""
        specs = {name: spec.dtype for name, spec in sender.spec.outputs.items() if name != sender.spec.loss}
        return self._arrives({name: sender.outputs[name] for name in specs}, specs, batch, gradient=False)

    def gradients(self, sender: BlockPass, back: Bundle, batch: int) -> Bundle:
        """The gradients `back` that leave the block `sender` for the one before it, as they arrive.

        What a sparse codec left out of the activations gets no gradient.
        """
        dtypes = {name: spec.dtype for name, spec in sender.spec.inputs.items()}
        if self._coding(dtypes, batch, gradient=False).codec.sparse:
            back = {name: part.where(sender.inputs[name] != 0, 0.0) for name, part in back.items()}
        return self._arrives(back, dtypes, batch, gradient=True)

    def _coding(self, dtypes: Mapping[str, str], batch: int, *, gradient: bool) -> AdaptiveRatio:
        width = min((ITEM_BYTES[dtype] for dtype in dtypes.values() if dtype in FLOATING), default=0)
        return self._links.coding(batch, width, gradient=gradient) if width else AdaptiveRatio(Codec())

    def _arrives(self, bundle: Bundle, dtypes: Mapping[str, str], batch: int, *, gradient: bool) -> Bundle:
        coding = self._coding({name: dtypes[name] for name in bundle}, batch, gradient=gradient)
        if coding.codec.values is None:
            return bundle
        try:
            return {name: _arrives(part, dtypes[name], coding) for name, part in bundle.items()}
        except LocalError:  # a value that the codec cannot represent: the sender sends all as it is
            return bundle


def _arrives(tensor: Tensor, dtype: str, coding: AdaptiveRatio) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    kept = kept_of_tensor(coding.codec, flat, coding.share)
    target = memoryview(bytearray(room(coding.codec, dtype, len(flat), kept)))
    written, size = encode(coding.codec, flat, kept, target, squeeze=False)
    found = torch.empty_like(flat)
    decode(coding.codec, written, target[:size], found)
    return found.view(tensor.shape)
