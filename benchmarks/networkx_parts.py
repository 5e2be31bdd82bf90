"""Own code that works on graphs beside networkx: communities, the sync graph, borders, connected sub-DAGs.

Communities: Louvain on prices of devices in 50 regions, ours on full matrices, networkx' on all pairs and on
each device's 16 nearest. CPU seconds, and modularity of the coarsest level on all pairs.
Sync graph: CPU microseconds to note a group of eight of N workers (the last 4 N groups count), ours and
networkx' connected components. networkx' graph is built anew each time, since edges of old groups expire.
Borders: bytes that cross each border of a model's blocks, and networkx' least cut (`minimum_cut`) within the
two blocks beside it that sends nothing back. A value counts once, however many read it.
Sub-DAGs: the cut into blocks beside halving by least cuts (sub_dags.py).

    python -m benchmarks.networkx_parts
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import networkx as nx
import numpy as np

from benchmarks import report, sub_dags
from benchmarks.scenarios.networks import STAGES, TRAFFIC, regions
from hetpeer.averaging.groups.group_scheduler import SyncGraph
from hetpeer.bootstrap.authoring.model_costs import plan_model
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.examples import gpt
from hetpeer.peer.watching.operator_graph import operator_graph
from hetpeer.stages.graph.graph_cost import BlockCostRow
from hetpeer.stages.planning.device_clusters import communities
from hetpeer.stages.planning.grids.grid_costs import Prices

DEVICES = (64, 256, 1000)
REGIONS = 50
NEAREST = 16
WORKERS = (16, 64)
GROUP, SPAN, GROUPS = 8, 4, 500

Found = TypeVar("Found")


def timed(act: Callable[[], Found]) -> tuple[float, Found]:
    """(CPU seconds, result)."""
    began = time.process_time()
    found = act()
    return time.process_time() - began, found


def louvain(devices: int, seed: int) -> dict[str, dict[str, float]]:
    """Way → `cpu_s`, `modularity`, `communities`."""
    seconds = Prices(regions(seed, devices, REGIONS), TRAFFIC, devices // STAGES).passing
    weights = np.divide(1.0, seconds, out=np.zeros_like(seconds), where=seconds > 0)
    near = np.argsort(-weights, axis=1)[:, :NEAREST]
    sparse = np.zeros_like(weights)
    np.put_along_axis(sparse, near, np.take_along_axis(weights, near, axis=1), axis=1)
    sparse = np.maximum(sparse, sparse.T)

    def theirs(matrix: np.ndarray) -> np.ndarray:
        found = np.empty(devices, dtype=np.intp)
        for number, group in enumerate(
            nx.community.louvain_communities(nx.from_numpy_array(matrix), seed=seed)
        ):
            found[list(group)] = number
        return found

    ways: dict[str, Callable[[], np.ndarray]] = {
        "hetpeer": lambda: communities(seconds, np.random.default_rng(seed))[-1],
        "networkx, all pairs": lambda: theirs(weights),
        f"networkx, {NEAREST} nearest": lambda: theirs(sparse),
    }
    rows = {}
    for way, act in ways.items():
        cpu_s, own = timed(act)
        degree, total = weights.sum(axis=1), weights.sum()
        inside = own[:, None] == own[None, :]
        modularity = float((weights[inside].sum() - (np.outer(degree, degree)[inside]).sum() / total) / total)
        rows[way] = {"cpu_s": cpu_s, "modularity": modularity, "communities": float(len(np.unique(own)))}
    return rows


def sync(workers: int, seed: int) -> dict[str, float]:
    """Way → CPU microseconds a group. Both say after each group into how many parts the workers fall."""
    random = np.random.default_rng(seed)
    names = [f"worker {number}" for number in range(workers)]
    groups = [[names[one] for one in random.permutation(workers)[:GROUP]] for _ in range(GROUPS)]

    def ours() -> list[int]:
        graph, parts = SyncGraph(SPAN, names), []
        for group in groups:
            graph.add(group)
            parts.append(graph.parts)
        return parts

    def theirs() -> list[int]:
        last: deque[list[str]] = deque(maxlen=SPAN * workers - 1)
        parts = []
        for group in groups:
            last.append(group)
            graph: nx.Graph[str] = nx.Graph()
            graph.add_nodes_from(names)
            for one in last:
                nx.add_star(graph, one)
            parts.append(nx.number_connected_components(graph))
        return parts

    (own_s, own), (their_s, their) = timed(ours), timed(theirs)
    assert own == their
    return {"hetpeer": own_s / GROUPS * 1e6, "networkx": their_s / GROUPS * 1e6}


def borders(costs: tuple[BlockCostRow, ...]) -> list[dict[str, int]]:
    """Bytes of each border: as it is, and the least cut."""
    graph = operator_graph(costs)
    block = nx.get_node_attributes(graph, "block")
    return [
        {"ours": sum(after.enters.values()), "least": _least_cut(graph, block, before.index)}
        for before, after in pairwise(costs)
    ]


def _least_cut(graph: Any, block: dict[str, int], left: int) -> int:
    """Bytes of the least cut in the blocks `left` and `left` + 1, whose first and last call are fixed."""
    calls = [name for name, node in graph.nodes(data=True) if node["op"] != "input"]
    first = next(name for name in calls if block[name] == left)
    last = [name for name in calls if block[name] == left + 1][-1]

    def side(name: str) -> str:
        if block[name] < left or name == first:
            return "source"
        return "sink" if block[name] > left + 1 or name == last else name

    flow: nx.DiGraph[str] = nx.DiGraph()
    for name in calls:
        for reader in graph.successors(name):
            one, other = side(name), side(reader)
            if one != other:
                value = f"value of {name}"
                flow.add_edge(one, value, capacity=graph.edges[name, reader]["bytes"])
                flow.add_edge(value, other)
                flow.add_edge(other, one)  # nothing goes back
    return int(nx.minimum_cut_value(flow, "source", "sink"))


def measure(options: Any) -> dict[str, Any]:
    found = plan_model(f"{gpt.__file__}:build", batch=8, sequence_length=64, training=TrainingSettings())
    cuts = borders(tuple(found.costs))
    parts = sub_dags.measure()
    goals = {
        "no cheaper border beside those of the blocks": all(cut["ours"] == cut["least"] for cut in cuts),
        "all parts connected, with no more bytes between them than networkx'": all(
            ways["hetpeer"]["connected"] == ways["hetpeer"]["parts"]
            and ways["hetpeer"]["crossing_bytes"] <= ways["networkx"]["crossing_bytes"]
            for ways in parts.values()
        ),
    }
    return {
        "communities": {str(devices): louvain(devices, options.seed) for devices in DEVICES},
        "sync_us": {str(workers): sync(workers, options.seed) for workers in WORKERS},
        "borders": cuts,
        "sub_dags": parts,
        "met": all(goals.values()),
        "goals": goals,
    }


def show(figures: dict[str, Any]) -> None:
    for devices, ways in figures["communities"].items():
        for way, row in ways.items():
            print(
                f"{devices:>5} devices, {way:22} {row['cpu_s']:.3f} CPU s, "
                f"modularity {row['modularity']:.4f}, {row['communities']:.0f} communities"
            )
    for workers, ways in figures["sync_us"].items():
        print(f"{workers:>5} workers, " + ", ".join(f"{way} {us:.0f} us a group" for way, us in ways.items()))
    for number, cut in enumerate(figures["borders"], 1):
        print(f"border {number}: {cut['ours']} bytes, least cut {cut['least']}")
    for what, ways in figures["sub_dags"].items():
        for way, row in ways.items():
            print(
                f"{what}, {way:8} {row['crossing_bytes']} bytes cross, heaviest {row['heaviest']:.2f} of an "
                f"even share, {row['connected']} of {row['parts']} connected, {row['cpu_s']:.3f} CPU s"
            )
    report.show_goals(figures["goals"])


def main() -> int:
    options = report.parser(__doc__ or "").parse_args()
    return report.finish("networkx-parts", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
