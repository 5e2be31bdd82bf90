"""What the coordinator is told and what it decides: its settings, its states and its effects.

Effects are carried out in order; a `Record` is durable before anything behind it is begun (docs/protocol.md).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.check_rules import CheckRules
from hetpeer.bootstrap.state.membership import PLAIN, BlockDemand, Range
from hetpeer.stages.planning.swarms import plan_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What the manifest says of the run, and the time-outs. All durations are seconds of the coordinator's clock."""

    run: str
    steps: int
    sizes: Sequence[int]
    """Samples of each training microbatch; its ids are its places here."""
    evaluation_microbatches: int
    evaluate_every: int
    checkpoint_every: int
    clip_norm: float | None
    corrected: bool = False
    """Whether Adam's second moments are those of the mean gradient of clusters that average."""
    averaging_interval: int = 1
    """Batches that a cluster trains before it averages."""
    averaging_delayed: bool = False
    """Whether it goes on with the next ones meanwhile."""
    staleness: int = 0
    """So many steps begin before the one that they follow is committed (docs/asynchronous.md)."""
    fresh_steps: int = 0
    """But not those that train the first so many batches."""
    layouts: Sequence[Sequence[Range]]
    costs: Sequence[BlockDemand]
    asks: plan_inputs.StepDemand | None = None
    """What a step asks of its holders and their lines, by which places are compared for whoever comes; None: they are not."""
    ties: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Block -> the other blocks with which it shares parameters."""
    link_ratio: float = 1.0
    """How many times smaller a link may make what it sends."""
    compression: plan_inputs.Compression = PLAIN
    """The same as it comes out: routes count with it."""
    lease_s: float = 10.0
    """Nothing heard for so long: gone."""
    grace_s: float = 2.0
    """A broken stream may come back for so long (a restart of p2pd)."""
    sync_s: float = 120.0
    """A step waits at most so long for joiners that fetch state, or for the checkpoint from which volunteers are moved."""
    stall_s: float = 15.0
    """Nothing counted for so long: undone ids are handed out again. Doubles each time that it proves too short."""
    reduce_s: float = 20.0
    """A plan of which nothing has arrived anywhere for so long, and that is not voted on, is made anew; at the third time
    non-voters are fenced. Doubles too.
    """
    return_s: float = 15.0
    """After a restart, holders have so long to come back before the run goes back to the checkpoint."""
    checks: CheckRules | None = None
    """Of spot checks, if there are any."""
    move_s: float = 5.0
    """A block that nobody holds or prepares for so long is given to a volunteer who is redundant elsewhere."""

    @property
    def spot_checks(self) -> bool:
        """Whether a share of what volunteers count is computed once more."""
        return self.checks is not None and self.checks.share > 0

    @property
    def proves(self) -> bool:
        """Whether sums are proven before they are committed."""
        return self.checks is not None and self.spot_checks and self.checks.proves

    @property
    def microbatches(self) -> int:
        """M: training microbatches of one step."""
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class NextStep:
    """What a step does: train batch `batch`, or only look at the state with held-out microbatches (`trains` False)."""

    batch: int
    trains: bool = True
    evaluates: bool = False
    workers: int = 1
    """Of how many clusters' updates the mean is likely to be taken."""


class CoordinatorState(enum.Enum):
    """docs/protocol.md, coordinator states."""

    WAITING = "waiting"
    SYNCING = "syncing"
    TRAINING = "training"
    REDUCING = "reducing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to volunteer `to`."""

    to: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Record:
    """Append to the log and make durable before anything that follows."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the stream of `peer` after what was sent."""

    peer: str


@dataclass(frozen=True, slots=True)
class CollectCheckpoint:
    """Expect the state of `version`, each block from the named volunteer → `Coordinator.saved` or `.not_saved`."""

    line: m.Line
    """The one that is collected: another cluster may have a version of the same number, and so may this one after a roll-back."""
    version: int
    savers: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Halt:
    """The run is over: `completed`, or cannot go on for the reason `why`."""

    why: str
    completed: bool


Effect = Send | Record | Disconnect | CollectCheckpoint | Halt
