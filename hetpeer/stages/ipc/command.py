"""What all commands to the compute worker have in common."""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Generic, TypeVar

from hetpeer.stages.ipc.results import Done

R = TypeVar("R")


class WorkerLane(enum.Enum):
    """What waits for what in the worker: DT-FM (arXiv 2206.01288, 3.5) receives, computes and sends at once."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"


class Command(Generic[R]):
    """Base of all commands; `R` is the answer when it succeeds, `answer` the same at run time."""

    __slots__ = ()
    answer: ClassVar[type[Any]] = Done
    lane: ClassVar[WorkerLane] = WorkerLane.COMPUTE
    kind: str
    """Tag on the wire and name in failpoints; each command's own."""
