"""The base of all commands to the compute worker."""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Generic, TypeVar

from hetpeer.stages.ipc.results import Done

R = TypeVar("R")


class WorkerLane(enum.Enum):
    """Lanes of the worker: receiving, computing and sending overlap (DT-FM, arXiv 2206.01288,
    section 3.5).
    """

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"


class Command(Generic[R]):
    """Base of all commands; `R` is the answer on success, `answer` the same at run time."""

    __slots__ = ()
    answer: ClassVar[type[Any]] = Done
    lane: ClassVar[WorkerLane] = WorkerLane.COMPUTE
    kind: str
    """Tag on the socket, and name in failpoints; each command's own."""
