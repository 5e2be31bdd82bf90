"""`Node`: one place in the network, session after session."""
