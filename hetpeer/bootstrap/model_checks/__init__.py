"""The author's module tried out: on the extremes of its data, against its blocks, against whole batches."""
