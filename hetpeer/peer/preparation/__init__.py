"""Fetches a volunteer's files and states, before and while it works: graphs, states, shards of data."""
