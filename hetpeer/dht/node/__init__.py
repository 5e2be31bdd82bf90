"""`Node`: a peer's place in the network, across restarts of p2pd."""
