"""Effects of the member core, besides the pipeline's (stages/pipeline/effects.py); a driver carries them out
from an `EffectQueue`.

Each effect names the method that its answer goes to: of `Member`, or of `Member.work` (work_in_progress.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hetpeer.averaging.messages import EVERYBODY, Cover, Mark, Message, Place, Prove, Show, TermView, Testify
from hetpeer.stages.pipeline import effects as p
from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.effects import Handle, Release

STATE: Final = -1
"""Stands for the parameters themselves, which clusters average, where a slot is named."""
COPY: Final = -2
"""The copy of them that was taken when a delayed averaging began."""


class StepId(NamedTuple):
    """One attempt at one step: the same number in another term-view is another step.

    A volunteer that leaves a step and enters it again has another `entry`, so that results of its first entry
    are not taken for results of the second. `batch` is the batch that is trained; `group` above 0 is the
    group that averages. When the step was opened, the newest version was `behind` versions older than the
    one that its update is applied to; `delays` says which of them each microbatch is computed with.
    """

    line: TermView
    number: int
    entry: int = 0
    batch: int = 0
    group: int = 0
    behind: int = 0
    delays: Delays = Delays()

    @property
    def base(self) -> int:
        """The version of the parameters with which it is begun."""
        return self.number - self.behind

    def version_of(self, microbatch: int, block: int) -> int:
        """The version of the parameters of `block` with which that is computed."""
        return self.number - self.delays.behind(self.behind, microbatch, block)

    def base_of(self, block: int) -> int:
        """The oldest version of the parameters of `block` that any microbatch is computed with."""
        return self.version_of(0, block)

    @property
    def on_wire(self) -> StepId:
        """The id that peers and tensors use. Steps are numbered per cluster; a group has one id for all."""
        if self.group:
            return StepId(TermView(term=self.line.term, view=0, cluster=EVERYBODY), self.group)
        return StepId(self.line, self.number)


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Choose:
    """Choose one of `places` that fits this machine → `Member.chosen`. The daemon ends if none fits."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load the graphs of the blocks [begin, end) into the worker → `Member.prepared`."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FetchState:
    """Load our blocks at `version` → `Member.state_loaded`. `sources`: block → holders; none: coordinator."""

    line: TermView
    version: int
    sources: Mapping[int, tuple[str, ...]]
    digests: Mapping[int, str]
    origin: int = 0
    """The cluster whose state the coordinator has."""

    def goes_on_as(self, later: FetchState, blocks: Iterable[int]) -> bool:
        """Whether what was loaded for this order counts for the `later` one: the same bits of all `blocks`.

        A version alone says too little, since it has other bits after a roll-back.
        """
        same = (self.line.cluster, self.origin, self.version, self.digests)
        known = set(blocks) <= self.digests.keys()
        return known and same == (later.line.cluster, later.origin, later.version, later.digests)


@dataclass(frozen=True, slots=True)
class SaveState:
    """Copy the states of the blocks in `digests` at `version` of `line`, for the coordinator's checkpoint.

    When it is carried out, the core may have given up that version: messages that waited for an update are
    handled one after the other. Earlier copies are dropped, except those of version `stored`.
    """

    line: TermView
    version: int
    digests: Mapping[int, str]
    stored: int | None = None
    """Version of the last complete checkpoint, to which the run may go back; None: there is none."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of one block's flat gradient in one plan: elements [begin, end), summed by `reducer`."""

    plan: int
    block: int
    index: int
    begin: int
    end: int
    reducer: str

    @property
    def length(self) -> int:
        """Elements."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send the elements of `shard` of our slot (or STATE or COPY) to its reducer, or ourselves (→ `part`)."""

    shard: Shard
    slot: int


@dataclass(frozen=True, slots=True)
class SumParts:
    """Add the parts, first copied and then added one by one in this order → `Member.summed`."""

    shard: Shard
    parts: tuple[Handle, ...]
    shared: bool = True
    """Whether anybody but us gets the sum."""
    holders: tuple[str, ...] = ()
    """Senders of the parts, in the same order."""
    marks: tuple[Mark, ...] = ()
    """Ranges and keys under which the parts are fingerprinted as well."""
    closely: bool = False
    """Whether each part is inspected too."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """Send the sum of `shard` to `to` (ourselves too → `Member.result`)."""

    shard: Shard
    to: str
    handle: Handle


@dataclass(frozen=True, slots=True)
class Land:
    """Move the sum of `shard` to its place in a vector of the elements [begin, end) of its block.

    The handle stays what it is. The vector is there until all handles in it are released. Unless a block that
    the sum counts for is inspected `closely`, tied elements may be added to their other uses at once.
    """

    shard: Shard
    handle: Handle
    begin: int
    end: int
    closely: bool = False


@dataclass(frozen=True, slots=True)
class ShareUplink:
    """Divide the uplink so that all links finish together: peer → elements that go there in this plan."""

    elements: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TiedPiece:
    """Consecutive shards of a block's reduced vector, from element `begin`."""

    begin: int
    shards: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Add the gradients of tied parameters (reduce/tied_parameters.py) to the landed shards of `block`, and
    inspect the whole.

    The inspection gives: finite, digest, norm → `inspected`. With `closely` each of `shards`, and of those in
    `tied`, is inspected too, in this order.
    """

    plan: int
    block: int
    shards: tuple[Handle, ...]
    tied: Mapping[int, TiedPiece] = field(default_factory=dict)
    closely: bool = False

    @property
    def pieces(self) -> tuple[Handle, ...]:
        """All shards that have come for the block, its own first."""
        return (*self.shards, *(shard for piece in self.tied.values() for shard in piece.shards))


@dataclass(frozen=True, slots=True)
class InspectSlot:
    """Inspect our `slot` where it lies → `inspected`: it is the sum of `block`, which we alone hold."""

    plan: int
    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class SlotSum:
    """A block's sum that lies in our slot of this number, and nowhere else."""

    slot: int


@dataclass(frozen=True, slots=True)
class Look:
    """Inspection of one shard: the digest of its bits, and whether all its elements are finite."""

    digest: str
    finite: bool


@dataclass(frozen=True, slots=True)
class ApplyUpdate:
    """Run the optimizer on `block` with `gradient`·`coefficient` → `Member.applied`; an `SlotSum` is used up.

    The block is one of `workers` replicas that will be averaged. `plan` reduced the gradient. Versions from
    `needed` on are kept: other steps are computed with them.
    """

    block: int
    plan: int
    gradient: Handle | SlotSum
    coefficient: float
    needed: int
    workers: int
    ids: frozenset[int]
    """Microbatches that the gradient is of: all of the step, but those that cannot be computed."""


@dataclass(frozen=True, slots=True)
class ShowMarks:
    """Show the coordinator fingerprints for a spot check as `asked`: of received data or the check's slot."""

    asked: Show


@dataclass(frozen=True, slots=True)
class ProveSums:
    """Show the coordinator, as `asked`, fingerprints of what we have sent and of the `sums` that came."""

    asked: Prove
    slots: Mapping[int, int]
    """Block → our slot that the plan adds there."""
    sums: Mapping[int, tuple[tuple[Shard, Handle], ...]]
    """Block → all of it, one shard behind the other."""


@dataclass(frozen=True, slots=True)
class TestifyParts:
    """Show the coordinator the fingerprints of what was received, as `asked`."""

    asked: Testify


@dataclass(frozen=True, slots=True)
class KeepCopy:
    """Copy the parameters of `block` as they are now: they are averaged while others are made of them."""

    block: int


@dataclass(frozen=True, slots=True)
class InstallAverage:
    """Set the parameters of `block` at `version` to `total`·`coefficient` → `Member.applied`.

    What has changed since their copy was taken is added. Versions from `needed` on are kept.
    """

    block: int
    plan: int
    version: int
    total: Handle
    coefficient: float
    needed: int


@dataclass(frozen=True, slots=True)
class RecordApplied:
    """Write to our own signed log what entered the update of `step` at each block (for the audit)."""

    step: StepId
    plan: int
    covers: tuple[Cover, ...]
    gradients: Mapping[int, str]
    states: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class EndStep:
    """Free every tensor, graph and slot of `step`; none is needed any more."""

    step: StepId


@dataclass(frozen=True, slots=True)
class Leave:
    """The coordinator fenced us: come back with a new incarnation."""

    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over (`completed`), or halted for the reason `why`; `rejected` if we may not take part."""

    why: str
    completed: bool
    rejected: str = ""


StepEffect = (
    p.Effect
    | SendPart
    | SumParts
    | SendResult
    | Land
    | ShareUplink
    | Inspect
    | InspectSlot
    | ApplyUpdate
    | ShowMarks
    | ProveSums
    | TestifyParts
    | KeepCopy
    | InstallAverage
)
"""Effects that belong to one step, or to one averaging."""


@dataclass(frozen=True, slots=True)
class InStep:
    """`effect` belongs to `step`; the driver gives `step` back with the answer."""

    step: StepId
    effect: StepEffect


Effect = (
    InStep
    | Release
    | Tell
    | Choose
    | Prepare
    | FetchState
    | SaveState
    | RecordApplied
    | EndStep
    | Leave
    | Stop
)
