"""The steps that one machine must compute again, and their results, read from the run's and volunteers' logs.

Pure. A step of the script says in which order gradients are added up (`FoldingOrder`), so that one machine
adds in the very same order. Steps are grouped into segments, each from a checkpoint that is kept to the next
one; a segment is computed on its own (one_machine.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hetpeer.bootstrap.audit.log_checks import MajorityStatements
from hetpeer.bootstrap.log.evidence import AppliedEvent, CodedBundles, Evidence, FoldingOrder
from hetpeer.bootstrap.log.history import Decision, History, Record, decisions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSum:
    """A block's part of a step, as the majority of its holders signed it."""

    order: FoldingOrder
    """Order of addition."""
    ordered: bool
    """Whether that is the run's own order; otherwise the logs do not say, and it is any."""
    gradient: str
    state: str
    """Digests of the applied sum, and of the state after the update."""
    entered: Sequence[CodedBundles] = ()
    returned: Sequence[CodedBundles] = ()
    """How activations that entered the block were coded, and gradients that came back to it."""
    passed_on: Sequence[CodedBundles] = ()
    given_back: Sequence[CodedBundles] = ()
    """How activations that left the block were coded, and gradients of its inputs."""

    @property
    def holders(self) -> list[str]:
        """Volunteers whose slots were added up."""
        return sorted({holder for holder, _ in self.order})


NOTHING = BlockSum(order=(), ordered=True, gradient="", state="")
"""In place of the block before the first one, and behind the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStep:
    """A committed step: what to compute, and what came out in the run."""

    step: int
    batch: int
    behind: int
    workers: int
    loss: float
    norm: float
    squares: Sequence[float]
    """Squared norm of each block's gradient; empty in logs of an earlier version."""
    coefficient: float
    blocks: Sequence[BlockSum]
    """The sums, by block index."""
    arithmetics: frozenset[str]
    """Arithmetics (block/arithmetic.py) of the volunteers whose slots were added; "" if one did not say."""
    skipped: Sequence[int] = ()
    """Microbatches that cannot be computed, by the commit."""

    def work(self) -> dict[str, Any]:
        """The step as one_machine.py reads it.

        Both ends of a link say how its bundles were coded; the word of the receiver, which has computed with
        them, comes last and counts. If it was killed before its line was kept, the sender's does.
        """
        return {
            "step": self.step,
            "batch": self.batch,
            "behind": self.behind,
            "workers": self.workers,
            "skipped": self.skipped,
            "orders": [block.order for block in self.blocks],
            "entered": [
                [*before.passed_on, *block.entered] for before, block in pairwise([NOTHING, *self.blocks])
            ],
            "returned": [
                [*after.given_back, *block.returned] for block, after in pairwise([*self.blocks, NOTHING])
            ],
            "states": [block.state for block in self.blocks],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive steps from a stored state on. `base`: record of its checkpoint."""

    base: Record
    steps: Sequence[ReplayStep]
    evaluations: Mapping[int, float]
    """Version → held-out loss of the run."""
    unevaluated: Mapping[int, Sequence[int]]
    """Version → held-out microbatches that cannot be computed, by the log."""
    end: Record | None
    """Record of the checkpoint at its end, if that is kept."""
    hits: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Version → held-out targets that were predicted right, and that count, if the log says so."""

    @property
    def arithmetic(self) -> str:
        """The one arithmetic of all volunteers whose work is in its steps; empty if it is not known, or if
        the order of additions is not.
        """
        found = frozenset[str]().union(*(one.arithmetics for one in self.steps))
        ordered = all(block.ordered for one in self.steps for block in one.blocks)
        return next(iter(found)) if ordered and len(found) == 1 else ""

    def work(self) -> dict[str, Any]:
        """The segment as one_machine.py reads it."""
        return {
            "base": dict(self.base),
            "steps": [one.work() for one in self.steps],
            "evaluations": [
                (version, self.unevaluated.get(version, ())) for version in sorted(self.evaluations)
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayScript:
    """The surviving steps of a run, in order."""

    steps: Sequence[ReplayStep]
    evaluations: Mapping[int, float]
    """Version → held-out loss."""
    unevaluated: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Version → held-out microbatches that cannot be computed, by the log."""
    hits: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Version → held-out targets that were predicted right, and that count."""

    @classmethod
    def of(cls, records: Sequence[Record], evidence: Evidence, blocks: int) -> ReplayScript:
        """Script of a run that is not grouped, up to the first step of which a block is not known."""
        history, heard = History.of(records), MajorityStatements.of(evidence.applied)
        known = {peer: {event.arithmetic for event in events} for peer, events in evidence.lives.items()}
        steps = []
        for step in range(history.version):
            commit = history.commits.get(step)
            if commit is None:
                break
            [one] = decisions_of(commit)
            told = [heard.applied.get((*one.key, block), []) for block in range(blocks)]
            if not all(told):
                break
            steps.append(replay_step(commit, one, [block_sum(events) for events in told], known))
        return cls(
            steps=steps,
            evaluations=dict(history.evaluations),
            unevaluated=dict(history.unevaluated),
            hits=dict(history.hits),
        )

    def segments(self, bases: Sequence[Record]) -> list[Segment]:
        """Segments that together are the whole script. `bases`: records of the checkpoints that are kept.

        Where steps overlap, a step may need parameters older than a checkpoint: then it is no base.
        """
        length = len(self.steps)
        oldest = [one.step - one.behind for one in self.steps]
        kept = {int(base["version"]): base for base in bases}
        starts = sorted(
            version
            for version in kept
            if version < max(length, 1) and all(other >= version for other in oldest[version:])
        )
        return [
            Segment(
                base=kept[start],
                steps=self.steps[start:end],
                evaluations={
                    version: loss
                    for version, loss in sorted(self.evaluations.items())
                    if start <= version < end or version == end == length
                },
                unevaluated=self.unevaluated,
                end=kept.get(end),
                hits=self.hits,
            )
            for start, end in pairwise([*starts, length])
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number of the run that another machine does not get."""

    step: int
    what: str
    """`loss`, `norm`, `gradient`, `state`, …"""
    blocks: tuple[int, ...] = ()
    holders: tuple[str, ...] = ()
    """Volunteers whose gradients are in the sums of these blocks."""
    off: float | None = None
    """Relative difference, where processors differ; None: equality was due."""
    bound: float | None = None
    """Relative difference that rounding can make."""
    cluster: int = 0
    """Cluster of a grouped run."""

    def __str__(self) -> str:
        name = f"block{'s' if len(self.blocks) > 1 else ''} {', '.join(map(str, self.blocks))}"
        where = f" of {name}" if self.blocks else ""
        whose = f" (computed by {', '.join(self.holders)})" if self.holders else ""
        step = f"step {self.step} of cluster {self.cluster}" if self.cluster else f"step {self.step}"
        said = f"{step}: the {self.what}{where} is not what one machine gets{whose}"
        return (
            said if self.off is None else f"{said}: {self.off:.1e} off, and rounding makes {self.bound:.1e}"
        )


def replay_step(
    commit: Record, decision: Decision, sums: Sequence[BlockSum], arithmetics: Mapping[str, AbstractSet[str]]
) -> ReplayStep:
    """The step of a commit. `arithmetics`: volunteer → what its lines say of its machine."""
    holders = {holder for found in sums for holder in found.holders}
    return ReplayStep(
        step=decision.step,
        batch=decision.batch,
        behind=decision.behind,
        workers=commit.get("workers", 1),
        loss=commit["loss"],
        norm=commit["norm"],
        squares=commit.get("squares", ()),
        coefficient=commit["coefficient"],
        blocks=sums,
        skipped=decision.skipped,
        arithmetics=frozenset().union(*(arithmetics.get(holder, {""}) for holder in holders)),
    )


def block_sum(events: Sequence[AppliedEvent]) -> BlockSum:
    """A block's part of an update, by the lines of holders that agree on it."""
    said = events[0]
    any_order = tuple((holder, (tuple(sorted(ids)),)) for holder, ids in said.cover)
    return BlockSum(
        order=said.order or any_order,
        ordered=said.order is not None,
        gradient=said.gradient,
        state=said.state,
        entered=[coded for event in events for coded in event.entered],
        returned=[coded for event in events for coded in event.returned],
        passed_on=[coded for event in events for coded in event.passed_on],
        given_back=[coded for event in events for coded in event.given_back],
    )


def reversed_order(order: FoldingOrder) -> FoldingOrder:
    """The same sums, with every addition in the opposite order."""
    return tuple(
        (holder, tuple(tuple(reversed(run)) for run in reversed(runs))) for holder, runs in reversed(order)
    )


def ids_in_turn(orders: Sequence[FoldingOrder]) -> list[int]:
    """Ids of a step in an order in which most gradients can be added at once, and few must be kept.

    `orders`: each block's. The id that comes next in most runs goes first; of two the smaller.
    """
    runs = [list(run) for order in orders for _, slots in order for run in slots]
    at = [0] * len(runs)
    left = sorted({microbatch for run in runs for microbatch in run})
    found: dict[int, None] = {}
    while left:
        heads: dict[int, int] = {}
        for run, position in zip(runs, at, strict=True):
            if position < len(run):
                heads[run[position]] = heads.get(run[position], 0) + 1
        chosen = max(left, key=lambda microbatch: (heads.get(microbatch, 0), -microbatch))
        left.remove(chosen)
        found[chosen] = None
        for index, run in enumerate(runs):
            while at[index] < len(run) and run[at[index]] in found:
                at[index] += 1
    return list(found)
