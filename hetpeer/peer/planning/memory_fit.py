"""The error for a model that does not fit into the devices' memory. Pure."""

from __future__ import annotations

import math

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.planning.device_files import GIB, NamedDevices
from hetpeer.stages.planning.swarms.pipeline_cuts import lacking
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand


def too_small(named: NamedDevices, work: StepDemand, model: str) -> LocalError:
    """HP-PLAN-005, with what would be enough."""
    device, missing = lacking(named.devices, work)
    more = math.ceil(10 * missing / GIB) / 10
    return LocalError(
        "HP-PLAN-005",
        f"{model} does not fit into the memory of these {len(named.names)} devices",
        why=f"their {named.devices.memory.sum() / GIB:.1f} GiB are not enough, or are spread over too small "
        "devices",
        fix=f"it needs {more:.1f} GiB more on {named.names[device]}, or more devices",
        exit_code=ExitCode.TOO_SMALL,
    )
