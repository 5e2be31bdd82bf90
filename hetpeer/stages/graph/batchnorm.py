"""Arguments of a BatchNorm call about its running values, which training changes (docs/graph.md). Pure."""

from __future__ import annotations

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import OperatorCall, Ref

BATCH_NORM = "hetpeer.batch_norm"
_ARGUMENTS = 7


def running_values(node: OperatorCall) -> tuple[Ref, Ref]:
    """The running mean and variance that a batch_norm call reads. Raises ProtocolError if it names none."""
    mean, variance = node.args[3:5] if len(node.args) == _ARGUMENTS else (None, None)
    if not isinstance(mean, Ref) or not isinstance(variance, Ref):
        raise ProtocolError(f"{node.name!r} has no running mean and variance")
    return mean, variance


def momentum(node: OperatorCall) -> float:
    """Weight of a new statistic in a batch_norm call. Raises ProtocolError unless it is a number
    in [0, 1].
    """
    value = node.args[5] if len(node.args) == _ARGUMENTS else None
    if type(value) is not float or not 0 <= value <= 1:
        raise ProtocolError(f"{node.name!r} has the momentum {value!r}")
    return value
