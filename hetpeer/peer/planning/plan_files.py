"""`plan.json`: the plan that `hetpeer plan --out` writes and `hetpeer bootstrap --plan` enacts.

    {
      "schema": "hetpeer.plan/1",
      "model": {"blocks": 12, "digest": "9f…"},
      "step_s": 4.2,
      "pipelines": [[{"device": "attic", "blocks": [0, 5]}, {"device": "office", "blocks": [5, 12]}]]
    }

Docs: planning.md, "A plan that is enacted". bootstrap/run/seat_plan.py has the fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.seat_plan import PlannedModel, PlannedSeat, SeatPlan, model_digest
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import first_wrong
from hetpeer.peer.planning.device_files import NamedDevices
from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan

SCHEMA = "hetpeer.plan/1"
FAMILY = "hetpeer.plan/"
MOST_BYTES = 1 << 24
AMPLE = 1e18
"""Bytes of memory and bytes/s of devices for which only their computing counts."""


def swarm_seats(plan: SwarmPlan, named: NamedDevices, model: PlannedModel) -> SeatPlan:
    """The seats of a plan for the devices of a file."""
    return SeatPlan(
        model=model,
        step_s=plan.total_s,
        pipelines=tuple(
            tuple(
                PlannedSeat(device=named.names[device], peer=named.peers[device], blocks=place)
                for device, place in zip(one.devices, pairwise(one.cuts), strict=True)
            )
            for one in plan.pipelines
        ),
    )


def equal_cuts(work: StepDemand, stages: int) -> list[tuple[int, int]]:
    """The blocks of each stage for equal devices, cut so that the busiest computes as little as possible.

    DT-FM's grids say nothing of blocks. Raises `LocalError` HP-PLAN-007 if there are too few blocks.
    """
    if stages > len(work):
        why = f"it has {stages} stages, and the model {len(work)} blocks"
        raise _foreign(why, "choose fewer --stages")
    ample = np.full(stages, AMPLE)
    devices = Devices(
        flops=np.ones(stages),
        memory=ample,
        uplink=ample,
        latency=np.zeros((stages, stages)),
        bandwidth=np.full((stages, stages), AMPLE),
    )
    best = PipelineCuts(devices, work).best(tuple(range(stages)))
    assert best is not None
    return list(pairwise(best.cuts))


def grid_seats(
    grid: Sequence[Sequence[int]],
    names: Sequence[str],
    cuts: Sequence[tuple[int, int]],
    model: PlannedModel,
    step_s: float,
) -> SeatPlan:
    """The seats of a grid: `grid` has a row of devices for each pipeline, `cuts` the blocks of each stage."""
    return SeatPlan(
        model=model,
        step_s=step_s,
        cost="dt-fm",
        pipelines=tuple(
            tuple(
                PlannedSeat(device=names[device], blocks=place)
                for device, place in zip(row, cuts, strict=True)
            )
            for row in grid
        ),
    )


def write_plan(path: Path, plan: SeatPlan) -> None:
    """Write `plan` to `path`, whole or not at all. Raises `LocalError` HP-DISK-*."""
    document = plan.document()
    head = {"schema": SCHEMA} | {name: document[name] for name in document if name != "pipelines"}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = [",\n   ".join(map(json.dumps, pipeline)) for pipeline in document["pipelines"]]
    pipelines = ",\n".join(f"  [{row}]" for row in rows)
    text = "\n".join(["{", *lines, ' "pipelines": [', pipelines, " ]", "}"])
    atomic_write(path, text.encode() + b"\n")


def read_plan(path: Path) -> SeatPlan:
    """The plan in a file. Raises `LocalError` HP-PLAN-006 if it is damaged, or another kind of file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _unreadable(path, f"it has more than {MOST_BYTES >> 20} MiB")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"it is not JSON ({error})") from None
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != SCHEMA:
        newer = isinstance(schema, str) and schema.startswith(FAMILY)
        known = f"it is of the form {schema!r}, and this version reads {SCHEMA}" if newer else None
        raise _unreadable(path, known or f"its schema is not {SCHEMA}")
    try:
        return SeatPlan.model_validate(document)
    except ValidationError as error:
        field, why = first_wrong(error)
        raise _unreadable(path, f"{field}: {why}" if field else why) from None


def check_fits(plan: SeatPlan, manifest: Manifest) -> None:
    """Raise `LocalError` HP-PLAN-007 unless the run with this manifest can be divided by `plan`."""
    blocks = len(manifest.blocks)
    if manifest.averaging is not None:
        raise _foreign("this is a run of mode grouped, whose clusters cut themselves", "leave out --plan")
    model = plan.model
    if model is not None and model.blocks != blocks:
        why = f"it is for a model of {model.blocks} blocks, and this run's has {blocks}"
        raise _foreign(why, "plan for this run (--model DIR)")
    if model is not None and model.digest and model.digest != model_digest(manifest):
        why = f"it is for another model of {blocks} blocks (the digests of the graphs differ)"
        raise _foreign(why, "plan for this run (--model DIR)")
    if fault := plan.fault(blocks):
        raise _foreign(fault, "correct the file, or plan again (hetpeer plan … --out)")


def _unreadable(path: Path, why: str) -> LocalError:
    """HP-PLAN-006."""
    return LocalError(
        "HP-PLAN-006",
        f"{path} is no plan that can be enacted",
        why=why,
        fix="make one with `hetpeer plan … --out FILE`",
        exit_code=ExitCode.CONFIG,
    )


def _foreign(why: str, fix: str) -> LocalError:
    """HP-PLAN-007."""
    return LocalError(
        "HP-PLAN-007",
        "the plan does not fit this run",
        why=why,
        fix=fix,
        exit_code=ExitCode.CONFIG,
    )
