"""Who a peer is, and the addresses at which it can be found."""
