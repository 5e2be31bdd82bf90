"""Symbols that histories are checked with: false values, fingerprints, averages, and the exact result of a
run.

What a liar forges carries the liar's name, and so does all that is computed from it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hetpeer.peer.simulate.sim_numerics import (
    SymbolicState,
    SymbolicSum,
    Symbols,
    hashed,
)
from hetpeer.stages.block.fingerprint import PLACES, Fingerprint


@dataclass(frozen=True, slots=True)
class SymbolicAverage:
    """Parameters of several clusters, in the order in which they were added."""

    states: tuple[CheckedState, ...]


@dataclass(frozen=True, slots=True)
class TiedSum(SymbolicSum):
    """Gradient of a block with tied parameters."""

    tied: str = ""
    """Bits of the tied parameters, equal at all blocks that share them."""


@dataclass(frozen=True, slots=True)
class CheckedState(SymbolicState):
    """State of a block that knows its batches, and may have tied parameters."""

    batches: frozenset[int] = frozenset()
    """Batches that the state was trained on."""
    tied: str = ""
    """Bits of the tied parameters."""


class CheckedNumerics(Protocol):
    """Arithmetic of a simulated swarm whose volunteers may lie and average, and whose result is known."""

    blocks: int

    @property
    def sizes(self) -> Mapping[int, int]:
        """Elements of each block's flat gradient."""

    def initial(self, block: int) -> Any:
        """Initial state of `block`."""

    def forward(
        self, states: Sequence[Any], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        """Run the blocks from `begin` on over (step, id).

        Returns (context for backward, outgoing bundle or loss).
        """

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[Any]]:
        """Run the backward. Returns (gradient of the incoming bundle, gradient per block)."""

    def add(self, gradients: Iterable[Any]) -> Any:
        """Sum of `gradients`, added one after the other in this order."""

    def shard(self, gradient: Any, begin: int, end: int) -> Any:
        """Elements [begin, end) of `gradient`."""

    def join(self, shards: Sequence[Any]) -> Any:
        """Gradient of a block from its shards in order."""

    def inspect(self, block: int, gradient: Any) -> tuple[str, float]:
        """Digest, and squared norm of the elements that count at `block`."""

    def apply(self, state: Any, gradient: Any, coefficient: float) -> Any:
        """State after an update of `state` with `coefficient` · `gradient`."""

    def digest(self, state: Any) -> str:
        """Digest of a state; equal states have equal digests."""

    def tie(self, block: int, gradient: Any, tied: Mapping[int, tuple[int, Any]]) -> Any:
        """Gradient of `block` with the parts of the blocks `tied` to it: block → (first element, part)."""

    def shared(self, state: Any, begin: int, end: int) -> str:
        """Digest of the elements [begin, end), a tied parameter: equal at all blocks that have it."""

    def fingerprint(self, gradient: Any, shard: tuple[int, int, int], key: bytes) -> Fingerprint:
        """Fingerprint of a shard of a gradient, (block, first element, end), under `key`."""

    def lie(self, gradient: Any, by: str) -> Any:
        """False value of the same shape, made by the liar `by`."""

    def mark(self, bundle: Any, key: bytes) -> Fingerprint:
        """Fingerprint of a bundle under `key`."""

    def forge(self, bundle: Any, by: str) -> Any:
        """False bundle of the same shape by the liar `by`; all that is computed from it is false too."""

    def parameters(self, state: Any, begin: int, end: int) -> Any:
        """Parameters [begin, end) of a state, for an averaging; they are added up like gradients."""

    def install(self, state: Any, total: Any, coefficient: float, copy: Any) -> Any:
        """State with parameters `total`·`coefficient` plus the change since `copy` (of the same cluster)."""

    def check_loss(self, step: int, ids: Collection[int], loss: float) -> bool:
        """Whether a committed step may have this mean loss."""

    def check_final(self, block: int, bases: Sequence[Mapping[int, int]], state: Any) -> bool:
        """Whether exact steps may end in `state`; `bases`: step → id → base version."""


class CheckedSymbols(Symbols):
    """`CheckedNumerics` of symbols; a bundle of `Symbols` is followed by the names of liars."""

    def initial(self, block: int) -> CheckedState:
        state = super().initial(block)
        return CheckedState(state.exact, state.bits)

    def apply(self, state: CheckedState, gradient: SymbolicSum, coefficient: float) -> CheckedState:
        after = super().apply(state, gradient, coefficient)
        shared = gradient.tied if isinstance(gradient, TiedSum) else gradient.bits
        batches = state.batches.union(batch for batch, _, _ in gradient.ids)
        return CheckedState(after.exact, after.bits, batches, hashed((state.tied, shared)))

    def tie(
        self, block: int, gradient: SymbolicSum, tied: Mapping[int, tuple[int, SymbolicSum]]
    ) -> SymbolicSum:
        others = {other: part for other, (_, part) in tied.items()}
        parts = sorted({block: gradient, **others}.items())
        if any(_tasks(part) != _tasks(gradient) for _, part in parts):
            return SymbolicSum(Counter({(-1, -1, "torn"): 1}), "torn")
        total = hashed([(other, part.bits) for other, part in parts])
        return TiedSum(gradient.ids, hashed((gradient.bits, total)), total)

    def shared(self, state: CheckedState, begin: int, end: int) -> str:
        return state.tied

    def forward(
        self, states: Sequence[SymbolicState], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        lies = () if begin == 0 else bundle[4:]
        kept, out = super().forward(states, begin, microbatch, None if begin == 0 else bundle[:4])
        return (*kept, lies), (*out, *lies) if isinstance(out, tuple) else out

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[SymbolicSum]]:
        *kept, lies = kept
        step, number, _, states = kept
        if gradient is not None:
            lies = (*lies, *gradient[4:])
        back, sums = super().backward(kept, None if gradient is None else gradient[:4])
        false = Counter({(-1, -1, by): 1 for by in lies})
        return (*back, *lies), [
            SymbolicSum(exact.ids + false, hashed((step, number, state, lies)))
            for exact, state in zip(sums, states, strict=True)
        ]

    def parameters(self, state: SymbolicState, begin: int, end: int) -> SymbolicAverage:
        return SymbolicAverage((state,))

    def install(
        self, state: SymbolicState, total: SymbolicAverage, coefficient: float, copy: SymbolicState
    ) -> SymbolicState:
        assert round(1 / coefficient) == len(total.states), (coefficient, total)
        assert copy in total.states, (copy, total)
        terms = total.states if copy == state else (*total.states, state)
        return CheckedState(
            hashed([one.exact for one in terms]),
            hashed([one.bits for one in terms]),
            frozenset().union(*(one.batches for one in terms)),
            hashed([one.tied for one in terms]),
        )

    def add(self, gradients: Iterable[Any]) -> Any:
        terms = list(gradients)
        if isinstance(terms[0], SymbolicAverage):
            return SymbolicAverage(tuple(state for term in terms for state in term.states))
        return super().add(terms)

    def inspect(self, block: int, gradient: Any) -> tuple[str, float]:
        if isinstance(gradient, SymbolicAverage):
            return hashed([self.digest(state) for state in gradient.states]), 1.0
        return super().inspect(block, gradient)

    def fingerprint(self, gradient: SymbolicSum, shard: tuple[int, int, int], key: bytes) -> Fingerprint:
        block, begin, end = shard
        total = np.zeros(PLACES)
        for task, count in gradient.ids.items():
            drawn = hashlib.blake2b(repr((key, block, task)).encode(), digest_size=32).digest()
            total[:4] += (end - begin) * count * (np.frombuffer(drawn, "<u8") / 2.0**63 - 1.0)
        return total

    def mark(self, bundle: Any, key: bytes) -> Fingerprint:
        drawn = hashlib.blake2b(repr((key, bundle)).encode(), digest_size=32).digest()
        total = np.zeros(PLACES)
        total[:4] = np.frombuffer(drawn, "<u8") / 2.0**63 - 1.0
        return total

    def forge(self, bundle: Any, by: str) -> Any:
        return (*bundle, by)

    def lie(self, gradient: Any, by: str) -> Any:
        if isinstance(gradient, SymbolicAverage):
            return SymbolicAverage((*gradient.states, CheckedState(by, by)))
        if isinstance(gradient, SymbolicState):
            return replace(gradient, exact=hashed((gradient.exact, by)), bits=hashed((gradient.bits, by)))
        return SymbolicSum(gradient.ids + Counter({(-1, -1, by): 1}), hashed((gradient.bits, by)))

    def check_loss(self, step: int, ids: Collection[int], loss: float) -> bool:
        return loss == sum(n + 1 for n in ids) / len(ids)

    def check_final(self, block: int, bases: Sequence[Mapping[int, int]], state: SymbolicState) -> bool:
        """One big machine's state has the same exact part."""
        versions = [self.initial(block)]
        for step, each in enumerate(bases):
            ids = Counter({(step, n, versions[base].exact): 1 for n, base in each.items()})
            versions.append(self.apply(versions[step], SymbolicSum(ids, ""), 1.0))
        return state.exact == versions[-1].exact


def _tasks(gradient: SymbolicSum) -> Counter[tuple[int, int]]:
    """(step, id) → number of times that it is in a sum."""
    tasks: Counter[tuple[int, int]] = Counter()
    for (step, number, _), count in gradient.ids.items():
        tasks[step, number] += count
    return tasks
