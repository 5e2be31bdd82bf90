"""The coordinator's log and what follows from it: history, credit, curves, evidence."""
