"""Connected sub-DAGs of a model (FusionLLM's OP-Fence, arXiv 2410.12707): our cut beside networkx.

Ours cuts the author's order at places where few bytes cross, mostly one tensor (`stages/tracing/cut.py`).
networkx halves the graph by least cuts (`minimum_cut`) that send nothing back, until there are enough parts:
operators before SLACK of an even share are fixed on one side, those behind it on the other. A value that goes
to a later part crosses each border on the way, and counts once for each. Our seconds contain the making of
blocks. `benchmarks.networkx_parts` shows the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import networkx as nx
import torch

from hetpeer.examples import gpt, resnet
from hetpeer.stages.graph.graph_cost import value_bytes
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.operator_line import OperatorLine
from hetpeer.stages.tracing.trace import OpDag, trace

SLACK = 0.25
"""Part of a share by which a least cut may be off the even one."""
PARTS = (4, 8)


def models() -> dict[str, OpDag]:
    """A GPT of eight layers, and a ResNet, whose blocks have skips."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 8, 64))
    images = {"image": torch.randn(8, 1, 8, 8), "label": torch.randint(10, (8,))}
    return {
        "gpt": trace(gpt.build(layers=8), {"tokens": tokens[0], "targets": tokens[1]}),
        "resnet": trace(resnet.build(), images),
    }


class Operators:
    """The operators that are cut, in order, with FLOPs and who reads whom."""

    def __init__(self, dag: OpDag) -> None:
        self.names = [node.name for node in OperatorLine(dag).nodes]
        known = set(self.names)
        self.flops = {name: dag.flops[name] for name in self.names}
        self.graph: nx.DiGraph[str] = nx.DiGraph()
        self.graph.add_nodes_from(self.names)
        for node in dag.nodes:
            for value in known.intersection(node.references()) if node.name in known else ():
                self.graph.add_edge(value, node.name, bytes=value_bytes(dag.at(value)))

    def figures(self, parts: Sequence[Sequence[str]]) -> dict[str, float]:
        """Parts, bytes over all borders, FLOPs of the heaviest part in even shares, and connected parts."""
        part = {name: number for number, names in enumerate(parts) for name in names}
        crossing = 0
        for name in self.names:
            readers = [part[reader] for reader in self.graph.successors(name)]
            assert all(part[name] <= reader for reader in readers)
            if readers and max(readers) > part[name]:
                _, _, nbytes = next(iter(self.graph.out_edges(name, data="bytes")))
                crossing += nbytes * (max(readers) - part[name])
        heaviest = max(sum(self.flops[name] for name in names) for names in parts)
        connected = [nx.is_weakly_connected(self.graph.subgraph(names)) for names in parts]
        return {
            "parts": len(parts),
            "crossing_bytes": crossing,
            "heaviest": heaviest * len(parts) / sum(self.flops.values()),
            "connected": sum(connected),
        }

    def halved(self, names: Sequence[str], parts: int) -> list[list[str]]:
        """`names` in so many parts by least cuts."""
        if parts == 1:
            return [list(names)]
        first = parts // 2
        total = sum(self.flops[name] for name in names)
        done, sides = 0, dict[str, str]()
        for name in names:
            done += self.flops[name]
            if done < total * (first - SLACK) / parts or not sides:
                sides[name] = "source"
            elif done - self.flops[name] > total * (first + SLACK) / parts or name == names[-1]:
                sides[name] = "sink"
        before = self._cut(names, sides)
        return [
            *self.halved([name for name in names if name in before], first),
            *self.halved([name for name in names if name not in before], parts - first),
        ]

    def _cut(self, names: Sequence[str], sides: Mapping[str, str]) -> set[str]:
        """The names before the least cut."""
        flow: nx.DiGraph[str] = nx.DiGraph()
        inside = set(names)
        for name in names:
            for reader in inside.intersection(self.graph.successors(name)):
                one, other = sides.get(name, name), sides.get(reader, reader)
                if one != other:
                    value = f"value of {name}"
                    flow.add_edge(one, value, capacity=self.graph.edges[name, reader]["bytes"])
                    flow.add_edge(value, other)
                    flow.add_edge(other, one)  # nothing goes back
        _, (reached, _) = nx.minimum_cut(flow, "source", "sink")
        return {name for name in names if sides.get(name) == "source" or name in reached}


def measure() -> dict[str, dict[str, Any]]:
    """`MODEL, N parts` → way → figures, with `cpu_s`."""
    found: dict[str, dict[str, Any]] = {}
    for model, dag in models().items():
        for parts in PARTS:
            operators = Operators(dag)
            ways: dict[str, Callable[[], Sequence[Sequence[str]]]] = {
                "hetpeer": lambda dag=dag, parts=parts, known=set(operators.names): [  # type: ignore[misc]
                    [node.name for node in block.nodes if node.name in known]
                    for block in cut_blocks(dag, parts)
                ],
                "networkx": lambda operators=operators, parts=parts: operators.halved(  # type: ignore[misc]
                    operators.names, parts
                ),
            }
            rows = found[f"{model}, {parts} parts"] = {}
            for way, act in ways.items():
                began = time.process_time()
                made = act()
                rows[way] = {"cpu_s": time.process_time() - began, **operators.figures(made)}
    return found
