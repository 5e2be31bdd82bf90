"""Shared machines: processors on which several devices compute, lines behind which several send. Pure.

Volunteers of one processor slow each other down while they compute at the same time, and how many do differs
from plan to plan. So a step takes no less than all that they compute, each for its part of the processor: a
plan that balances them gains nothing beyond that. In the same way a line carries all that leaves the devices
behind it. What passes between two of them stays at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hetpeer.stages.planning.swarms.plan_inputs import Devices, Floats, Sharing, StepDemand


def line_rates(devices: Devices, sharing: Sharing) -> Floats:
    """Bytes/s that each device's line sends: as much as the best uplink behind it, (N,)."""
    rates = np.zeros(int(sharing.line.max()) + 1)
    np.maximum.at(rates, sharing.line, devices.uplink)
    each: Floats = rates[sharing.line]
    return each


def together(groups: np.ndarray, amounts: Floats) -> Floats:
    """The sum of `amounts` over the group of each device, (N,)."""
    each: Floats = np.bincount(groups, weights=amounts)[groups]
    return each


def least_s(devices: Devices, computing: Floats, sent: Floats) -> float:
    """Least seconds of a step in which device d computes `computing[d]` seconds, and sends `sent[d]` bytes
    that leave its line; 0 if nothing is shared.
    """
    sharing = devices.sharing
    if sharing is None:
        return 0.0
    processors = together(sharing.processor, sharing.part * computing)
    lines = together(sharing.line, sent) / np.maximum(line_rates(devices, sharing), 1e-300)
    return float(max(processors.max(), lines.max()))


def pipelines_s(
    devices: Devices, work: StepDemand, used: Sequence[tuple[Sequence[int], Sequence[int], int]]
) -> float:
    """Least seconds of a step's microbatches by what is shared; `used`: (devices, cuts, microbatches)."""
    sharing = devices.sharing
    if sharing is None:
        return 0.0
    computing, sent = np.zeros(len(devices)), np.zeros(len(devices))
    ways = work.compression
    for order, cuts, count in used:
        for device, (begin, end) in zip(order, pairwise(cuts), strict=True):
            flops = work.computed * work.flops[begin:end].sum()
            computing[device] += count * flops / devices.flops[device]
        for (one, other), border in zip(pairwise(order), cuts[1:-1], strict=True):
            if sharing.line[one] != sharing.line[other]:
                sent[one] += count * work.crossing[border] / ways.forward
                sent[other] += count * work.crossing[border] / ways.backward
    return least_s(devices, computing, sent)


def holders_s(
    devices: Devices, work: StepDemand, holders: Sequence[Sequence[int]], busy: Sequence[float]
) -> float:
    """Least seconds of a step whose microbatches each block's `holders` divide by speed, by what is shared.

    `busy`: seconds that a microbatch keeps a device busy.
    """
    sharing = devices.sharing
    if sharing is None:
        return 0.0
    computing, sent = np.zeros(len(devices)), np.zeros(len(devices))
    ways = work.compression
    for block, here in enumerate(holders):
        speeds = np.array([1.0 / busy[device] for device in here])
        counts = work.microbatches * speeds / speeds.sum()
        for device, count in zip(here, counts, strict=True):
            computing[device] += count * work.computed * work.flops[block] / devices.flops[device]
            for there, border, times in (
                (block - 1, block, ways.backward),
                (block + 1, block + 1, ways.forward),
            ):
                beside = holders[there] if 0 <= there < len(holders) else [device]
                if device not in beside and all(sharing.line[device] != sharing.line[d] for d in beside):
                    sent[device] += count * work.crossing[border] / times
    return least_s(devices, computing, sent)
