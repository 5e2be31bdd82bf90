"""Plans for the devices of a file, searched within a limit of processor time and printed.

`hetpeer plan --matrices`: a grid of equal stages and pipelines over devices with given links, by DT-FM's cost
model. `hetpeer plan --devices FILE --model MODEL`: the blocks of a model divided among different devices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.peer.limits.amounts import block_range, counted

if TYPE_CHECKING:
    from hetpeer.peer.planning.device_files import NamedDevices
    from hetpeer.peer.planning.model_workload import PresetChoices
    from hetpeer.stages.planning.device_network import DeviceNetwork
    from hetpeer.stages.planning.grids.grid_search import GridSearchResult
    from hetpeer.stages.planning.swarms.pipeline_cuts import PlannedStage
    from hetpeer.stages.planning.swarms.plan_inputs import StepDemand
    from hetpeer.stages.planning.swarms.plan_search import PlanSearchResult
    from hetpeer.stages.planning.swarms.swarm_plan import SwarmPlan

ENDING_S, ENDING = 0.4, 0.02
"""Reserve for the end of the search, printing and the interpreter's exit: seconds, and a share of the whole.
"""


def within(seconds: float) -> Callable[[], bool]:
    """A test, True while a search may go on for the whole command to take `seconds` of processor time."""
    until = seconds - max(ENDING_S, ENDING * seconds)
    return lambda: time.process_time() < until


@dataclass(frozen=True, slots=True, kw_only=True)
class GridQuestion:
    """The options of `hetpeer plan --matrices`. `gradient_gb` is the gradient of a stage, `activation_gb` the
    activations of a pipeline's whole batch; in GB (10^9 bytes).
    """

    matrices: Path
    stages: int
    replicas: int
    activation_gb: float
    gradient_gb: float
    seconds: float
    """Processor time of the whole command, from start to end."""
    seed: int
    model: str | None = None
    """The model whose blocks the stages share; needed for `out`."""
    out: Path | None = None
    """File for the plan to be enacted; None: none."""


def plan_grid(asked: GridQuestion, *, as_json: bool) -> None:
    """Print the best grid, and write it. Raises `LocalError` HP-PLAN-002 (unreadable matrices), HP-PLAN-003
    (grid size), HP-PLAN-004 (unknown model), HP-PLAN-007 (fewer blocks than stages).
    """
    from hetpeer.peer.planning.model_workload import planned_model, work_of
    from hetpeer.peer.planning.plan_files import equal_cuts, grid_seats, write_plan
    from hetpeer.stages.planning.grids.grid_costs import Prices, StepTraffic
    from hetpeer.stages.planning.grids.grid_search import search

    network, names = _network(asked)
    cuts = None if asked.model is None else equal_cuts(work_of(asked.model, None), asked.stages)
    traffic = StepTraffic(gradient_gb=asked.gradient_gb, activation_gb=asked.activation_gb)
    prices = Prices(network, traffic, asked.replicas)
    found = search(prices, asked.stages, asked.replicas, asked.seed, within(asked.seconds))
    if asked.out is not None and asked.model is not None and cuts is not None:
        best, model = found.best, planned_model(asked.model)
        write_plan(asked.out, grid_seats(best.grid, names, cuts, model, best.total_s))
    if as_json:
        print(json.dumps(_grid_document(found)))
    else:
        print("\n".join([*_grid_lines(found, names), *_written(asked.out)]))


def _network(asked: GridQuestion) -> tuple[DeviceNetwork, Sequence[str]]:
    """The device network of the file, and the devices' names.

    Raises `LocalError` HP-PLAN-* if it does not fit the grid.
    """
    from hetpeer.dht.base.errors import ExitCode, LocalError
    from hetpeer.stages.planning.device_network import DeviceNetwork, wrong

    try:
        document = json.loads(asked.matrices.read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise wrong(f"{asked.matrices}: {why}", "give a JSON file with both matrices") from None
    if not isinstance(document, dict):
        raise wrong(f"{asked.matrices} is not a JSON object", "give a JSON object with both matrices")
    network = DeviceNetwork.of(document)
    needed = asked.stages * asked.replicas
    if len(network) != needed:
        raise LocalError(
            "HP-PLAN-003",
            f"{len(network)} devices do not fill a grid of {asked.stages} stages and {asked.replicas} "
            "pipelines",
            why=f"that grid needs {needed} devices",
            fix="choose other --stages or --replicas, or other devices",
            exit_code=ExitCode.CONFIG,
        )
    return network, _names(document.get("names"), asked.matrices, len(network))


def _names(given: Any, path: Path, count: int) -> Sequence[str]:
    """The names of the file's devices; numbers from 0 if it has none. Raises `LocalError` HP-PLAN-002."""
    from hetpeer.stages.planning.device_network import wrong

    if given is None:
        return [str(number) for number in range(count)]
    if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
        raise wrong(f"{path}: names is no list of texts", "give a name for each device")
    if len(given) != count or len(set(given)) != count:
        raise wrong(f"{path}: {len(set(given))} different names for {count} devices", "name each device once")
    return given


def _grid_document(found: GridSearchResult) -> dict[str, Any]:
    best = found.best
    return {
        "data_parallel_s": best.data_parallel_s,
        "pipeline_s": best.pipeline_s,
        "total_s": best.total_s,
        "partition": best.partition,
        "grid": best.grid,
        "cpu_seconds": time.process_time(),
        "evaluations": found.evaluations,
    }


def _grid_lines(found: GridSearchResult, names: Sequence[str]) -> Iterator[str]:
    """Plain text, one fact a line."""
    best = found.best
    parts = f"{best.data_parallel_s:.3f} s for the gradients, {best.pipeline_s:.3f} s for the pipelines"
    yield f"{'step':<10}{best.total_s:.3f} s: {parts}"
    for number, devices in enumerate(best.grid):
        yield f"{'pipeline':<10}{number}: devices {' → '.join(names[device] for device in devices)}"
    yield f"{'searched':<10}{found.evaluations} grids in {time.process_time():.1f} s of processor time"


def _written(out: Path | None) -> Iterator[str]:
    """The line that says where the plan is, if it was written."""
    if out is not None:
        yield f"{'written':<10}{out}: hetpeer bootstrap DIR --plan {out}"


SCHEMA = "hetpeer.assignment/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmQuestion:
    """The options of `hetpeer plan --devices`."""

    devices: Path
    model: str
    microbatches: int | None
    ratio: float | None
    """Factor by which slow links may compress; None: as in the run."""
    seconds: float
    """Processor time of the whole command, from start to end."""
    seed: int
    choices: PresetChoices
    svg: Path | None = None
    """File for a drawing of the plan; None: no drawing."""
    out: Path | None = None
    """File for the plan to be enacted; None: none."""


def plan_swarm(asked: SwarmQuestion, *, as_json: bool) -> None:
    """Search, and print the best plan. Raises `LocalError` HP-PLAN-002 … HP-PLAN-005."""
    from hetpeer.bootstrap.run.durable_files import atomic_write
    from hetpeer.peer.planning.device_files import read_devices
    from hetpeer.peer.planning.model_workload import planned_model, too_small, work_of
    from hetpeer.peer.planning.plan_files import swarm_seats, write_plan
    from hetpeer.peer.watching.plan_picture import plan_picture
    from hetpeer.stages.planning.swarms.pipeline_cuts import PipelineCuts
    from hetpeer.stages.planning.swarms.plan_search import PlanSearch

    named = read_devices(asked.devices)
    work = named.of(work_of(asked.model, asked.microbatches, asked.ratio, asked.choices))
    found = PlanSearch(named.devices, work, asked.seed).run(within(asked.seconds))
    if found is None:
        raise too_small(named, work, asked.model)
    pipelines = PipelineCuts(named.devices, work)
    stages = [pipelines.stages(one.devices, one.cuts) for one in found.best.pipelines]
    if asked.svg is not None:
        drawn = plan_picture(found.best, stages, named.names, _spared(found.best, named), work)
        atomic_write(asked.svg, drawn.encode())
    if asked.out is not None:
        write_plan(asked.out, swarm_seats(found.best, named, planned_model(asked.model)))
    print(
        json.dumps(_document(found, stages, named, work))
        if as_json
        else "\n".join([*_lines(found, stages, named, work), *_written(asked.out)])
    )


def _spared(plan: SwarmPlan, named: NamedDevices) -> list[str]:
    used = {device for pipeline in plan.pipelines for device in pipeline.devices}
    return [name for number, name in enumerate(named.names) if number not in used]


def _fronts(plan: SwarmPlan, named: NamedDevices) -> list[tuple[str, str, str]]:
    """(from, to, relay) of neighbours in the plan that cannot reach each other directly."""
    pairs = (pair for one in plan.pipelines for pair in pairwise(one.devices))
    both = (way for one, other in pairs for way in ((one, other), (other, one)))
    return [(named.names[a], named.names[b], named.through[a, b]) for a, b in both if (a, b) in named.through]


def _document(
    found: PlanSearchResult, stages: Sequence[Sequence[PlannedStage]], named: NamedDevices, work: StepDemand
) -> dict[str, Any]:
    """The plan as JSON (see SCHEMA)."""
    best = found.best
    what, device = best.bottleneck
    return {
        "schema": SCHEMA,
        "total_s": best.total_s,
        "pipeline_s": best.pipeline_s,
        "sync_s": best.sync_s,
        "update_s": best.update_s,
        "between_s": work.between_s,
        "departures": None if best.departures is None else asdict(best.departures),
        "microbatches": work.microbatches,
        "staleness": work.staleness,
        "averaging": None if work.averaging is None else asdict(work.averaging),
        "bottleneck": {"what": what, "device": named.names[device]},
        "pipelines": [
            {
                "microbatches": share,
                "period_s": one.period,
                "fill_s": one.fill,
                "stages": [
                    {
                        "device": named.names[stage.device],
                        "blocks": [stage.begin, stage.end],
                        "computing_s": stage.computing,
                        "sending_s": stage.sending,
                        "memory_gib": stage.memory / 2**30,
                        "host_gib": stage.host / 2**30,
                        "disk_gib": stage.disk / 2**30,
                        "offload": stage.offload.value,
                    }
                    for stage in row
                ],
            }
            for one, share, row in zip(best.pipelines, best.shares, stages, strict=True)
        ],
        "fronts": [
            {"from": sender, "to": to, "through": front} for sender, to, front in _fronts(best, named)
        ],
        "spared": _spared(best, named),
        "cpu_seconds": time.process_time(),
        "evaluations": found.evaluations,
    }


def _lines(
    found: PlanSearchResult, stages: Sequence[Sequence[PlannedStage]], named: NamedDevices, work: StepDemand
) -> Iterator[str]:
    """Plain text, one fact a line."""
    best = found.best
    what, device = best.bottleneck
    pipeline_s, sync_s = f"{best.pipeline_s:.2f} s for the pipelines", f"{best.sync_s:.2f} s"
    parts = f"{pipeline_s}, {sync_s} for the gradients"
    if work.averaging is not None:
        parts = f"{pipeline_s}, each with its own batch, {sync_s} to average"
    elif work.staleness:
        parts = f"{work.staleness + 1} steps at a time, {parts} meanwhile"
    if best.update_s:
        parts += f", {best.update_s:.2f} s between GPU, main memory and disk"
    if work.between_s:
        parts += f", {work.between_s:.2f} s between one and the next"
    yield f"{'step' if work.averaging is None else 'batch':<10}{best.total_s:.2f} s: {parts}"
    if (costs := best.departures) is not None:
        often = f"{costs.rollbacks:.2g} roll-backs and {costs.leftovers:.2g} leftovers an hour"
        yield f"{'expected':<10}{costs.step_s:.2f} s with departures: {often}"
    for number, (one, share) in enumerate(zip(best.pipelines, best.shares, strict=True)):
        parts = " → ".join(
            f"{named.names[device]} {block_range(one.cuts[place], one.cuts[place + 1])}"
            for place, device in enumerate(one.devices)
        )
        pace = f"{counted(share, 'microbatch', 'microbatches')}, one in {one.period:.2f} s"
        yield f"{'pipeline':<10}{number}: {pace}: {parts}"
    for stage in (stage for row in stages for stage in row):
        needed = [(stage.memory, "memory"), (stage.host, "main memory"), (stage.disk, "disk")]
        told = ", ".join(f"{nbytes / 2**30:.1f} GiB of {name}" for nbytes, name in needed if nbytes)
        yield f"{'memory':<10}{named.names[stage.device]}: {told}; offload {stage.offload.value}"
    for sender, to, front in _fronts(best, named):
        yield f"{'relay':<10}{front} relays from {sender} to {to}"
    if spared := _spared(best, named):
        yield f"{'unused':<10}{', '.join(spared)}"
    yield f"{'slowest':<10}{named.names[device]}, which is {what}"
    yield f"{'searched':<10}{found.evaluations} plans in {time.process_time():.1f} s of processor time"
