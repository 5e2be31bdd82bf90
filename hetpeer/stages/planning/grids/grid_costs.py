"""Costs of a grid of pipelines and stages by DT-FM's model, in which only communication takes time. Pure.

Source: Yuan et al., Decentralized Training of Foundation Models in Heterogeneous Environments, NeurIPS 2022
(arXiv 2206.01288), sections 3.2-3.3, Eq. 1-4. Links are taken to be alike both ways: latency and bandwidth
are averaged, as the authors do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetpeer.stages.planning.device_network import DeviceNetwork
from hetpeer.stages.planning.grids.group_path import Floats, Ints, length_of, matched, shortest_path

BITS = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """GB (10^9 bytes) sent in a step: a stage's gradient, and the activations of a pipeline's whole batch."""

    gradient_gb: float
    activation_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCost:
    """Seconds of a step (Eq. 1) and its grid: `grid[i][j]` is the device of pipeline i at stage j."""

    data_parallel_s: float
    pipeline_s: float
    grid: tuple[tuple[int, ...], ...]

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return self.data_parallel_s + self.pipeline_s

    @property
    def partition(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage, in the pipeline's order."""
        return tuple(zip(*self.grid, strict=True))


class Prices:
    """Prices of pairs of devices in seconds; N x N, symmetric, 0 on the diagonal."""

    def __init__(self, network: DeviceNetwork, traffic: StepTraffic, replicas: int) -> None:
        latency = (network.latency_s + network.latency_s.T) / 2
        bandwidth = (network.bandwidth_gbit_s + network.bandwidth_gbit_s.T) / 2
        own = np.eye(len(latency), dtype=np.bool_)
        with np.errstate(divide="ignore"):
            per_gb = BITS / np.where(own, 1.0, bandwidth)
        self.reducing: Floats = np.where(own, 0.0, 2 * (latency + traffic.gradient_gb / replicas * per_gb))
        """2 (latency + c_dp / (D_DP bandwidth)): a shard of the gradient there and the sum back (Eq. 2)."""
        self.passing: Floats = np.where(own, 0.0, 2 * (latency + traffic.activation_gb * per_gb))
        """2 (latency + c_pp / bandwidth): activations forward, gradients back (Eq. 3)."""


def cost_of(prices: Prices, partition: Sequence[Sequence[int]] | Ints) -> GridCost:
    """The best grid of a partition into stages of equal size: their order, and the pairs between them."""
    groups = [np.array(group, dtype=np.intp) for group in partition]
    reducing = max(prices.reducing[np.ix_(group, group)].sum(axis=1).max() for group in groups)
    distances = np.zeros((len(groups), len(groups)))
    for a, one in enumerate(groups):
        for b, other in enumerate(groups[:a]):
            distances[a, b] = distances[b, a] = matched(prices.passing[np.ix_(one, other)])[0]
    order = shortest_path(distances)
    return GridCost(
        data_parallel_s=float(reducing),
        pipeline_s=length_of(distances, order),
        grid=_lined_up(prices, [groups[place] for place in order]),
    )


def as_it_is(prices: Prices, grid: Ints) -> float:
    """Seconds of a grid (R, K), whose row i is pipeline i, as it stands (Eq. 1)."""
    columns = list(grid.T)
    reducing = max(prices.reducing[np.ix_(group, group)].sum(axis=1).max() for group in columns)
    passing = sum(prices.passing[one, other].max() for one, other in pairwise(columns))
    return float(reducing + passing)


def _lined_up(prices: Prices, groups: Sequence[Ints]) -> tuple[tuple[int, ...], ...]:
    """Pipelines: each stage's devices in the order of those before them that send to them."""
    columns = [groups[0]]
    for group in groups[1:]:
        _, pairs = matched(prices.passing[np.ix_(columns[-1], group)])
        columns.append(group[pairs])
    return tuple(tuple(int(device) for device in row) for row in np.stack(columns, axis=1))


def lower_bound(prices: Prices, stages: int, replicas: int) -> float:
    """A lower bound of all grids' seconds.

    Data parallel: some device pays at least the sum of its replicas - 1 cheapest partners. Pipeline: a hop
    costs at least what the worst device at either end pays for its cheapest partner; the groups' worst,
    sorted, are at least those of a partition by that price.
    """
    reducing = np.sort(prices.reducing + np.diag(np.full(len(prices.reducing), np.inf)), axis=1)
    data_parallel = reducing[:, : replicas - 1].sum(axis=1).max() if replicas > 1 else 0.0
    nearest = np.sort((prices.passing + np.diag(np.full(len(prices.passing), np.inf))).min(axis=1))
    worst = nearest[replicas - 1 :: replicas][:stages]
    return float(data_parallel + worst[1:].sum())
