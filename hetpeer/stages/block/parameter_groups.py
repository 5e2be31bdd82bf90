"""Parameter groups: which part of a block's vector is updated by which rule.

A group is a shell pattern on parameter names (`*.bias`) and the settings that differ there; the first group
that matches a name decides. Neighbours with equal settings form one segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from hetpeer.stages.graph.block_spec import BlockSpec

if TYPE_CHECKING:
    import torch

Setting = bool | int | float | str | tuple[float, ...] | tuple[tuple[float, float], ...]
Settings = Mapping[str, Setting]
Groups = Sequence[tuple[str, Settings]]


class AppliedRule(Protocol):
    """An update rule with its settings (averaging/optim/update_rule.py).

    Equal inputs give equal bits on every holder.
    """

    def apply(
        self,
        *,
        parameters: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        coefficient: float,
        update: int,
        step: int,
        workers: int = 1,
    ) -> None:
        """Apply update number `update` (from 1) in place to the parameters and their `state`: flat float32
        vectors.

        `step`, from 1, is the place in the schedule. It equals `update` unless several clusters share the
        run's batches; then the mean of `workers` such updates counts.
        """


class OuterRule(Protocol):
    """An outer rule for parameters averaged with other clusters (averaging/optim/outer_optimizer.py)."""

    sparse: bool
    """Whether clusters send the largest elements of `moved`, and `follow` the mean; otherwise `apply`."""

    def begin(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Initialize the zero `state` for a run's first parameters, in place."""

    def apply(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Apply the rule in place; `parameters` are the mean."""

    def moved(self, *, parameters: torch.Tensor, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The movement since the last averaging, and what was not sent of earlier movements."""

    def follow(
        self,
        *,
        parameters: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        sent: torch.Tensor,
        total: torch.Tensor,
        share: float,
    ) -> None:
        """Apply the rule in place; `sent` is the cluster's part of `moved`, `total` · `share` the mean."""


MakeRule = Callable[[Settings], AppliedRule]


@dataclass(frozen=True, slots=True)
class MakeRules:
    """Settings → rule. Both raise a HetpeerError for invalid settings."""

    update: MakeRule
    outer: Callable[[Settings], OuterRule]


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [begin, end) of a block's vector and their rule."""

    begin: int
    end: int
    rule: AppliedRule


def settings_of(name: str, settings: Settings, groups: Groups) -> dict[str, Setting]:
    """The settings of one parameter."""
    changes = next((changes for pattern, changes in groups if fnmatchcase(name, pattern)), {})
    return {**settings, **changes}


def group_ranges(
    spec: BlockSpec, patterns: Sequence[str], counted: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Ranges [begin, end) of the block's vector that are of each of `patterns`, and of none of them, last.

    Only what lies in the ranges `counted`. Without patterns there are no groups.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(patterns) + 1)]
    begin = 0
    for name, tensor in spec.parameter_specs.items():
        end = begin + tensor.count
        matching = (number for number, pattern in enumerate(patterns) if fnmatchcase(name, pattern))
        parts = ((max(begin, first), min(end, last)) for first, last in counted)
        ranges = found[next(matching, len(patterns))]
        for first, last in parts:
            if first < last and ranges and ranges[-1][1] == first:
                ranges[-1] = ranges[-1][0], last
            elif first < last:
                ranges.append((first, last))
        begin = end
    return tuple(map(tuple, found)) if patterns else ()


@dataclass(frozen=True, slots=True)
class BlockRules:
    """All rules that change a block's state."""

    segments: Sequence[Segment]
    """Segments of the parameters, in order."""
    keeps: Sequence[str]
    """Names of the vectors that the rules keep (block_state.py)."""
    outer: OuterRule | None
    """None: the mean is taken as it is."""
    ranges: Sequence[tuple[int, int]] = ()
    """Ranges of the parameters whose movement is sent by itself, in order; with a sparse outer rule."""


def segments(spec: BlockSpec, settings: Settings, groups: Groups, make_rule: MakeRule) -> list[Segment]:
    """The block's parameters in segments of equal settings. Raises as `make_rule`."""
    own = [settings_of(name, settings, groups) for name in spec.parameter_specs]
    ends = list(itertools.accumulate(tensor.count for tensor in spec.parameter_specs.values()))
    result: list[Segment] = []
    for _, group in itertools.groupby(range(len(own)), key=lambda index: sorted(own[index].items())):
        members = list(group)
        begin = ends[members[0] - 1] if members[0] else 0
        result.append(Segment(begin, ends[members[-1]], make_rule(own[members[0]])))
    return result or [Segment(0, 0, make_rule(settings))]
