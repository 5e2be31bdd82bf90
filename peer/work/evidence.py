"""What the audit counts: signed lines on what entered each update, in our own log and at the coordinator."""

from __future__ import annotations

from hetpeer.averaging import effects as e
from hetpeer.bootstrap.eventlog import EventLog
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.board import Leftover
from hetpeer.dht.identity import Identity
from hetpeer.peer.home import Home


class Evidence:
    """One peer's event log of one run."""

    def __init__(self, home: Home, run: RunDirectory, identity: Identity) -> None:
        self._run_id = run.run_id
        self._peer = identity.peer_id
        self._log = EventLog(home.events_path(run), identity)
        self._elsewhere = 0
        """Lines of this identity that are not in our log."""
        self._found_in: e.StepId | None = None
        self._found: set[tuple[str, int, int]] = set()
        """(sender, border, id) of leftovers that are written down for that step."""

    def applied(self, applied: e.RecordApplied, incarnation: int) -> list[str]:
        """Write down the update of one step, a line for each block; returns the lines. Raises `LocalError` HP-DISK-002."""
        line, number = applied.step.line, applied.step.number
        return [
            self._log.append(
                {
                    "kind": "applied",
                    "run": self._run_id,
                    "peer": self._peer,
                    "incarnation": incarnation,
                    "term": line.term,
                    "view": line.view,
                    "cluster": line.cluster,
                    "step": number,
                    "batch": applied.step.batch,
                    "base": applied.step.base,
                    "group": applied.step.group,
                    "block": cover.block,
                    "plan": applied.plan,
                    "cover": [[holder, list(ids)] for holder, ids in cover.slots],
                    "gradient": applied.gradients[cover.block],
                    "state": applied.states[cover.block],
                }
            )
            for cover in applied.covers
        ]

    def found(self, step: e.StepId, incarnation: int, sender: str, found: Leftover) -> list[str]:
        """Write down which microbatches the task board showed us; returns the line, unless all are there already."""
        if step != self._found_in:
            self._found_in, self._found = step, set()
        fresh = [number for number in found.ids if (sender, found.border, number) not in self._found]
        self._found.update((sender, found.border, number) for number in fresh)
        if not fresh:
            return []
        return [
            self._log.append(
                {
                    "kind": "leftover",
                    "run": self._run_id,
                    "peer": self._peer,
                    "incarnation": incarnation,
                    "term": step.line.term,
                    "view": step.line.view,
                    "cluster": step.line.cluster,
                    "step": step.number,
                    "border": found.border,
                    "sender": sender,
                    "ids": fresh,
                }
            )
        ]

    def lines(self, begin: int) -> list[str]:
        """Those of our lines that a coordinator does not have, which has `begin` of this identity.

        If that is more than there are here, it has some from another home, or from before a power cut: they come before ours.
        """
        if begin > len(self._log) + self._elsewhere:
            self._elsewhere = begin - len(self._log)
        return self._log.lines(max(begin - self._elsewhere, 0))

    def close(self) -> None:
        self._log.close()
