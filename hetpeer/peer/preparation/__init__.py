"""What a volunteer fetches before and while it works: graphs, states, shards of data."""
