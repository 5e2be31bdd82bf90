"""Commands of who makes a run: init, inspect, invite, amend, audit, export."""
