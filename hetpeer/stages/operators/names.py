"""Names of operators and parts in a graph, for those who read graphs without torch."""

DROPOUT, ATTENTION = "hetpeer.dropout", "hetpeer.attention"
BATCH_NORM = "hetpeer.batch_norm"
EMBEDDING = "aten.embedding.default"
PRODUCTS = frozenset(
    {
        "aten.addmm.default",
        "aten.baddbmm.default",
        "aten.bmm.default",
        "aten.conv1d.default",
        "aten.conv1d.padding",
        "aten.conv2d.default",
        "aten.conv2d.padding",
        "aten.conv3d.default",
        "aten.linear.default",
        "aten.matmul.default",
        "aten.mm.default",
    }
)
"""Operators to which autocast gives bfloat16, whatever they are called with."""
BOTTLENECK = "hetpeer_bottleneck"
"""Name of a bottleneck (docs/links.md) among the parts of its layer, and so in its parameters' names."""
