"""`hetpeer plan --matrices`: a grid of equal stages and pipelines over devices with given links, by DT-FM's
cost model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpeer.stages.planning.device_network import DeviceNetwork
    from hetpeer.stages.planning.grids.grid_search import GridSearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
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


def plan_grid(asked: Question, *, as_json: bool) -> None:
    """Search, and print the best grid. Raises `LocalError` HP-PLAN-002 for matrices that cannot be read,
    HP-PLAN-003 for a grid of another size.
    """
    from hetpeer.peer.cli.cpu_limit import within
    from hetpeer.stages.planning.grids.grid_costs import Prices, StepTraffic
    from hetpeer.stages.planning.grids.grid_search import search

    network = _network(asked)
    traffic = StepTraffic(gradient_gb=asked.gradient_gb, activation_gb=asked.activation_gb)
    prices = Prices(network, traffic, asked.replicas)
    found = search(prices, asked.stages, asked.replicas, asked.seed, within(asked.seconds))
    print(json.dumps(_document(found)) if as_json else "\n".join(_lines(found)))


def _network(asked: Question) -> DeviceNetwork:
    from hetpeer.dht.base.errors import ExitCode, LocalError
    from hetpeer.stages.planning.device_network import DeviceNetwork, wrong

    try:
        document = json.loads(asked.matrices.read_bytes())
    except (OSError, ValueError) as error:
        raise wrong(f"{asked.matrices}: {error}", "give a JSON file with both matrices") from None
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
    return network


def _document(found: GridSearchResult) -> dict[str, Any]:
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


def _lines(found: GridSearchResult) -> Iterator[str]:
    """Plain text, one fact a line."""
    best = found.best
    parts = f"{best.data_parallel_s:.3f} s for the gradients, {best.pipeline_s:.3f} s for the pipelines"
    yield f"{'step':<10}{best.total_s:.3f} s: {parts}"
    for number, devices in enumerate(best.grid):
        yield f"{'pipeline':<10}{number}: devices {' → '.join(map(str, devices))}"
    yield f"{'searched':<10}{found.evaluations} grids in {time.process_time():.1f} s of processor time"
