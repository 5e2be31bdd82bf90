"""Settings, states and effects of the coordinator.

Effects are carried out in order; a `Record` is durable before anything after it begins (docs/protocol.md).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.conduct.reputation import CheckRules
from hetpeer.bootstrap.run.seat_plan import SeatPlan
from hetpeer.bootstrap.state.membership import PLAIN, BlockDemand
from hetpeer.dht.channels.redial import LONGEST_PAUSE_S, longest_absence_s
from hetpeer.stages.planning.swarms import plan_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Settings from the manifest, and timeouts in seconds of the coordinator's clock."""

    run: str
    steps: int
    sizes: Sequence[int]
    """Training id → its samples; an id is an index into this."""
    weights: Callable[[int], Sequence[float]] | None = None
    """Batch → the weight of each training id in the mean loss; None: its samples."""
    evaluation_microbatches: int
    evaluation_weights: Sequence[float] = ()
    """Weight of each held-out microbatch in the mean held-out loss; empty: all are alike."""
    evaluate_every: int
    checkpoint_every: int
    clip_norm: float | None
    corrected: bool = False
    """Whether Adam's second moments are those of the mean gradient of averaging clusters."""
    averaging_interval: int = 1
    """Batches that a cluster trains before it averages."""
    averaging_sparse: bool = False
    """Whether all clusters are in every averaging, and everybody adds up their movements."""
    averaging_delayed: bool = False
    """Whether a cluster trains on while it averages."""
    skips: bool = False
    """Whether samples that cannot be computed are left out; otherwise they halt the run."""
    staleness: int = 0
    """Steps that may begin before the one before them is committed (docs/asynchronous.md)."""
    fresh_steps: int = 0
    """First batches of the run, which are trained without staleness."""
    layouts: Sequence[Sequence[Range]]
    costs: Sequence[BlockDemand]
    asks: plan_inputs.StepDemand | None = None
    """Work of a step, by which places are compared for newcomers; None: they are not."""
    placement: str = "step-time"
    """Policy by which places are compared (placement_policies.py)."""
    plan: SeatPlan | None = None
    """A plan to be enacted, unless it was already (planned_seats.py)."""
    ties: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Block -> the other blocks with which it shares parameters."""
    link_ratio: float = 1.0
    """Largest factor by which a link may shrink its bundles."""
    link_warmup: int = 0
    """First batches, in which that factor rises to it."""
    compression: plan_inputs.Compression = PLAIN
    """The compression that results; routes take it into account."""
    lease_s: float = 10.0
    """A volunteer that was not heard for this long is lost."""
    grace_s: float = 2.0
    """A broken stream may come back within this time (a restart of p2pd)."""
    sync_s: float = 120.0
    """Longest wait for joiners that fetch a state, or for the checkpoint before volunteers are moved."""
    stall_s: float = 15.0
    """Undone ids are handed out again after this long without a count; doubles if it proves too short."""
    reduce_s: float = 20.0
    """A plan is renewed after this long without news; the third time mute holders are fenced. Doubles too."""
    return_s: float = longest_absence_s(1)
    """Seconds after a restart for holders to come back before the run rolls back to the checkpoint.

    Longer than a volunteer needs to find a coordinator that is back (dht/channels/redial.py).
    """
    absence_s: float = 10.0
    """Least wait for the last holder of a block that fell silent and may come back with its state."""
    cut_off_s: float = LONGEST_PAUSE_S
    """Wait for such a holder if its stream was closed, and a backup has the last checkpoint.

    A volunteer that lives has tried again by then.
    """
    checks: CheckRules | None = None
    """Rules of spot checks; None: nothing is checked."""
    gather_s: float = 0.0
    """Seconds without a newcomer until the first clusters are founded as they came; 0: at once."""
    spare_s: float = 40.0
    """Seconds that a volunteer waits for a cluster of its own until it becomes a replica in a living one."""
    move_s: float = 5.0
    """A redundant volunteer is moved to a block that nobody has held or prepared for this long."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """Work of the next step: train batch `batch`, or only evaluate the state (`trains` False)."""

    batch: int
    trains: bool = True
    evaluates: bool = False
    workers: int = 1
    """Clusters whose updates the mean is likely to be taken of."""
    after_mean: bool = False
    """Whether the mean of the averaging under way comes between the steps that run and this one."""


class CoordinatorState(enum.Enum):
    """States of docs/protocol.md, "States of the coordinator"."""

    WAITING = "waiting"
    SYNCING = "syncing"
    TRAINING = "training"
    REDUCING = "reducing"
    FINISHED = "finished"


AT_BARRIER = (CoordinatorState.WAITING, CoordinatorState.SYNCING)
"""States in which no step runs."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to volunteer `to`."""

    to: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Record:
    """Append `record` to the log and make it durable before any later effect."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the stream of `peer` after sending what was said before."""

    peer: str


@dataclass(frozen=True, slots=True)
class CollectCheckpoint:
    """Expect the state of `version`, each block from its saver → `Coordinator.saved` or `.not_saved`."""

    line: m.TermView
    """Term, view and cluster of the state: other clusters and views may have a version of the same number."""
    version: int
    savers: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class TryMicrobatch:
    """Compute microbatch `id` of `batch` here, from the last checkpoint → `tried` of the core.

    All holders of a block have failed it. `cluster`: the one that trains it.
    """

    cluster: int
    batch: int
    id: int


@dataclass(frozen=True, slots=True)
class BadSample:
    """Finding of `TryMicrobatch`: the microbatch cannot be computed."""

    where: str
    """Its bad samples, by shard."""
    why: str


@dataclass(frozen=True, slots=True)
class Halt:
    """The run is over: `completed`, or unable to go on because of `why`."""

    why: str
    completed: bool


Effect = Send | Record | Disconnect | CollectCheckpoint | TryMicrobatch | Halt
