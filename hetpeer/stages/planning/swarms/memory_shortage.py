"""The missing memory when no plan fits. Pure."""

from __future__ import annotations

from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, roomiest_last
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand


def lacking(devices: Devices, work: StepDemand) -> tuple[int, float]:
    """(device with most memory, additional bytes on it that would suffice).

    Behind the best number of other devices, the next largest first, it takes the remaining blocks. Having all
    blocks on it alone is one of these cases; the search tries all of them.
    """
    pipelines = PipelineCuts(devices, work)
    orders = list(roomiest_last(devices, len(work)))
    last = orders[0][-1]
    return last, min(map(pipelines.needed_at_the_end, orders)) - float(devices.memory[last])
