"""Arithmetic of simulated volunteers: symbols that show every id and every rounding.

`Symbols`: a gradient counts microbatch ids, a block's state is a hash chain over the gradients that were
applied. An id that is lost or doubled anywhere changes every later state, so one comparison with the expected
chain checks the whole history. Beside that exact part goes a second one, the *bits*, which depends on the
order of additions as float32 sums do: two histories of the same ids may differ in it, two holders of one
block may not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SymbolicSum:
    """Gradient: how often each (step, id, exact state) is in it, and its bits."""

    ids: Counter[tuple[int, int, str]]
    bits: str


@dataclass(frozen=True, slots=True)
class SymbolicState:
    """State of a block."""

    exact: str
    bits: str


class Symbols:
    """Arithmetic of a model of `blocks` blocks: gradients as counters of ids, states as hash chains.

    States and gradients are per block; values are immutable.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.executed = 0
        """Backward passes so far, one for each block and microbatch."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Elements of each block's flat gradient."""
        return dict.fromkeys(range(self.blocks), 100)

    def initial(self, block: int) -> SymbolicState:
        """Initial state of `block`."""
        return SymbolicState(f"block {block}", "")

    def forward(
        self, states: Sequence[SymbolicState], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        """Run the blocks from `begin` on over (step, id).

        Returns (context for backward, outgoing bundle or loss).
        """
        step, number = microbatch
        end = begin + len(states)
        assert begin == 0 or bundle == ("activation", step, number, begin), bundle
        kept = (step, number, begin, tuple(states))
        return kept, float(number + 1) if end == self.blocks else ("activation", step, number, end)

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[SymbolicSum]]:
        """Run the backward. Returns (gradient of the incoming bundle, gradient per block)."""
        step, number, begin, states = kept
        end = begin + len(states)
        assert end == self.blocks or gradient == ("gradient", step, number, end), gradient
        self.executed += len(states)
        return ("gradient", step, number, begin), [
            SymbolicSum(Counter({(step, number, state.exact): 1}), hashed((step, number, state)))
            for state in states
        ]

    def add(self, gradients: Iterable[Any]) -> Any:
        """Sum of `gradients`, added one after the other in this order."""
        terms = list(gradients)
        if len(terms) == 1:
            return terms[0]
        ids: Counter[tuple[int, int, str]] = Counter()
        for term in terms:
            ids.update(term.ids)
        return SymbolicSum(ids, hashed([term.bits for term in terms]))

    def shard(self, gradient: Any, begin: int, end: int) -> Any:  # noqa: ARG002
        """Elements [begin, end) of `gradient`."""
        return gradient

    def join(self, shards: Sequence[Any]) -> Any:
        """Gradient of a block from its shards in order."""
        whole = all(shard == shards[0] for shard in shards)
        return shards[0] if whole else SymbolicSum(Counter({(-1, -1, "torn"): 1}), "torn")

    def inspect(self, block: int, gradient: Any) -> tuple[str, float]:  # noqa: ARG002
        """Digest, and squared norm of the elements that count at `block`."""
        return hashed((sorted(gradient.ids.items()), gradient.bits)), 1.0

    def apply(self, state: SymbolicState, gradient: SymbolicSum, coefficient: float) -> SymbolicState:  # noqa: ARG002
        """State after an update of `state` with `coefficient` · `gradient`."""
        exact = hashed((state.exact, sorted(gradient.ids.items())))
        return SymbolicState(exact, hashed((state.bits, gradient.bits)))

    def digest(self, state: SymbolicState) -> str:
        """Digest of a state; equal states have equal digests."""
        return hashed((state.exact, state.bits))


def hashed(value: object) -> str:
    """Digest of the text of `value`."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
