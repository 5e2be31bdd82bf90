"""Faults, invariants, liars and mutants: what the simulator proves the protocol with."""
