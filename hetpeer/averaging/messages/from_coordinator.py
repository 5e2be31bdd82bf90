"""What the coordinator says to a volunteer. Docs: protocol.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hetpeer.averaging.messages.message_fields import (
    MOST_MARKS,
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
    """Said once in a session, after Hello: the last line of the volunteer that is kept here (empty: none); it sends those after it."""

    kind: Literal["kept"] = "kept"
    last: Event


class Amended(Schema):
    """Said after Hello, and when it is new: the latest amendment of the manifest (bootstrap/run/amendment.py), if there is one."""

    kind: Literal["amended"] = "amended"
    amendment: Annotated[bytes, Field(max_length=1 << 16)]


class Commit(OfPlan):
    """Step `step` is decided: apply plan `plan`'s gradients, scaled by `coefficient` (global-norm clipping).

    If it is an averaging: `coefficient` times the sums are the parameters from version `step`+1 on, and there is no loss.
    """

    kind: Literal["commit"] = "commit"
    coefficient: float
    loss: float | None
    """Of the whole batch, nats per token."""
    digests: Table[Block, Digest]
    workers: Count = 1
    """Clusters that averaged last time: of how many gradients the next mean is."""


class Welcome(Schema):
    """Answer to Hello: the line of history, the version to be at, and the places to choose from. Of whoever has no place yet in a
    grouped run the line is EVERYBODY's.

    `member` says that the volunteer still holds its place; `commit` repeats the last commit for a voter who missed it.
    """

    kind: Literal["welcome"] = "welcome"
    line: TermView
    version: Count
    member: bool
    places: Many[Place]
    commit: Commit | None = None


class Granted(Schema):
    """The place is yours: load its graphs and say Prepared. From now on you are on this line."""

    kind: Literal["granted"] = "granted"
    line: TermView
    begin: Block
    end: Block


class Refused(Schema):
    """The claimed place is taken; choose again."""

    kind: Literal["refused"] = "refused"
    why: Text
    places: Many[Place] = ()


class Fetch(Schema):
    """Load the state of `version` of your blocks; `sources` names holders per block (none: the coordinator)."""

    kind: Literal["fetch"] = "fetch"
    line: TermView
    version: Count
    sources: Table[Block, Many[Peer]]
    digests: Table[Block, Digest] = Field(default_factory=dict)
    origin: Count = 0
    """Of which cluster the coordinator has it."""


class Begin(Schema):
    """A step starts: who holds what, and the microbatches of batch `batch` whose first hop is the receiver.

    Ids from `microbatches` on are held-out microbatches, forward only. `group` above 0: no step, the clusters of that
    group average their parameters of version `step`; the roster is that of all of them, and among each other they name it by the group.
    """

    kind: Literal["begin"] = "begin"
    line: TermView
    step: Count
    batch: Count
    group: Count = 0
    delayed: bool = False
    """Of an averaging: of copies, and the next steps go on meanwhile."""
    microbatches: Count
    roster: Table[Peer, Range]
    incarnations: Table[Peer, Count]
    tasks: Many[Task]
    target: Speed = 0.0
    """Seconds that a link is to take for a microbatch; 0: not known."""
    behind: Count = 0
    """It is computed with the parameters of a version that is so many older than `step`, and its update made to version `step`
    (docs/asynchronous.md).
    """
    entry: Count = 0
    """0 at the step's beginning; the n-th who comes in while it runs has n."""
    ticket: Ticket = b""
    """For who comes in later: the coordinator's word that it takes part (admission ticket, bootstrap/admission/step_tickets.py)."""


class Joined(Schema):
    """These came into the step while it ran, and did not find everybody by themselves."""

    kind: Literal["joined"] = "joined"
    line: TermView
    step: Count
    entrants: Annotated[tuple[Entrant, ...], Field(max_length=1 << 12)]


class Reroute(Schema):
    """Microbatches that are handed out again within the step, starting at the receiver; in no newer attempt it is advice on what
    has not begun: another way, perhaps one that starts at somebody else (`Pipeline.assign`). Without tasks: seal what is done.
    """

    kind: Literal["reroute"] = "reroute"
    line: TermView
    step: Count
    tasks: Many[Task]


class Gone(Schema):
    """These volunteers left the roster: their tasks are to be sent elsewhere, their messages ignored."""

    kind: Literal["gone"] = "gone"
    line: TermView
    group: Count = 0
    peers: Many[Peer]


class Settled(Schema):
    """The coordinator's word on a sealed slot: it counts, but for the blocks `refused`."""

    kind: Literal["settled"] = "settled"
    line: TermView
    step: Count
    slot: Count
    refused: Many[Block] = ()


class Evict(Schema):
    """Your accepted sums of these blocks do not count any more: drop them."""

    kind: Literal["evict"] = "evict"
    line: TermView
    step: Count
    blocks: Many[Block]


class Check(Schema):
    """Spot check `check`: these are to be computed once more by `tasks[].route[0]`. Where that begins with the data it is the receiver; else the
    receiver has the bundles, and sends them there (docs/trust.md).
    """

    kind: Literal["check"] = "check"
    line: TermView
    step: Count
    check: Annotated[int, Field(ge=1, lt=1 << 32)]
    tasks: Many[Task]


class Show(Schema):
    """Show the fingerprints of what `peer` has sent you under `plan`; with `peer` empty, of what you have computed once more for `check`:
    those of `marks`, which lack their values, and digests of what others have given you for it. Where `peer` is you: such digests of what you count.
    """

    kind: Literal["show"] = "show"
    line: TermView
    step: Count
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
    """How what you receive of these as reducer is fingerprinted besides."""


class Prove(OfPlan):
    """All have voted alike on `plan`: say how your parts, and what has come of all, look at these of your blocks, under their keys (docs/trust.md, "Proofs of sums")."""

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
    """Upload the state of these blocks (of `version`) for a checkpoint."""

    kind: Literal["save"] = "save"
    line: TermView
    version: Count
    blocks: Many[Block]


class Fenced(Schema):
    """You are not in the roster any more: come back with a new incarnation."""

    kind: Literal["fenced"] = "fenced"
    why: Text


class Finished(Schema):
    """The run is over; nothing more is to be done."""

    kind: Literal["finished"] = "finished"
    why: Text
    completed: bool


class Rejected(Schema):
    """You cannot take part: another wire version, another run, or turned away at the door (docs/admission.md)."""

    kind: Literal["rejected"] = "rejected"
    reason: Literal["version", "run", "banned", "uninvited", "work", "crowded"]
    why: Text


InStep = Reroute | Joined | Settled | Evict | Check | Show | Prove | Testify
"""Of a step in progress, but for what begins and ends it."""

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
    | Finished
    | Rejected
    | Heartbeat
)
