"""The author's samples as shards, and the order in which microbatches read them."""
