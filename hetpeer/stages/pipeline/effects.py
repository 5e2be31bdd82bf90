"""Effects of the pipeline core: what its driver has to do.

The core never touches a tensor: `Handle` names one that the driver keeps (an arena extent in the daemon, a
counter in the simulator). The driver reports back with `forward_done`, `backward_done`, `work_failed`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from hetpeer.stages.block.rounding import UNMEASURED, Rounding
from hetpeer.stages.pipeline.gradient_slots import Drop, Merge
from hetpeer.stages.pipeline.routes import Route

Handle = Hashable


class TaskKey(NamedTuple):
    """One microbatch at one holder: its id and the first block run here."""

    id: int
    begin: int
    check: int = 0
    """Above 0: a repetition for the spot check of that number, which counts nowhere."""


@dataclass(frozen=True, slots=True)
class RunForward:
    """Run blocks [key.begin, end). `source` None: the microbatch comes from the data order. `train` keeps the
    graph.

    `hops_after` hops of its route follow this one.
    """

    key: TaskKey
    end: int
    source: Handle | None
    train: bool
    hops_after: int


@dataclass(frozen=True, slots=True)
class RunBackward:
    """Run the backward of `key`'s kept graph; add the gradients of the blocks `fold` to slot `slot`.

    `gradient` None: the graph ends in the loss. The driver may release `gradient` and the forward's source
    afterwards.
    """

    key: TaskKey
    end: int
    gradient: Handle | None
    slot: int
    fold: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForgetGraph:
    """Forget the kept graph of `key`."""

    key: TaskKey


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Send `handle`, the bundle that enters block `route[0].begin`, to `route[0].peer`. Keep it.

    With `check` the receiver recomputes it for that spot check. With `asks` the receiver has an activation of
    another peer for it, and has to compare the two and return the gradient that it keeps.
    """

    id: int
    route: Route
    attempt: int
    handle: Handle
    check: int = 0
    asks: bool = False


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Send `handle`, the gradient of the bundle that enters block `border`, to `to`. Keep it.

    With `check` the receiver has one from another peer, and compares the two for that spot check.
    """

    id: int
    to: str
    border: int
    handle: Handle
    check: int = 0


@dataclass(frozen=True, slots=True)
class CompareBundle:
    """Compare `handle`, sent by `peer` for spot check `check`, with what others sent in its place.

    The coordinator is told the result.

    `handle` is the bundle that enters block `border`, or with `back` its gradient.
    """

    check: int
    id: int
    border: int
    back: bool
    peer: str
    handle: Handle


@dataclass(frozen=True, slots=True)
class Release:
    """Free this tensor."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class ReportSealed:
    """Tell the coordinator the content of a sealed slot: ids of each block, losses of ids that ended here."""

    slot: int
    ids: dict[int, tuple[int, ...]]
    losses: dict[int, float]


@dataclass(frozen=True, slots=True)
class ReportEvaluated:
    """Tell the coordinator the loss of an evaluation microbatch, and its targets: (right ones, all)."""

    id: int
    loss: float
    hits: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """Tell the coordinator that a microbatch failed; `given`: the peer whose tensor is at fault."""

    id: int
    why: str
    given: str = ""


@dataclass(frozen=True, slots=True)
class ReportChecked:
    """Tell the coordinator that the gradients of `key` are in the slot of its spot check; and `rounding`."""

    key: TaskKey
    rounding: Rounding = UNMEASURED


Effect = (
    RunForward
    | RunBackward
    | ForgetGraph
    | SendActivation
    | SendGradient
    | CompareBundle
    | Release
    | ReportSealed
    | ReportEvaluated
    | ReportFailed
    | ReportChecked
    | Merge
    | Drop
)
