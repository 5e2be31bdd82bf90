"""The ledger of one step: which holder counts each microbatch at each block, and when that is an exact cover.

Pure. Per block a mapping id → holder; an id is counted once or not at all, however often it is reported.
Slots are reported one by one and accepted block by block. A slot that is disjoint from the ledger counts. Of
two that overlap the smaller is dropped, and ids that it alone held are open again (docs/protocol.md, step 4).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from hetpeer.averaging.messages import Contents
from hetpeer.bootstrap.log.unused_work import Unused

Runs = tuple[tuple[int, ...], ...]
"""Ids in the order in which a holder adds their gradients: each run by itself, then the runs' sums."""
CLIP_EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""
MAX_REOPENED = 3
"""Refused reports of one holder that open the same id again at once; then it waits for the stall timeout."""


@dataclass(slots=True)
class SlotVerdict:
    """Result of a report: blocks that do not count, holders whose slots were displaced, ids open again."""

    refused: tuple[int, ...] = ()
    evicted: dict[str, list[int]] = field(default_factory=dict)
    reopened: set[int] = field(default_factory=set)
    displaced: set[int] = field(default_factory=set)
    """Ids of `reopened` that had counted."""
    progress: bool = False


class StepLedger:
    """The ledger of a step with training ids `ids`, evaluation ids `evaluation` and `blocks` blocks."""

    def __init__(self, ids: Iterable[int], evaluation: Iterable[int], blocks: int) -> None:
        self.ids = frozenset(ids)
        self.evaluation = frozenset(evaluation)
        self.skipped: frozenset[int] = frozenset()
        """Ids that cannot be computed, or have no weight: they count nowhere."""
        self.unused = Unused()
        """Work that was done, or handed out, and does not count."""
        self._counted: list[dict[int, str]] = [{} for _ in range(blocks)]
        self._runs: list[dict[str, Runs]] = [{} for _ in range(blocks)]
        """Block → holder → its accepted slots, in the order in which it merges them."""
        self._settled: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Holder → its last slot (their numbers rise), and the blocks of it that do not count."""
        self._reopened: Counter[tuple[str, int]] = Counter()
        """Holder and id → how often its reports opened it again."""
        self._losses: dict[tuple[str, int], float] = {}
        self._evaluated: dict[int, float] = {}
        self._hits: dict[int, tuple[int, int]] = {}
        """Evaluated id → its targets that are predicted right, and that count."""

    # ── reports ─────────────────────────────────────────────────────────────────────────────────────────────

    def fault(self, contents: Sequence[Contents], losses: Mapping[int, float], step: int) -> str | None:
        """Reason to refuse a report on step number `step`, or None. An honest peer never gives one; a report
        of other steps' ids could reopen thousands of them.
        """
        checked_to, known = 0, self.ids | self.skipped
        for part in contents:
            if len(known.intersection(part.ids)) < len(part.ids):
                return f"a report of ids that are not of step {step}"
            if not checked_to <= part.begin < part.end:
                return "a report whose blocks are out of order"
            checked_to = part.end
        return None if losses.keys() <= known else f"losses of ids that are not of step {step}"

    # ── counting ────────────────────────────────────────────────────────────────────────────────────────────

    def report(
        self, holder: str, slot: int, contents: Sequence[Contents], losses: Mapping[int, float]
    ) -> SlotVerdict | None:
        """Note that `holder` has sealed `slot`.

        Its last slot, reported twice, gets the same answer and changes nothing; an earlier one gets None. The
        last block counts only with the losses of its ids: without one the commit's loss would be undefined.
        """
        settled, known = self._settled.get(holder, (-1, ()))
        if slot <= settled:
            return SlotVerdict(refused=known) if slot == settled else None
        verdict = SlotVerdict()
        refused: list[int] = []
        last = len(self._counted) - 1
        for part in contents:
            ids = self.ids.intersection(part.ids)
            for block in range(part.begin, min(part.end, len(self._counted))):
                sound = len(ids) == len(part.ids) and (block < last or ids <= losses.keys())
                if sound and self._count(holder, block, ids, verdict):
                    verdict.progress = True
                    runs = self._runs[block]
                    runs[holder] = (*runs.get(holder, ()), part.ids)
                else:
                    refused.append(block)
                    counted = self._counted[block].keys()
                    verdict.reopened |= ids - counted
                    self.unused.late(holder, ids & counted)
                    self.unused.lost(holder, ids - counted)
        verdict.reopened = self._may_reopen(holder, verdict.reopened) | verdict.displaced
        for microbatch in self.ids & losses.keys():
            self._losses[holder, microbatch] = losses[microbatch]
        verdict.refused = tuple(refused)
        self._settled[holder] = slot, verdict.refused
        return verdict

    def _may_reopen(self, holder: str, ids: set[int]) -> set[int]:
        """Ids that reports of `holder` have not opened too often."""
        fresh = {i for i in ids if self._reopened[holder, i] < MAX_REOPENED}
        self._reopened.update((holder, i) for i in fresh)
        return fresh

    def _count(self, holder: str, block: int, ids: frozenset[int], verdict: SlotVerdict) -> bool:
        """Count `ids` at `block` for `holder`; smaller slots that overlap are dropped. False: not counted."""
        counted = self._counted[block]
        rivals = {counted[i] for i in ids if i in counted}
        if rivals:
            theirs = {i for i, h in counted.items() if h in rivals}
            if holder in rivals or len(ids) <= len(theirs):
                return False
            for rival in rivals:
                verdict.evicted.setdefault(rival, []).append(block)
                del self._runs[block][rival]
            for microbatch in theirs:
                note = self.unused.late if microbatch in ids else self.unused.lost
                note(counted.pop(microbatch), (microbatch,))
            verdict.displaced |= theirs - ids
        counted.update(dict.fromkeys(ids, holder))
        return True

    def evaluated(self, losses: Mapping[int, float], hits: Mapping[int, tuple[int, int]]) -> bool:
        """Note losses and hits of evaluation microbatches; the first of an id count. Returns whether any was
        new.
        """
        fresh = {i: x for i, x in losses.items() if i in self.evaluation and i not in self._evaluated}
        self._evaluated.update(fresh)
        self._hits.update({i: hits[i] for i in fresh if i in hits and hits[i][0] <= hits[i][1]})
        return bool(fresh)

    def skip(self, microbatch: int) -> tuple[dict[str, list[int]], set[int]]:
        """Count `microbatch` nowhere any more.

        Returns holder → blocks at which its slot held it, and the other ids of those slots: they are open
        again.
        """
        self.skipped |= {microbatch}
        self.ids -= self.skipped
        self.evaluation -= self.skipped
        evicted: dict[str, list[int]] = {}
        reopened: set[int] = set()
        for block, counted in enumerate(self._counted):
            if (holder := counted.get(microbatch)) is not None:
                evicted.setdefault(holder, []).append(block)
                del self._runs[block][holder]
                theirs = {i for i, h in counted.items() if h == holder}
                for other in theirs:
                    del counted[other]
                reopened |= theirs - {microbatch}
                self.unused.lost(holder, theirs)
        return evicted, reopened

    def lose(self, holder: str) -> bool:
        """Drop `holder` and its slots. Returns whether anything that counted is open again."""
        lost = False
        for counted in self._counted:
            theirs = [i for i, h in counted.items() if h == holder]
            for microbatch in theirs:
                del counted[microbatch]
            self.unused.lost(holder, theirs)
            lost = lost or bool(theirs)
        for runs in self._runs:
            runs.pop(holder, None)
        self._settled.pop(holder, None)  # it may enter again, and numbers its slots from 0
        for key in [key for key in self._losses if key[0] == holder]:
            del self._losses[key]
        return lost

    def give_up(self) -> None:
        """Note all that counts as lost: the step is given up."""
        for counted in self._counted:
            for microbatch, holder in counted.items():
                self.unused.lost(holder, (microbatch,))

    def holder(self, block: int, microbatch: int) -> str | None:
        """The holder that counts `microbatch` at `block`, or None."""
        return self._counted[block].get(microbatch)

    def undone(self) -> set[int]:
        """Ids that are not counted at every block, and evaluation ids without a loss."""
        train = {i for counted in self._counted for i in self.ids - counted.keys()}
        return train | (self.evaluation - self._evaluated.keys())

    def is_undone(self, microbatch: int) -> bool:
        """Whether this id of the step is not done yet."""
        if microbatch in self.skipped:
            return False
        if microbatch in self.evaluation:
            return microbatch not in self._evaluated
        return any(microbatch not in counted for counted in self._counted)

    def complete(self) -> bool:
        """Whether every block has its exact cover and every evaluation microbatch its loss."""
        return not self.undone()

    def covers(self) -> dict[int, tuple[tuple[str, tuple[int, ...]], ...]]:
        """The exact cover of every block: (holder, ids in the order in which it adds them), by holder."""
        return {
            block: tuple((holder, tuple(chain.from_iterable(runs[holder]))) for holder in sorted(runs))
            for block, runs in enumerate(self._runs)
        }

    def runs(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Block → for each holder of its cover: lengths of the runs of its ids (`Cover.runs`)."""
        return {
            block: tuple(tuple(map(len, runs[holder])) for holder in sorted(runs))
            for block, runs in enumerate(self._runs)
        }

    # ── deciding ────────────────────────────────────────────────────────────────────────────────────────────

    def train_loss(self, weights: Mapping[int, float]) -> float:
        """Mean loss of the microbatches by their `weights`, by the last block's holder of each id."""
        last = self._counted[-1]
        return weighted_mean({i: self._losses[last[i], i] for i in self.ids}, weights)

    def evaluation_loss(self, weights: Mapping[int, float]) -> float:
        """Mean loss of the evaluation microbatches by their `weights`."""
        return weighted_mean({i: self._evaluated[i] for i in self.evaluation}, weights)

    def evaluation_hits(self) -> tuple[int, int] | None:
        """Targets of the evaluation that are predicted right, and that count.

        None if there are none, or a volunteer of an earlier version has not counted its own.
        """
        if not self.evaluation <= self._hits.keys():
            return None
        right, counted = (sum(self._hits[i][part] for i in self.evaluation) for part in (0, 1))
        return (right, counted) if counted else None


def weighted_mean(losses: Mapping[int, float], weights: Mapping[int, float]) -> float:
    """Mean of `losses`, each an id's, by the ids' `weights`."""
    return math.fsum(weights[i] * losses[i] for i in losses) / math.fsum(weights[i] for i in losses)


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor scaling a gradient of global 2-norm `norm` to at most `clip_norm` (torch's clip_grad_norm_)."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + CLIP_EPSILON))
