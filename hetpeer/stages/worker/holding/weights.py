"""The weights that compute uses, on the device, in all versions that steps under way began with.

A step uses the parameters with which it began, at every holder and in both directions, whatever has been
committed meanwhile (docs/asynchronous.md; weight stashing of PipeDream, Narayanan et al., SOSP 2019): updates
make new versions while earlier steps still compute with older ones. If no older version is in use, the update
is in place and there is one vector.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hetpeer.stages.block.block import Block
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.worker.tensor_staging import CommandError, Copier


class _Run(NamedTuple):
    """Elements [begin, end) of a block's vector, which lie in one of the flat tensors from `offset` on."""

    begin: int
    end: int
    dtype: torch.dtype
    offset: int


class WeightLayout:
    """Where the elements of a block's vector lie on the device: the parameters `cast` in a bfloat16 tensor,
    all others and the running statistics in a float32 tensor, both in the order of the spec.
    """

    def __init__(self, spec: BlockSpec, cast: Collection[str] = ()) -> None:
        self.spec = spec
        self.cast = cast
        self.counts = {torch.float32: 0, torch.bfloat16: 0}
        """Dtype → elements of its flat tensor."""
        self.places: dict[str, _Run] = {}
        """Name of a parameter or statistic → its elements."""
        begin = 0
        for name, tensor in (*spec.parameter_specs.items(), *spec.statistic_specs.items()):
            dtype = torch.bfloat16 if name in cast else torch.float32
            self.places[name] = _Run(begin, begin + tensor.count, dtype, self.counts[dtype])
            self.counts[dtype] += tensor.count
            begin += tensor.count

    def new(self, device: torch.device) -> dict[torch.dtype, Tensor]:
        """Flat tensors on `device`, of undefined content."""
        return {dtype: torch.empty(count, dtype=dtype, device=device) for dtype, count in self.counts.items()}

    def views(self, flats: Mapping[torch.dtype, Tensor], specs: Collection[str]) -> dict[str, Tensor]:
        """Name → its view into the flat tensors, for some of the parameters or statistics."""
        shapes = {**self.spec.parameter_specs, **self.spec.statistic_specs}
        found = {}
        for name in specs:
            run = self.places[name]
            part = flats[run.dtype][run.offset : run.offset + run.end - run.begin]
            found[name] = part.view(shapes[name].sizes).detach()
        return found


class Weights:
    """One version: parameters and statistics on the device, and the block bound to them."""

    def __init__(self, layout: WeightLayout, flats: Mapping[torch.dtype, Tensor], block: Block) -> None:
        self.layout = layout
        self._flats = flats
        self.parameters = {
            name: view.requires_grad_()
            for name, view in layout.views(flats, layout.spec.parameter_specs).items()
        }
        """Leaves of the autograd graph: views of the flat tensors."""
        self.block = block.on(self.parameters, layout.views(flats, layout.spec.statistic_specs))

    @classmethod
    def first(cls, layout: WeightLayout, buffers: Mapping[str, Tensor], device: torch.device) -> Weights:
        """The weights of a block that is being loaded, of undefined content; `put` sets them."""
        spec, flats = layout.spec, layout.new(device)
        own = layout.views(flats, spec.parameter_specs), layout.views(flats, spec.statistic_specs)
        return cls(layout, flats, Block(spec, own[0], buffers, own[1], device, cast=layout.cast, rows=True))

    @property
    def vector(self) -> Tensor:
        """All of it as one float32 vector. Raises CommandError if parameters are kept in bfloat16."""
        if self.layout.cast:
            raise CommandError(f"block {self.layout.spec.index} has no float32 numbers of that version")
        return self._flats[torch.float32]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(flat.nbytes for flat in self._flats.values())

    def put(self, begin: int, piece: Tensor, copier: Copier) -> None:
        """Set the elements from `begin` on to `piece`, in main memory, rounded as autocast rounds them."""
        end = begin + len(piece)
        for run in self.layout.places.values():
            first, last = max(begin, run.begin), min(end, run.end)
            if first < last:
                offset = run.offset + first - run.begin
                place = self._flats[run.dtype][offset : offset + last - first]
                copier.put(piece[first - begin : last - begin].to(run.dtype), place)

    def copy(self) -> Weights:
        """A copy in memory of its own."""
        return Weights(self.layout, {d: flat.clone() for d, flat in self._flats.items()}, self.block)


class WeightVersions:
    """The versions of one block in use, from `version` on."""

    def __init__(self, version: int, weights: Weights) -> None:
        self._held = {version: weights}

    @property
    def version(self) -> int:
        """Number of the newest version."""
        return max(self._held)

    @property
    def newest(self) -> Weights:
        """The newest weights."""
        return self._held[self.version]

    def at(self, version: int) -> Weights:
        """The weights of `version`. Raises CommandError if they are not here."""
        if version not in self._held:
            there = ", ".join(map(str, sorted(self._held)))
            raise CommandError(f"version {version} is not here, but {there}")
        return self._held[version]

    def advance(self, needed: int) -> Weights:
        """The next version, still with the newest one's numbers, which the caller changes.

        Versions before `needed` are forgotten; the newest is changed in place if it is one of them.
        """
        version, newest = self.version, self.newest
        self._held = {v: weights for v, weights in self._held.items() if v >= needed}
        self._held[version + 1] = newest.copy() if version in self._held else newest
        return self._held[version + 1]
