"""Speed of this machine on the blocks of its place, which are tried out on made-up tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hetpeer.stages.block.device import efficiency
from hetpeer.stages.graph.block_spec import BlockSpec, times_forward
from hetpeer.stages.ipc.block_commands import Rehearse
from hetpeer.stages.ipc.compute import Compute
from hetpeer.stages.ipc.worker_messages import CommandFailedError

BUDGET_S = 2.0
"""Seconds after which no further block is tried: the first ones of each device stand for the others."""

_log = logging.getLogger(__name__)


async def speed_on(compute: Compute, specs: Sequence[BlockSpec], flops_per_second: float) -> float:
    """FLOP/s that the devices reach on prepared blocks, of `flops_per_second` in large matrix products.

    Microbatches follow one another as fast as the slowest device. If a rehearsal fails for lack of memory,
    the products' speed stands: training reports that itself.
    """
    segments = compute.division.segments(specs[0].index, specs[-1].index + 1)
    slowest = 0.0
    for begin, end in segments:
        here = [spec for spec in specs if begin <= spec.index < end]
        try:
            slowest = max(slowest, await _seconds(compute, here, BUDGET_S / len(segments)))
        except CommandFailedError as error:
            _log.warning("a block could not be rehearsed: %s", error)
            return flops_per_second
    share = efficiency(sum(map(_flops, specs)), slowest, flops_per_second)
    _log.info("a microbatch takes %.0f ms here, %.0f%% of the device's speed", 1000 * slowest, 100 * share)
    return flops_per_second * share


async def _seconds(compute: Compute, specs: Sequence[BlockSpec], budget_s: float) -> float:
    """Seconds of a microbatch on one device, by those of the first blocks. Raises CommandFailedError."""
    flops = seconds = 0.0
    deadline = time.monotonic() + budget_s
    for spec in specs:
        seconds += (await compute.submit(Rehearse(block=spec.index))).seconds
        flops += _flops(spec)
        if flops and time.monotonic() > deadline:
            break
    return seconds * sum(map(_flops, specs)) / flops if flops else seconds


def _flops(spec: BlockSpec) -> float:
    return spec.flops_forward * times_forward(spec.recompute)
