"""A model's operator graph as a graph of networkx, and as a file for other programs (GraphML).

Nodes are operator calls and the author's inputs; an edge goes from a value to a call that reads it. networkx
is imported here, by nobody at start-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from hetpeer.stages.graph.graph_cost import BlockCostRow


def operator_graph(costs: Sequence[BlockCostRow]) -> nx.DiGraph[str]:
    """The graph of all blocks in their order.

    A node of a call has its `block`, `op`, FLOPs (`flops_forward`, `flops_backward`), and `parameter_bytes`
    and `kept_bytes`; one of an input has the op `input`, and the block that reads it first. An edge has the
    `bytes` of the value. A value that a later block computes again has a node `NAME@BLOCK` there.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    newest: dict[str, str] = {}
    """Value → its node."""
    for cost in costs:
        for call in cost.operators:
            node = call.name if call.name not in graph else f"{call.name}@{cost.index}"
            for value, nbytes in call.reads.items():
                if value not in newest:
                    newest[value] = value
                    graph.add_node(value, block=cost.index, op="input")
                graph.add_edge(newest[value], node, bytes=nbytes)
            graph.add_node(
                node,
                block=cost.index,
                op=call.op,
                flops_forward=call.flops_forward,
                flops_backward=call.flops_backward,
                parameter_bytes=call.parameter_bytes,
                kept_bytes=call.kept_bytes,
            )
            newest[call.name] = node
    return graph


def graphml(costs: Sequence[BlockCostRow]) -> str:
    """The graph as GraphML, which networkx, Gephi, yEd and igraph read."""
    return "\n".join(nx.generate_graphml(operator_graph(costs))) + "\n"
