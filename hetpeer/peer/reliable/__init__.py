"""A reliable peer: files, states, the coordinator, a stand-in."""
