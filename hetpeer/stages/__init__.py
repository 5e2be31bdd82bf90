"""The model: graph, blocks, data order, the compute worker, codecs, planners of steps."""
