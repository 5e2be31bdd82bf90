"""A plan to be enacted: which named volunteer is to have which blocks of which pipeline. Pure.

Docs: planning.md, "A plan that is enacted". `hetpeer plan --out` writes it as a file
(peer/planning/plan_files.py), and the log has it in a `planned` record, so that each coordinator knows it.

>>> attic = PlannedSeat(device="attic", blocks=(0, 2))
>>> plan = SeatPlan(pipelines=((attic, PlannedSeat(device="shed", blocks=(2, 4))),))
>>> plan.layouts
(((0, 2), (2, 4)),)
>>> attic.is_of("Qm3x9fQ2a", "attic")
True
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.dht.base.errors import short_id
from hetpeer.dht.base.untrusted import Amount, Count, Label, printable

MOST_PIPELINES: Final = 1024
MOST_STAGES: Final = 4096
Range = Annotated[tuple[Count, Count], Field(strict=False)]
PeerId = Annotated[str, Field(max_length=64, pattern=r"^[!-~]*$")]


class PlanPart(BaseModel):
    """A part of the document. Unknown fields are refused: a plan says what it means, or nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PlannedModel(PlanPart):
    """The model that a plan is for."""

    blocks: Annotated[int, Field(ge=1, le=4096)]
    digest: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")] = ""
    """`model_digest` of the run; empty: planned for a size that has no run."""


class PlannedSeat(PlanPart):
    """One stage of a pipeline: a device and its blocks [begin, end)."""

    device: Annotated[Label, Field(min_length=1)]
    """The volunteer's name (`hetpeer join --name`), as adverts have it: printable ASCII, 32 characters."""
    peer: PeerId = ""
    """Its peer id, which then counts alone; empty: whoever has the name."""
    blocks: Range

    def is_of(self, peer: str, name: str) -> bool:
        """Whether the seat is meant for `peer`, which is called `name`.

        A device may also be given as a peer id, or as name and short id, as `status --devices` names peers
        whose name others have, too.
        """
        if self.peer:
            return self.peer == peer
        return self.device in {printable(known) for known in (name, f"{name}{short_id(peer)}", peer)}


PlannedPipeline = Annotated[
    tuple[PlannedSeat, ...], Field(min_length=1, max_length=MOST_STAGES, strict=False)
]


class SeatPlan(PlanPart):
    """All seats of a plan, pipeline by pipeline; pipeline p is cluster p of the run."""

    model: PlannedModel | None = None
    step_s: Amount | None = None
    """Seconds of a step by the planner's cost model."""
    cost: Label = "swarm"
    """The cost model: swarm, or dt-fm, which counts communication only."""
    pipelines: Annotated[
        tuple[PlannedPipeline, ...], Field(min_length=1, max_length=MOST_PIPELINES, strict=False)
    ]

    @property
    def layouts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Each pipeline's cut of the blocks."""
        return tuple(tuple(seat.blocks for seat in pipeline) for pipeline in self.pipelines)

    def seats(self) -> Iterator[tuple[int, PlannedSeat]]:
        """(pipeline, seat) of all, in order."""
        for number, pipeline in enumerate(self.pipelines):
            for seat in pipeline:
                yield number, seat

    def document(self) -> dict[str, Any]:
        """Plain maps and lists for JSON and for the log."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def id(self) -> str:
        """Twelve hex digits that differ between plans."""
        text = json.dumps(self.document(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def fault(self, blocks: int) -> str | None:
        """Reason why the seats fit no model of `blocks` blocks, or name a device twice; None if they fit."""
        for number, pipeline in enumerate(self.pipelines):
            at = 0
            for seat in pipeline:
                begin, end = seat.blocks
                if begin != at or end <= begin:
                    found = f"{seat.device} has the blocks [{begin}, {end})"
                    return f"pipeline {number}: {found}, and block {at} comes next"
                at = end
            if at != blocks:
                return f"pipeline {number} ends before block {at}, and the model has {blocks} blocks"
        devices = Counter(seat.peer or seat.device for _, seat in self.seats())
        device, often = devices.most_common(1)[0]
        return f"{device} has {often} places" if often > 1 else None


def model_digest(manifest: Manifest) -> str:
    """64 hex digits over the graphs of a run's blocks; runs of one model and cut have the same."""
    graphs = ",".join(block.graph.blake3 for block in manifest.blocks)
    return hashlib.sha256(graphs.encode()).hexdigest()


def in_record(record: Mapping[str, Any]) -> SeatPlan:
    """The plan of a `planned` record."""
    return SeatPlan.model_validate(record["plan"])
