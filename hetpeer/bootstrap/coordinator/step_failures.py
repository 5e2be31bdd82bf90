"""Microbatches of one step that holders report as failed: who else could do them, and which nobody can.

Pure. Only a peer that failed a microbatch itself counts when nobody else is left: whoever blames another may
be wrong. Before anything follows from a microbatch that all holders of a block have failed, the coordinator
computes it itself; that is its trial. step_verdicts.py decides what follows (docs/trust.md, "What cannot be
computed").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hetpeer.bootstrap.coordinator.step_ledger import StepLedger
from hetpeer.bootstrap.state.failed_microbatches import FailedMicrobatch
from hetpeer.stages.pipeline.routes import Roster, cheapest_path

MAX_FAILURES = 3
"""Failures after which a microbatch is not given to the holders of a block again: all failed it equally
often, this often in all. Further reports of one peer are ignored.
"""


class StepFailures:
    """Failures in step `number`, which trains `batch`.

    `roster` (peer → its blocks) and `ledger` are the step's own: their changes are seen here.
    """

    def __init__(self, number: int, batch: int, roster: Roster, blocks: int, ledger: StepLedger) -> None:
        self._number = number
        self._batch = batch
        self._roster = roster
        self._blocks = blocks
        self._ledger = ledger
        self._known: dict[int, list[tuple[str, str]]] = {}
        """Microbatch → (reporter, peer to blame: itself, the sender of the input; empty: one that left)."""
        self._failed: FailedMicrobatch | None = None
        self._trials: dict[int, str | None] = {}
        """Microbatch that the coordinator computes itself → what volunteers say of it; None: it could."""

    # ── reports ─────────────────────────────────────────────────────────────────────────────────────────────

    def hears(self, microbatch: int, peer: str) -> bool:
        """Whether one more report of `microbatch` by `peer` counts."""
        return [reporter for reporter, _ in self._known.get(microbatch, ())].count(peer) < MAX_FAILURES

    def add(self, microbatch: int, peer: str, culprit: str, why: str) -> bool:
        """Note that `peer` reports a failure and blames `culprit`. Returns whether anybody else can try."""
        blamed = culprit if culprit in self._roster else ""
        self._known.setdefault(microbatch, []).append((peer, blamed))
        self._failed = self._nobody_can(microbatch, why)
        return self._failed is None

    def forget(self, left: Collection[str]) -> None:
        """Forget reports of volunteers that have `left`: they may come back and try again."""
        for microbatch, known in self._known.items():
            self._known[microbatch] = [report for report in known if report[0] not in left]

    def take(self) -> FailedMicrobatch | None:
        """The microbatch that all holders of some block have failed since this was last asked."""
        failed, self._failed = self._failed, None
        return failed

    def who_else(self, microbatch: int) -> Roster:
        """Volunteers that cover all blocks: those nobody blames, else those that failed it least."""
        own, blamed = self._own(microbatch), {culprit for _, culprit in self._known[microbatch]}
        often = [
            {peer for peer, times in own.items() if times >= least} for least in range(1, MAX_FAILURES + 1)
        ]
        for out in (blamed, *often):
            others = {peer: place for peer, place in self._roster.items() if peer not in out}
            if cheapest_path(others, 0, self._blocks, {}) is not None:
                return others
        return self._roster

    def _own(self, microbatch: int) -> Counter[str]:
        """Peer → how often it failed the microbatch itself, by its own report."""
        return Counter(peer for peer, culprit in self._known[microbatch] if peer == culprit)

    def _nobody_can(self, microbatch: int, why: str) -> FailedMicrobatch | None:
        """The failure of `microbatch` at blocks whose holders have all failed it, if there are any."""
        own, roster, blocks = self._own(microbatch), self._roster, []
        for block in {block for peer in own.keys() & roster.keys() for block in range(*roster[peer])}:
            times = [own[peer] for peer, (begin, end) in roster.items() if begin <= block < end]
            if min(times) * len(times) >= MAX_FAILURES:
                blocks.append(block)
        if not blocks:
            return None
        holders = [p for p, (begin, end) in roster.items() if any(begin <= b < end for b in blocks)]
        return FailedMicrobatch(
            batch=self._batch,
            id=microbatch,
            blocks=tuple(sorted(blocks)),
            holders=tuple(sorted(holders)),
            times=own.total(),
            step=self._number,
            what=why,
        )

    # ── trials ──────────────────────────────────────────────────────────────────────────────────────────────

    def begins_trial(self, failure: FailedMicrobatch) -> bool:
        """Note that the coordinator is about to compute the microbatch of `failure`; False: it did before."""
        fresh = failure.id not in self._trials
        self._trials.setdefault(failure.id, failure.what)
        return fresh

    def awaits_trial(self, microbatch: int) -> bool:
        """Whether `microbatch` is undone, and what the coordinator finds of it is not known yet."""
        return self._trials.get(microbatch) is not None and self._ledger.is_undone(microbatch)

    def tried(self, microbatch: int) -> None:
        """Note that the coordinator found nothing wrong with `microbatch`: volunteers' failures count."""
        why, self._trials[microbatch] = self._trials[microbatch], None
        self._failed = self._nobody_can(microbatch, why or "")
