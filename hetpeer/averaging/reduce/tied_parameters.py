"""Tied parameters: one parameter of the model that several blocks use, and the effect on the blocks'
gradients.

Each block reduces the gradient of its own uses. The parameter's gradient is their sum in the order of the
blocks (docs/graph.md). Pure: offsets into the blocks' flat vectors, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from hetpeer.averaging.messages import Block, Count


class Use(NamedTuple):
    """Elements [begin, end) of the vector of `block`."""

    block: int
    begin: int
    end: int


class Tie(BaseModel):
    """The uses of one tied parameter, in the order of the blocks; all of one length."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uses: Annotated[tuple[tuple[Block, Count, Count], ...], Field(min_length=2)]


class Ties:
    """All ties of a model."""

    def __init__(self, ties: Sequence[Tie] = ()) -> None:
        self._ties = [tuple(Use(*use) for use in tie.uses) for tie in ties]

    def of(self, block: int) -> list[tuple[Use, tuple[Use, ...]]]:
        """Tied parameters of `block`: (place in the block, all uses)."""
        return [(use, uses) for uses in self._ties for use in uses if use.block == block]

    def partners(self, block: int) -> list[int]:
        """The other blocks with which `block` shares a parameter."""
        return sorted({other.block for _, uses in self.of(block) for other in uses} - {block})

    def needed(self, block: int, begin: int, end: int) -> bool:
        """Whether observers get elements [begin, end) of `block`: from its first to its last tied one."""
        uses = [use for use, _ in self.of(block)]
        return bool(uses) and min(u.begin for u in uses) < end and begin < max(u.end for u in uses)

    def parts(self, block: int, elements: int) -> tuple[tuple[int, int], ...]:
        """Ranges that make up the first `elements` of `block`: each tied parameter is one of its own."""
        inner = {border for use, _ in self.of(block) for border in (use.begin, use.end)}
        borders = sorted({0, elements, *inner})
        return tuple(pairwise(borders)) or ((0, elements),)

    def counted(self, block: int, elements: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the first `elements` (the parameters) of `block` that count for the norm there.

        A tied parameter counts at its first block alone.
        """
        ranges, at = [], 0
        for use, uses in sorted(self.of(block)):
            if uses[0] != use:
                ranges.append((at, use.begin))
                at = use.end
        return tuple((begin, end) for begin, end in (*ranges, (at, elements)) if begin < end)
