"""The held-out microbatches of a step: who has said what of each, and which loss counts (docs/trust.md, "Held-out losses").

Pure. Such a loss is seen by nobody but who computes the last block, and nothing else comes of it. Where spot checks are, each is therefore computed twice, by
others, and a third time where those two differ.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping

ALIKE = 0.01
"""Relative difference of two honest losses of the same samples, at most. Where it is more a third is asked for, no more than that."""
OPINIONS = 3
"""On a microbatch, at most: the n-th has the id of the first, and n times as many as there are microbatches."""


class Evaluations:
    """Of `count` microbatches, with ids from `first` on. `checked`: two opinions are asked for on each, else one."""

    def __init__(self, first: int, count: int, *, checked: bool = False) -> None:
        self.differed = 0
        """Microbatches of which two have said different things."""
        self._first, self._count = first, count
        self._asked = 2 if checked else 1
        self._said: dict[int, dict[int, tuple[str, float]]] = {n: {} for n in range(count)}
        """Microbatch → id → who computed it, and the loss."""
        self._losses: dict[int, float] = {}
        """What counts."""
        self._wanted = set(range(first, first + self._asked * count))

    def __len__(self) -> int:
        return self._count

    @property
    def wanted(self) -> Collection[int]:
        """Ids that are to be computed, and have no loss yet."""
        return self._wanted

    @property
    def first(self) -> range:
        """The ids of the first opinions."""
        return range(self._first, self._first + self._count)

    @property
    def second(self) -> range:
        """Those that are to be computed by others, from the beginning on."""
        return range(self._first + self._count, self._first + self._asked * self._count)

    def others(self, microbatch: int) -> range:
        """Ids before this one, of the same samples."""
        return range(self._first + (microbatch - self._first) % self._count, microbatch, self._count)

    def said(self, peer: str, losses: Mapping[int, float], holders: Collection[str]) -> list[int] | None:
        """`peer` has computed these; the `holders` of the last block are who can. Ids that are wanted from now on; None if nothing of that counts: the first
        word on an id does, and one of each peer on the same samples, unless there is nobody else.
        """
        opened: list[int] = []
        counts = False
        for microbatch in sorted(losses.keys() & self._wanted):
            number = (microbatch - self._first) % self._count
            said = self._said[number]
            unheard = set(holders) - {who for who, _ in said.values()}
            if peer not in holders or (unheard and peer not in unheard):
                continue
            counts = True
            self._wanted.discard(microbatch)
            said[microbatch] = peer, losses[microbatch]
            if len(said) >= self._asked and self._differ(number, can_ask=bool(unheard - {peer})):
                opened.append(self._first + (OPINIONS - 1) * self._count + number)
        self._wanted.update(opened)
        return opened if counts else None

    def _differ(self, number: int, *, can_ask: bool) -> bool:
        """Whether a third is to be asked: all who were have spoken. Else it is decided."""
        losses = [loss for _, (_, loss) in sorted(self._said[number].items())]
        alike = math.isclose(losses[0], losses[-1], rel_tol=ALIKE)
        if len(losses) == self._asked and not alike:
            self.differed += 1
            if can_ask:
                return True
        self._losses[number] = statistics.median(losses) if len(losses) == OPINIONS else losses[0]
        return False

    @property
    def loss(self) -> float:
        """Mean of the microbatches' losses, all of which are decided."""
        return math.fsum(self._losses[number] for number in sorted(self._losses)) / self._count
