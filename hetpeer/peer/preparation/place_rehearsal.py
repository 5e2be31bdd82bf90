"""Speed of this machine on the blocks of its place, before it has their state."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hetpeer.stages.block.efficiency import efficiency
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.compute import Compute
from hetpeer.stages.ipc.results import CommandFailedError
from hetpeer.stages.planning.swarms.plan_inputs import times_forward

BUDGET_S = 2.0
"""Seconds after which no further block is tried: the first ones stand for the others."""

_log = logging.getLogger(__name__)


async def speed_on(compute: Compute, specs: Sequence[BlockSpec], flops_per_second: float) -> float:
    """FLOP/s that the device reaches on prepared blocks: `flops_per_second`, of a large matrix product, times
    λ.

    If the rehearsal fails for lack of memory, the place stays without λ: training reports that itself.
    """
    flops = seconds = 0.0
    deadline = time.monotonic() + BUDGET_S
    for spec in specs:
        try:
            seconds += (await compute.submit(c.Rehearse(block=spec.index))).seconds
        except CommandFailedError as error:
            _log.warning("block %d could not be rehearsed: %s", spec.index, error)
            return flops_per_second
        flops += spec.flops_forward * times_forward(spec.recompute)
        if time.monotonic() > deadline:
            break
    share = efficiency(flops, seconds, flops_per_second)
    _log.info("a microbatch takes %.0f ms here, %.0f%% of the device's speed", 1000 * seconds, 100 * share)
    return flops_per_second * share
