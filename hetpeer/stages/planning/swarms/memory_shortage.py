"""How much memory is missing where no plan fits. Pure."""

from __future__ import annotations

from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts, roomiest_last
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand


def lacking(devices: Devices, work: StepDemand) -> tuple[int, float]:
    """(The device with most memory, bytes more on it that are enough): behind as many of the others as is best, the next largest first, it takes what is left. All
    blocks on it alone are one of these ways; the search looks at all of them.
    """
    pipelines = PipelineCuts(devices, work)
    orders = list(roomiest_last(devices, len(work)))
    last = orders[0][-1]
    return last, min(map(pipelines.needed_at_the_end, orders)) - float(devices.memory[last])
