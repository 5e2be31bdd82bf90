"""Division of some living clusters anew, with the devices that are in none (docs/grouped.md, "Living
clusters").

Pure except for `on`. The goal is that of clusters.py: useful batches a second of all clusters together. Never
all clusters: those that stay keep every batch that the others have trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hetpeer.stages.planning.swarms.clusters import NOTICED, Clusters, clusters_of, divided
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, PlannedPipeline
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand

MOST = 2
"""Clusters that are divided anew at once."""
LOOKS = 60
"""Questions whether there is time, of the search for one choice of clusters."""


@dataclass(frozen=True, slots=True)
class ClusterRecut:
    """Clusters after some of them were divided anew."""

    retiring: tuple[int, ...]
    """Those that are, as indices of the standing ones."""
    new: tuple[PlannedPipeline, ...]
    """New clusters of their devices and of those that were in none."""
    before: Clusters
    after: Clusters

    @property
    def gain(self) -> float:
        """Batches a second after it over those before it."""
        return self.after.batches_per_s / self.before.batches_per_s


def recut(
    devices: Devices,
    work: StepDemand,
    standing: Sequence[tuple[Sequence[int], Sequence[int]]],
    seed: int,
    on: Callable[[], bool],
) -> ClusterRecut | None:
    """The best new division found of at most `MOST` of the clusters `standing` while `on` is true.

    A cluster is (devices in order, cuts of its blocks). None if one does not fit by the planner's model, or
    nothing better was found. Raises ValueError if `work` does not say how often clusters average.

    standing = [((0, 1), (0, 4, 8)), ((2, 3), (0, 4, 8)), ((4, 5), (0, 4, 8))]
    found = recut(devices, work, standing, seed=0, on=lambda: time.monotonic() < deadline)
    """
    cuts = PipelineCuts(devices, work)
    lines = [cuts.at(tuple(order), tuple(borders)) for order, borders in standing]
    known = [line for line in lines if line is not None]
    if len(known) < len(lines) or len(known) < 2:
        return None
    before = clusters_of(devices, work, known)
    best: ClusterRecut | None = None
    for retiring in _choices(len(known)):
        if not on():
            break
        kept = [line for number, line in enumerate(known) if number not in retiring]
        free = sorted({*before.spare, *(d for number in retiring for d in known[number].devices)})
        found = divided(devices.some(free), work, seed, _on_for(LOOKS, on))
        if found is None:
            continue
        made = [
            cuts.at(tuple(free[device] for device in one.devices), one.cuts) for one in found.plan.pipelines
        ]
        new = tuple(one for one in made if one is not None)
        after = clusters_of(devices, work, [*kept, *new])
        if after.batches_per_s * NOTICED > (before if best is None else best.after).batches_per_s:
            best = ClusterRecut(retiring, new, before, after)
    return best


def _on_for(looks: int, on: Callable[[], bool]) -> Callable[[], bool]:
    """`on`, for so many questions."""
    left = iter(range(looks))
    return lambda: next(left, None) is not None and on()


def _choices(standing: int) -> Iterable[tuple[int, ...]]:
    """Clusters to divide anew: pairs first, since a single one has nobody to change places with."""
    for size in (MOST, *range(1, MOST)):
        if size < standing:
            yield from combinations(range(standing), size)
