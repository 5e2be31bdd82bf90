"""SWARM's way (Ryabinin et al., ICML 2023): stages of equal layers, each held by several devices, and any
device of a stage sends to any of the next.

A fluid model at its best: devices are put where speed is lacking most, each microbatch goes to whoever of the
next stage is free (so that a stage does as many as its devices do together), nobody waits for anybody, and
sums are divided by uplinks as ours are. SWARM prefers peers that answer fast: here a device sends to its
nearest of the next stage, whether that has time for it or not, so nothing that routes like this is faster.
Where lines may compress, they do as far as they can. Memory is asked as of ours: as many microbatches are
under way as 1F1B has. Of all numbers of stages the best. Written from the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hetpeer.stages.planning.swarms.plan_inputs import Devices, Floats, StepDemand
from hetpeer.stages.planning.swarms.swarm_plan import adding_up

Stages = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fluid:
    """How it would be done, and in how many seconds at best."""

    step_s: float
    period_s: float
    """Seconds of a microbatch at the device that computes it for longest."""
    parts: tuple[tuple[int, int], ...]
    """Blocks of each stage."""
    stages: Stages
    """Devices of each."""
    rates: Mapping[int, float]
    """Microbatches a second of each device, with its lines."""
    fill_s: float
    """A microbatch alone, there and back."""
    after_s: float
    """Sums of gradients."""


def all_of(devices: Devices, work: StepDemand) -> list[Fluid]:
    """Those that fit, by number of stages."""
    most = min(len(devices), len(work))
    found = [_with(devices, work, number) for number in range(1, most + 1)]
    return [one for one in found if one is not None]


def best(devices: Devices, work: StepDemand) -> Fluid | None:
    """The pipelines with the shortest step, over all numbers of stages; None if none fits."""
    return min(all_of(devices, work), key=lambda one: one.step_s, default=None)


def _with(devices: Devices, work: StepDemand, number: int) -> Fluid | None:
    """With so many stages; None where somebody fits nowhere else and a stage has nobody."""
    cuts = [len(work) * stage // number for stage in range(number + 1)]
    parts = list(pairwise(cuts))
    flops = np.array([work.flops[begin:end].sum() * work.computed for begin, end in parts])
    stages = _placed(devices, work, parts, flops)
    if not all(stages):
        return None
    rate, fill, period = np.inf, 0.0, 0.0
    rates: dict[int, float] = {}
    for place, peers in enumerate(stages):
        seconds = flops[place] / devices.flops[peers]
        fill += float(seconds.mean())
        period = max(period, float(seconds.max()))
        lines = np.zeros(len(peers))
        together = np.zeros(len(peers))
        back, on = work.compression.backward, work.compression.forward
        for beside, border, times in ((place - 1, parts[place][0], back), (place + 1, parts[place][1], on)):
            if 0 <= beside < number:
                nbytes = float(work.crossing[border]) / times
                carried, latency = _lines(devices, peers, stages[beside], nbytes)
                lines, together = np.maximum(lines, carried), together + nbytes / devices.uplink[peers]
                fill += float(carried.mean() + latency)
        each = 1.0 / np.maximum(seconds, np.maximum(lines, together))
        rates |= dict(zip(peers, each.tolist(), strict=True))
        rate = min(rate, float(each.sum()))
    holders = [stages[place] for place, (begin, end) in enumerate(parts) for _ in range(begin, end)]
    after_s = float(adding_up(devices, work, holders).max())
    return Fluid(
        step_s=fill + (work.microbatches - 1) / rate + after_s,
        period_s=period,
        parts=tuple(parts),
        stages=stages,
        rates=rates,
        fill_s=fill,
        after_s=after_s,
    )


def _placed(devices: Devices, work: StepDemand, parts: list[tuple[int, int]], flops: Floats) -> Stages:
    """The fastest first, each at the stage that has the least speed for its work of those for which it has
    memory.
    """
    stages: Stages = [[] for _ in parts]
    speed = np.zeros(len(parts))
    needed = np.array(
        [
            work.memory[begin:end].sum()
            + min(2 * behind + 1, work.microbatches)
            * (work.kept[begin:end].sum() + 2 * (work.crossing[begin] + work.crossing[end]))
            for behind, (begin, end) in zip(range(len(parts) - 1, -1, -1), parts, strict=True)
        ]
    )
    for device in np.argsort(-devices.flops, kind="stable"):
        lacking = np.where(needed <= devices.memory[device], speed / flops, np.inf)
        place = int(lacking.argmin())
        if np.isfinite(lacking[place]):
            stages[place].append(int(device))
            speed[place] += devices.flops[device]
    return stages


def _lines(devices: Devices, peers: list[int], others: list[int], nbytes: float) -> tuple[Floats, float]:
    """Seconds of so many bytes from each of `peers` to its nearest of `others`, and the mean latency to
    that.
    """
    pairs = np.ix_(peers, others)
    with np.errstate(divide="ignore"):
        carried: Floats = (nbytes / devices.bandwidth[pairs]).min(axis=1)
    return carried, float(devices.latency[pairs].min(axis=1).mean())
