"""The weights that compute uses, on the device, in all versions that steps under way began with.

A step uses the parameters with which it began, at every holder and in both directions, whatever has been
committed meanwhile (docs/asynchronous.md; weight stashing of PipeDream, Narayanan et al., SOSP 2019): updates
make new versions while earlier steps still compute with older ones. If no older version is in use, the update
is in place and there is one vector.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetpeer.stages.block.block import Block, flat_views, statistic_views
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.worker.tensor_staging import CommandError


class Weights:
    """One version: the flat float32 `vector` of parameters and statistics, and the block bound to it."""

    def __init__(self, vector: torch.Tensor, block: Block) -> None:
        spec = block.spec
        self.vector = vector
        self.parameters = {
            name: view.detach().requires_grad_() for name, view in flat_views(spec, vector).items()
        }
        """Leaves of the autograd graph: views of the flat vector."""
        self.block = block.on(self.parameters, statistic_views(spec, vector[spec.parameter_count :]))

    @classmethod
    def first(
        cls, spec: BlockSpec, vector: torch.Tensor, buffers: Mapping[str, torch.Tensor], device: torch.device
    ) -> Weights:
        """The weights of a block that was just loaded."""
        own = flat_views(spec, vector), statistic_views(spec, vector[spec.parameter_count :])
        return cls(vector, Block(spec, own[0], buffers, own[1], device))

    def copy(self) -> Weights:
        """A copy in memory of its own."""
        return Weights(self.vector.clone(), self.block)


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
