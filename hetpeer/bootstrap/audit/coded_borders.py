"""Bundles between blocks as links change them, for one machine that computes a run again.

Volunteers' lines say how the bundles were coded that they have computed with (`AppliedEvent.entered` and the
others). So one machine codes and decodes the same numbers the same way, and gets what arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.links.codec import Codec, room
from hetpeer.stages.links.tensor_codecs import decode, encode
from hetpeer.stages.worker.microbatch_tasks import BlockPass

Bundle = Mapping[str, Tensor]
Coding = tuple[str, Sequence[int]]
"""Codec of a bundle, and the elements that a sparse one keeps of each tensor."""
Told = Iterable[tuple[str, Sequence[int], Sequence[int]]]
"""(codec, kept, ids), as in the logs."""


def by_microbatch(told: Told) -> dict[int, Coding]:
    """Microbatch → the last coding that is told of its bundle; others were sent as they are."""
    return {number: (codec, kept) for codec, kept, ids in told for number in ids}


class CodedBorders:
    """How the bundles of one step were coded, by block: those that entered it, and those that came back."""

    def __init__(self, entered: Sequence[Told], returned: Sequence[Told]) -> None:
        self._entered = list(map(by_microbatch, entered))
        self._returned = list(map(by_microbatch, returned))

    def of(self, microbatch: int) -> list[int]:
        """Blocks that the microbatch's bundle entered as a codec had changed it, in order."""
        return [block for block, coded in enumerate(self._entered) if microbatch in coded]

    def entering(self, block: int, microbatch: int, sender: BlockPass) -> Bundle:
        """The bundle that enters `block`, as it arrives from the block `sender` before it."""
        dtypes = _dtypes(sender.spec, "outputs")
        return arrives(
            {name: sender.outputs[name] for name in dtypes}, dtypes, self._entered[block][microbatch]
        )

    def returning(self, microbatch: int, sender: BlockPass, back: Bundle) -> Bundle:
        """The gradients `back` that leave the block `sender`, as they arrive at the block before it.

        What a sparse codec left out of the activations has no gradient.
        """
        block = sender.spec.index
        entered = self._entered[block].get(microbatch) if self._entered else None
        if entered is not None and Codec.of(entered[0]).sparse:
            back = {name: part.where(sender.inputs[name] != 0, 0.0) for name, part in back.items()}
        coding = self._returned[block - 1].get(microbatch) if block and self._returned else None
        return back if coding is None else arrives(back, _dtypes(sender.spec, "inputs"), coding)


def _dtypes(spec: BlockSpec, side: str) -> dict[str, str]:
    tensors = spec.inputs if side == "inputs" else spec.outputs
    return {name: tensor.dtype for name, tensor in tensors.items() if name != spec.loss}


def arrives(bundle: Bundle, dtypes: Mapping[str, str], coding: Coding) -> Bundle:
    """Tensors of `bundle` after a link that codes them; `dtypes`: of each, as the graph says."""
    codec = Codec.of(coding[0])
    kept: Sequence[int | None] = coding[1] or [None] * len(bundle)
    if len(kept) != len(bundle):  # a lie: so the numbers are others, too
        return bundle
    return {
        name: _coded(part, dtypes[name], codec, count)
        for (name, part), count in zip(bundle.items(), kept, strict=True)
    }


def _coded(tensor: Tensor, dtype: str, codec: Codec, kept: int | None) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    count = len(flat) if kept is None else min(kept, len(flat))
    target = memoryview(bytearray(room(codec, dtype, len(flat), count)))
    written, size = encode(codec, flat, count, target, squeeze=False)
    found = torch.empty_like(flat)
    decode(codec, written, target[:size], found)
    return found.view(tensor.shape)
