"""Names of operators of our own in a graph, for those who read graphs without torch."""

DROPOUT, ATTENTION = "hetpeer.dropout", "hetpeer.attention"
BATCH_NORM = "hetpeer.batch_norm"
