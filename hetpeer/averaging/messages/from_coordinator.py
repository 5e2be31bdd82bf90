"""Messages of the coordinator to a volunteer (docs/protocol.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hetpeer.averaging.messages.message_fields import (
    MOST_MARKS,
    Amount,
    Block,
    Count,
    Cover,
    Digest,
    Entrant,
    Event,
    Heartbeat,
    Many,
    Mark,
    OfPlan,
    OfStep,
    Peer,
    Place,
    Range,
    Schema,
    Speed,
    Table,
    Task,
    TermView,
    Text,
    Ticket,
)


class Kept(Schema):
    """The last event line of the volunteer that is kept here (empty: none); the volunteer sends those after
    it.

    It is said once in a session, after Hello.
    """

    kind: Literal["kept"] = "kept"
    last: Event


class Amended(Schema):
    """The manifest's latest amendment (bootstrap/run/amendment.py), sent after Hello and when it is new."""

    kind: Literal["amended"] = "amended"
    amendment: Annotated[bytes, Field(max_length=1 << 16)]


class Commit(OfPlan):
    """Step `step` is decided: apply the gradients of plan `plan`, times `coefficient` (global-norm clipping).

    For an averaging the sums times `coefficient` are the parameters from version `step`+1 on, and there is no
    loss.
    """

    kind: Literal["commit"] = "commit"
    coefficient: float
    loss: float | None
    """Mean loss of the whole batch, nats per token."""
    digests: Table[Block, Digest]
    workers: Count = 1
    """Clusters that averaged last time: of how many gradients the next mean is."""


class Welcome(Schema):
    """Answer to Hello: the term-view, the version to load, and the places to choose from.

    In a grouped run a volunteer without a place gets a line whose cluster is EVERYBODY. `member` says that
    the volunteer still holds its place; `commit` repeats the last commit for a voter who missed it.
    """

    kind: Literal["welcome"] = "welcome"
    line: TermView
    version: Count
    member: bool
    places: Many[Place]
    commit: Commit | None = None
    since: Count | None = None
    """The view since which `version` has named this state; later roll-backs went to it. None: `line`'s."""
    backup: bool = False
    """The volunteer keeps its place and takes part in no step (docs/planning.md, "Backups")."""


class Granted(Schema):
    """The place is yours: load its graphs and say Prepared. From now on you are on this line."""

    kind: Literal["granted"] = "granted"
    line: TermView
    begin: Block
    end: Block
    backup: bool = False
    """You take part in no step until you are told to fetch the current version."""


class Refused(Schema):
    """The claimed place is taken; choose again."""

    kind: Literal["refused"] = "refused"
    why: Text
    places: Many[Place] = ()


class Fetch(Schema):
    """Load the state of `version` of your blocks. `sources`: holders per block; none: the coordinator."""

    kind: Literal["fetch"] = "fetch"
    line: TermView
    version: Count
    sources: Table[Block, Many[Peer]]
    digests: Table[Block, Digest] = Field(default_factory=dict)
    origin: Count = 0
    """The cluster whose state the coordinator has."""
    backup: bool = False
    """You are a backup, and fetch it behind the step. Without it you are none (any more)."""


class Begin(OfStep):
    """A step begins: the roster, and the microbatches of batch `batch` whose first hop is the receiver.

    Ids from `microbatches` on are held-out microbatches, forward only. With `group` above 0 nothing is
    trained: the clusters of that group average their parameters of version `step`. The roster is then that of
    all these clusters, and volunteers name the averaging by its group among each other.
    """

    kind: Literal["begin"] = "begin"
    batch: Count
    group: Count = 0
    delayed: bool = False
    """Copies of the parameters are averaged, and the next steps run meanwhile."""
    microbatches: Count
    roster: Table[Peer, Range]
    incarnations: Table[Peer, Count]
    tasks: Many[Task]
    target: Speed = 0.0
    """Seconds that a link is to take for a microbatch; 0: not known."""
    behind: Count = 0
    """Versions by which the parameters that the step is computed with are older than version `step`, which
    its update is applied to (docs/asynchronous.md).
    """
    mean: Count | None = None
    """The one of those versions that is made by installing the mean of the averaging beside the steps, and by
    no step; None: there is none. Since version 5.
    """
    entry: Count = 0
    """0 at the step's beginning; n for the n-th volunteer that comes in while it runs."""
    ticket: Ticket = b""
    """Admission ticket of a late joiner, signed by the coordinator (bootstrap/admission/step_tickets.py)."""
    weights: Many[Amount] = ()
    """Weight of each training microbatch in the mean loss, for holders of the last block; empty: its samples.

    Since version 5.
    """


class Joined(OfStep):
    """Volunteers that came into the step while it ran, and did not find everybody by themselves."""

    kind: Literal["joined"] = "joined"
    entrants: Annotated[tuple[Entrant, ...], Field(max_length=1 << 12)]


class Reroute(OfStep):
    """Microbatches that are handed out again within the step, with the receiver as first hop. None: seal what
    is done.

    With the same attempt as before it is advice for microbatches that have not begun: another route, perhaps
    one that begins at another volunteer (`Pipeline.assign`).
    """

    kind: Literal["reroute"] = "reroute"
    tasks: Many[Task]


class Gone(Schema):
    """Volunteers that left the roster: send their tasks elsewhere, ignore their messages."""

    kind: Literal["gone"] = "gone"
    line: TermView
    group: Count = 0
    peers: Many[Peer]


class Settled(OfStep):
    """The coordinator's word on a sealed slot: it counts, but for the blocks `refused`."""

    kind: Literal["settled"] = "settled"
    slot: Count
    refused: Many[Block] = ()


class Evict(OfStep):
    """Your accepted sums of these blocks do not count any more: drop them."""

    kind: Literal["evict"] = "evict"
    blocks: Many[Block]


class Check(OfStep):
    """Spot check `check`: `tasks[].route[0]` is to compute these microbatches once more.

    Where that hop begins with the data, it is the receiver; else the receiver has the bundles, and sends them
    there (docs/trust.md).
    """

    kind: Literal["check"] = "check"
    check: Annotated[int, Field(ge=1, lt=1 << 32)]
    tasks: Many[Task]


class Show(OfStep):
    """Show fingerprints, for a spot check.

    With a `peer`: of what it has sent you under `plan`. With `peer` empty: of what you have computed once
    more for `check`, at `marks`, whose values are empty here; and the digests of what others gave you for it.
    With yourself as `peer`: the digests of the inputs of what you count.
    """

    kind: Literal["show"] = "show"
    check: Annotated[int, Field(ge=1, lt=1 << 32)]
    plan: Count
    peer: Annotated[str, Field(max_length=128)] = ""
    marks: Annotated[tuple[Mark, ...], Field(max_length=1 << 12)] = ()


class Plan(OfPlan):
    """Reduce exactly these covers. A higher `plan` of the same step voids all lower ones."""

    kind: Literal["plan"] = "plan"
    covers: Many[Cover]
    closely: Many[Block] = ()
    """Votes on these are to name what has come from each reducer."""
    marks: Annotated[tuple[Mark, ...], Field(max_length=MOST_MARKS)] = ()
    """Ranges of your blocks, as reducer, at which what you receive is fingerprinted as well."""


class Prove(OfPlan):
    """All votes on `plan` agree: show fingerprints of your parts and of the sums at `marks`, under their
    keys.

    See docs/trust.md, "Proofs of sums".
    """

    kind: Literal["prove"] = "prove"
    marks: Annotated[tuple[Mark, ...], Field(max_length=MOST_MARKS)]


class Testify(OfPlan):
    """Say how the parts look that you have received under `plan` as reducer, at these."""

    kind: Literal["testify"] = "testify"
    marks: Annotated[tuple[Mark, ...], Field(max_length=MOST_MARKS)]


class RolledBack(Schema):
    """The run goes back to `version`: forget the step, keep nothing of an older line."""

    kind: Literal["rolled_back"] = "rolled_back"
    line: TermView
    version: Count
    why: Text


class Save(Schema):
    """Upload the state of these blocks (of `version`) for a checkpoint.

    `stored`: version of the last complete one, whose copies are worth keeping; None: there is none.
    """

    kind: Literal["save"] = "save"
    line: TermView
    version: Count
    blocks: Many[Block]
    stored: Count | None = None


class Fenced(Schema):
    """You are not in the roster any more: come back with a new incarnation."""

    kind: Literal["fenced"] = "fenced"
    why: Text


class Released(Schema):
    """Answer to a `Farewell` with `within_s`: go. `safe`: no committed step is lost with you."""

    kind: Literal["released"] = "released"
    safe: bool


class Finished(Schema):
    """The run is over; nothing more is to be done."""

    kind: Literal["finished"] = "finished"
    why: Text
    completed: bool


class Rejected(Schema):
    """You cannot take part: another wire version, another run, or not admitted (docs/admission.md)."""

    kind: Literal["rejected"] = "rejected"
    reason: Literal["version", "run", "banned", "uninvited", "work", "crowded"]
    why: Text


InStep = Reroute | Joined | Settled | Evict | Check | Show | Prove | Testify
"""Messages on a step in progress, except those that begin or end it."""

FromCoordinator = (
    Kept
    | Amended
    | Welcome
    | Granted
    | Refused
    | Fetch
    | Begin
    | Joined
    | Reroute
    | Gone
    | Settled
    | Evict
    | Check
    | Show
    | Plan
    | Prove
    | Testify
    | Commit
    | RolledBack
    | Save
    | Fenced
    | Released
    | Finished
    | Rejected
    | Heartbeat
)
