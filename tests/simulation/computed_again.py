"""A simulated history computed again by one machine, which adds in the order that the commits' covers name.

Every gradient and every state must have the run's bits: what a replay promises of real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.audit.replay_script import ids_in_turn
from hetpeer.bootstrap.log.evidence import FoldingOrder, order_of
from tests.simulation.checked_symbols import CheckedNumerics

Covers = Mapping[int, m.Cover]
"""Block → cover that was applied."""


def differences(
    numerics: CheckedNumerics,
    ties: Ties,
    steps: Sequence[tuple[Covers, Mapping[str, Any]]],
    base: Callable[[int, int, int], int],
    states: Callable[[int, int], str],
) -> list[str]:
    """The first step whose numbers are not the run's, with its blocks; an empty list if there is none.

    `steps`: covers and commit record of each; `base`: (step, id, block) → version that it is computed with;
    `states`: (version, block) → digest of the run's state.
    """
    blocks = range(numerics.blocks)
    versions = [[numerics.initial(block) for block in blocks]]
    for step, (covers, commit) in enumerate(steps):
        orders = [order_of(covers[block].slots, covers[block].runs) for block in blocks]
        if any(order is None for order in orders):
            return [f"step {step} does not say in which order it was added up"]
        sums = _sums(
            numerics,
            orders,
            lambda i, step=step: (step, i, [versions[base(step, i, block)][block] for block in blocks]),
        )
        sums = [_tied(numerics, ties, block, sums) for block in blocks]
        wrong = [b for b in blocks if numerics.inspect(b, sums[b])[0] != commit["gradients"][b]]
        coefficient = commit["coefficient"]
        versions.append([numerics.apply(versions[step][b], sums[b], coefficient) for b in blocks])
        wrong += [b for b in blocks if numerics.digest(versions[-1][b]) != states(step + 1, b)]
        if wrong:
            return [f"step {step} block {block} has other bits" for block in sorted(set(wrong))]
    return []


def _sums(
    numerics: CheckedNumerics,
    orders: Sequence[FoldingOrder],
    task: Callable[[int], tuple[int, int, Sequence[Any]]],
) -> list[Any]:
    """Block → its sum; `task`: id → (batch, id, states that it is computed with)."""
    parts: list[dict[int, Any]] = [{} for _ in orders]
    for microbatch in ids_in_turn(orders):
        batch, number, states = task(microbatch)
        kept, bundle = [], None
        for block, state in enumerate(states):
            graph, bundle = numerics.forward([state], block, (batch, number), bundle)
            kept.append(graph)
        back = None
        for block in reversed(range(len(states))):
            back, (parts[block][microbatch],) = numerics.backward(kept[block], back)

    def folded(terms: Sequence[Any]) -> Any:
        return reduce(lambda total, term: numerics.add([total, term]), terms)

    return [
        numerics.add([folded([folded([own[i] for i in run]) for run in runs]) for _, runs in order])
        for own, order in zip(parts, orders, strict=True)
    ]


def _tied(numerics: CheckedNumerics, ties: Ties, block: int, sums: Sequence[Any]) -> Any:
    partners = ties.partners(block)
    return numerics.tie(block, sums[block], {p: (0, sums[p]) for p in partners}) if partners else sums[block]
