"""Refinement of a plan's cuts for the whole step. Pure except for `on`.

Cuts with the least period (pipeline_cuts.py) need not give the shortest step: the first microbatch and the
reduce count too, and pipelines cut alike reduce with fewer peers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan, planned

OrdersAndCuts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(devices in order, cuts of the blocks) for each pipeline."""

NOTICED = 1e-9
"""Improvements below this fraction of a step do not count."""


class CutRefinement:
    """Plans of `devices` for `work` with given borders. `pipelines` is their cache of cuts."""

    def __init__(self, devices: Devices, work: StepDemand, pipelines: PipelineCuts) -> None:
        self._devices, self._work, self._pipelines = devices, work, pipelines

    def plan(self, lines: OrdersAndCuts) -> SwarmPlan | None:
        """The plan with these cuts; None if memory or links do not allow them."""
        made = []
        for order, cuts in lines:
            one = self._pipelines.at(order, cuts)
            if one is None:
                return None
            made.append(one)
        return planned(self._devices, self._work, made)

    def alike(self, orders: Sequence[tuple[int, ...]]) -> SwarmPlan | None:
        """The plan with equal parts; None if there is none."""
        blocks = len(self._work)
        if any(len(order) > blocks for order in orders):
            return None
        return self.plan(
            tuple(
                (order, tuple(blocks * stage // len(order) for stage in range(len(order) + 1)))
                for order in orders
            )
        )

    def settled(self, plan: SwarmPlan, on: Callable[[], bool]) -> SwarmPlan:
        """`plan` with borders moved by one block, of one pipeline or of all with equally many stages, while
        that helps.

        Stops when `on` is false.
        """
        better = True
        while better:
            better = False
            for lines in self._moved(tuple((one.devices, one.cuts) for one in plan.pipelines)):
                if not on():
                    return plan
                other = self.plan(lines)
                if other is not None and other.total_s < plan.total_s * (1.0 - NOTICED):
                    plan, better = other, True
                    break
        return plan

    def _moved(self, lines: OrdersAndCuts) -> Iterator[OrdersAndCuts]:
        """All variants that differ in one border."""
        alike: dict[int, list[int]] = defaultdict(list)
        for number, (order, _) in enumerate(lines):
            alike[len(order)].append(number)
        together = [group for group in alike.values() if len(group) > 1]
        for group in [*together, *([number] for number in range(len(lines)))]:
            for border in range(1, len(lines[group[0]][0])):
                for by in (-1, 1):
                    moved = list(lines)
                    for number in group:
                        order, cuts = lines[number]
                        moved[number] = (order, (*cuts[:border], cuts[border] + by, *cuts[border + 1 :]))
                    if all(c[border - 1] < c[border] < c[border + 1] for _, c in (moved[n] for n in group)):
                        yield tuple(moved)
