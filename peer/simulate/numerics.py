"""What simulated volunteers compute: symbols whose sums show every id, or a real toy net in torch.

`Symbols`: a gradient is a count of microbatch ids, a block's state a hash chain over the gradients that were applied.
An id lost or doubled anywhere changes every later state, so one comparison with the expected chain at the end checks
the whole history.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol


class Numerics(Protocol):
    """The arithmetic of a model of `blocks` blocks, for one volunteer. States are per block."""

    blocks: int

    @property
    def sizes(self) -> Mapping[int, int]:
        """Elements of each block's flat gradient."""

    def initial(self, block: int) -> Any: ...

    def forward(
        self, states: Sequence[Any], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        """Blocks from `begin` on over (step, id); returns (what backward needs, outgoing bundle or loss)."""

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[Any]]:
        """Returns (gradient of the incoming bundle, gradient per block)."""

    def add(self, gradients: Iterable[Any]) -> Any: ...

    def shard(self, gradient: Any, begin: int, end: int) -> Any: ...

    def join(self, shards: Sequence[Any]) -> Any: ...

    def inspect(self, gradient: Any) -> tuple[str, float]:
        """Digest and squared norm."""

    def apply(self, state: Any, gradient: Any, coefficient: float) -> Any: ...

    def digest(self, state: Any) -> str: ...


class Symbols:
    """Gradients as counters of ids, states as hash chains (see the module's text)."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    @property
    def sizes(self) -> Mapping[int, int]:
        return dict.fromkeys(range(self.blocks), 100)

    def initial(self, block: int) -> str:
        return f"block {block}"

    def forward(
        self, states: Sequence[str], begin: int, microbatch: tuple[int, int], bundle: Any
    ) -> tuple[Any, Any]:
        step, number = microbatch
        end = begin + len(states)
        assert bundle == (None if begin == 0 else ("activation", step, number, begin)), bundle
        kept = (step, number, begin, end)
        if end == self.blocks:
            return kept, float(number + 1)
        return kept, ("activation", step, number, end)

    def backward(self, kept: Any, gradient: Any) -> tuple[Any, list[Counter[Hashable]]]:
        step, number, begin, end = kept
        assert gradient == (None if end == self.blocks else ("gradient", step, number, end)), gradient
        return ("gradient", step, number, begin), [Counter({(step, number): 1}) for _ in range(begin, end)]

    def add(self, gradients: Iterable[Counter[Hashable]]) -> Counter[Hashable]:
        total: Counter[Hashable] = Counter()
        for gradient in gradients:
            total.update(gradient)
        return total

    def shard(self, gradient: Counter[Hashable], begin: int, end: int) -> Counter[Hashable]:  # noqa: ARG002
        return gradient

    def join(self, shards: Sequence[Counter[Hashable]]) -> Counter[Hashable]:
        return shards[0] if all(s == shards[0] for s in shards) else Counter({"torn": 1})

    def inspect(self, gradient: Counter[Hashable]) -> tuple[str, float]:
        return _hash(sorted(gradient.items(), key=repr)), 1.0

    def apply(self, state: str, gradient: Counter[Hashable], coefficient: float) -> str:  # noqa: ARG002
        return _hash((state, sorted(gradient.items(), key=repr)))

    def digest(self, state: str) -> str:
        return state

    def expected(self, block: int, steps: int, microbatches: int) -> str:
        """The state of `block` after `steps` exact steps."""
        state = self.initial(block)
        for step in range(steps):
            state = self.apply(state, Counter({(step, n): 1 for n in range(microbatches)}), 1.0)
        return state


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
