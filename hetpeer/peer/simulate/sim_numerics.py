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
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hetpeer.stages.block.fingerprint import PLACES, Fingerprint


class Numerics(Protocol):
    """Arithmetic of a model of `blocks` blocks. States and gradients are per block; values are immutable."""

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

    def tie(self, block: int, gradient: Any, tied: Mapping[int, tuple[int, Any]]) -> Any:
        """Gradient of `block` with the parts of the blocks `tied` to it: block → (first element, part)."""

    def fingerprint(self, gradient: Any, shard: tuple[int, int, int], key: bytes) -> Fingerprint:
        """Fingerprint of a shard of a gradient, (block, first element, end), under `key`."""

    def lie(self, gradient: Any, by: str) -> Any:
        """False value of the same shape, made by the liar `by`."""

    def mark(self, bundle: Any, key: bytes) -> Fingerprint:
        """Fingerprint of a bundle under `key`."""

    def forge(self, bundle: Any, by: str) -> Any:
        """False bundle of the same shape by the liar `by`; all that is computed from it is false too."""

    def inspect(self, block: int, gradient: Any) -> tuple[str, float]:
        """Digest, and squared norm of the elements that count at `block`."""

    def apply(self, state: Any, gradient: Any, coefficient: float) -> Any:
        """State after an update of `state` with `coefficient` · `gradient`."""

    def parameters(self, state: Any, begin: int, end: int) -> Any:
        """Parameters [begin, end) of a state, for an averaging; they are added up like gradients."""

    def install(self, state: Any, total: Any, coefficient: float, copy: Any) -> Any:
        """State with parameters `total`·`coefficient` plus the change since `copy` (of the same cluster)."""

    def digest(self, state: Any) -> str:
        """Digest of a state; equal states have equal digests."""

    def shared(self, state: Any, begin: int, end: int) -> str:
        """Digest of the elements [begin, end), a tied parameter: equal at all blocks that have it."""

    def check_loss(self, step: int, microbatches: int, loss: float) -> bool:
        """Whether a committed step may have this mean loss."""

    def check_final(self, block: int, bases: Sequence[Sequence[int]], state: Any) -> bool:
        """Whether exact steps may end in `state`; `bases`: step → base version of each microbatch."""


@dataclass(frozen=True, slots=True)
class SymbolicSum:
    """Gradient: how often each (step, id, exact state) is in it, and its bits."""

    ids: Counter[tuple[int, int, str]]
    bits: str
    tied: str = ""
    """Bits of the tied parameters, equal at all blocks that share them."""


@dataclass(frozen=True, slots=True)
class SymbolicState:
    """State of a block."""

    exact: str
    bits: str
    tied: str = ""
    batches: frozenset[int] = frozenset()
    """Batches that the state was trained on."""


@dataclass(frozen=True, slots=True)
class SymbolicAverage:
    """Parameters of several clusters, in the order in which they were added."""

    states: tuple[SymbolicState, ...]


class Symbols:
    """Gradients as counters of ids, states as hash chains (see the module's text)."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    @property
    def sizes(self) -> Mapping[int, int]:
        return dict.fromkeys(range(self.blocks), 100)

    def initial(self, block: int) -> SymbolicState:
        return SymbolicState(f"block {block}", "")

    def forward(
        self, states: Sequence[SymbolicState], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        step, number = microbatch
        end = begin + len(states)
        expected, lies = (None, ()) if begin == 0 else (("activation", step, number, begin), bundle[4:])
        assert expected is None or bundle[:4] == expected, bundle
        kept = (step, number, begin, tuple(states), lies)
        if end == self.blocks:
            return kept, float(number + 1)
        return kept, ("activation", step, number, end, *lies)

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[SymbolicSum]]:
        step, number, begin, states, lies = kept
        end = begin + len(states)
        if end < self.blocks:
            assert gradient[:4] == ("gradient", step, number, end), gradient
            lies = (*lies, *gradient[4:])
        false = Counter({(-1, -1, by): 1 for by in lies})
        return ("gradient", step, number, begin, *lies), [
            SymbolicSum(Counter({(step, number, state.exact): 1}) + false, _hash((step, number, state, lies)))
            for state in states
        ]

    def add(self, gradients: Iterable[Any]) -> Any:
        terms = list(gradients)
        if len(terms) == 1:
            return terms[0]
        if isinstance(terms[0], SymbolicAverage):
            return SymbolicAverage(tuple(state for term in terms for state in term.states))
        ids: Counter[tuple[int, int, str]] = Counter()
        for term in terms:
            ids.update(term.ids)
        return SymbolicSum(ids, _hash([term.bits for term in terms]))

    def shard(self, gradient: Any, begin: int, end: int) -> Any:  # noqa: ARG002
        return gradient

    def join(self, shards: Sequence[Any]) -> Any:
        whole = all(shard == shards[0] for shard in shards)
        return shards[0] if whole else SymbolicSum(Counter({(-1, -1, "torn"): 1}), "torn")

    def tie(
        self, block: int, gradient: SymbolicSum, tied: Mapping[int, tuple[int, SymbolicSum]]
    ) -> SymbolicSum:
        others = {other: part for other, (_, part) in tied.items()}
        parts = sorted({block: gradient, **others}.items())
        if any(_tasks(part) != _tasks(gradient) for _, part in parts):
            return SymbolicSum(Counter({(-1, -1, "torn"): 1}), "torn")
        total = _hash([(other, part.bits) for other, part in parts])
        return SymbolicSum(gradient.ids, _hash((gradient.bits, total)), total)

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
            return SymbolicAverage((*gradient.states, SymbolicState(by, by)))
        if isinstance(gradient, SymbolicState):
            return replace(gradient, exact=_hash((gradient.exact, by)), bits=_hash((gradient.bits, by)))
        return SymbolicSum(gradient.ids + Counter({(-1, -1, by): 1}), _hash((gradient.bits, by)))

    def inspect(self, block: int, gradient: Any) -> tuple[str, float]:  # noqa: ARG002
        if isinstance(gradient, SymbolicAverage):
            return _hash([self.digest(state) for state in gradient.states]), 1.0
        return _hash((sorted(gradient.ids.items()), gradient.bits)), 1.0

    def apply(self, state: SymbolicState, gradient: SymbolicSum, coefficient: float) -> SymbolicState:  # noqa: ARG002
        exact = _hash((state.exact, sorted(gradient.ids.items())))
        return SymbolicState(
            exact,
            _hash((state.bits, gradient.bits)),
            _hash((state.tied, gradient.tied or gradient.bits)),
            state.batches.union(batch for batch, _, _ in gradient.ids),
        )

    def parameters(self, state: SymbolicState, begin: int, end: int) -> SymbolicAverage:  # noqa: ARG002
        return SymbolicAverage((state,))

    def install(
        self, state: SymbolicState, total: SymbolicAverage, coefficient: float, copy: SymbolicState
    ) -> SymbolicState:
        assert round(1 / coefficient) == len(total.states), (coefficient, total)
        assert copy in total.states, (copy, total)
        terms = total.states if copy == state else (*total.states, state)
        return SymbolicState(
            _hash([one.exact for one in terms]),
            _hash([one.bits for one in terms]),
            _hash([one.tied for one in terms]),
            frozenset().union(*(one.batches for one in terms)),
        )

    def digest(self, state: SymbolicState) -> str:
        return _hash((state.exact, state.bits))

    def shared(self, state: SymbolicState, begin: int, end: int) -> str:  # noqa: ARG002
        return state.tied

    def check_loss(self, step: int, microbatches: int, loss: float) -> bool:  # noqa: ARG002
        return loss == sum(n + 1 for n in range(microbatches)) / microbatches

    def check_final(self, block: int, bases: Sequence[Sequence[int]], state: SymbolicState) -> bool:
        """One big machine's state has the same exact part."""
        versions = [self.initial(block)]
        for step, each in enumerate(bases):
            ids = Counter({(step, n, versions[base].exact): 1 for n, base in enumerate(each)})
            versions.append(self.apply(versions[step], SymbolicSum(ids, ""), 1.0))
        return state.exact == versions[-1].exact


class Counting(Symbols):
    """Symbols that count backward passes in `executed`, one for each block and microbatch."""

    executed = 0

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[SymbolicSum]]:
        back, gradients = super().backward(kept, gradient)
        self.executed += len(gradients)
        return back, gradients


def _tasks(gradient: SymbolicSum) -> Counter[tuple[int, int]]:
    """(step, id) → number of times that it is in a sum."""
    tasks: Counter[tuple[int, int]] = Counter()
    for (step, number, _), count in gradient.ids.items():
        tasks[step, number] += count
    return tasks


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
