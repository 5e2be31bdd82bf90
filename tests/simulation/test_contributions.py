"""The audit's lists of what was used, late and lost, beside what was done in histories with deaths: in every
other one of clusters that average.
"""

from collections import Counter, defaultdict
from unittest.mock import patch

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.coordinator import Coordinator
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_ledger import StepLedger
from hetpeer.bootstrap.log.contributions import (
    AFTERWARDS,
    DUPLICATE,
    GIVEN_UP,
    LATE,
    LOST,
    REDONE,
    TAKEN_BACK,
    USED,
    ContributionLog,
)
from hetpeer.bootstrap.log.evidence import AppliedEvent
from hetpeer.bootstrap.log.history import History, decisions_of
from hetpeer.bootstrap.log.lineage import lineage
from hetpeer.bootstrap.log.unused_work import LateWork, Unused
from tests.simulation.checked_swarm import CheckedSwarm
from tests.simulation.coverage import Coverage
from tests.simulation.histories import BLOCKS
from tests.simulation.overlap_histories import simulate

SEEDS = (*range(8), 14, 17, 22, 26, 40, 52)
"""The last ones have much that comes too late."""
FAULTS, STEPS = 20, 10


class Played:
    """One history, and what everybody has told the coordinator meanwhile."""

    def __init__(self, seed):
        self.seed = seed
        self.swarm = None
        self.applied = defaultdict(list)
        self.reported = defaultdict(set)
        """(term, view, cluster, step) → (peer, id, block) of all reports that were taken."""
        self.late = set()
        """(records in the log, term, view, cluster, step, peer, id) of all reports of a step that was
        committed.
        """

        def run(swarm, limit, original=CheckedSwarm.run):
            self.swarm = swarm
            check = swarm.checks.applied

            def applied(volunteer, record, before):
                check(volunteer, record, before)
                self._applied(volunteer, record)

            swarm.checks.applied = applied
            original(swarm, limit)

        def sealed(step, peer, message, now, original=CoordinatedStep._sealed):
            line = step.line
            self.reported[line.term, line.view, line.cluster, step.number] |= {
                (peer, i, block)
                for part in message.contents
                for i in part.ids
                for block in range(part.begin, part.end)
            }
            return original(step, peer, message, now)

        def receive(core, peer, message, now, original=Coordinator.receive):
            known = peer in core.members.volunteers and core.line == getattr(message, "line", None)
            if isinstance(message, m.Sealed) and known and message.step < core.history.version:
                line, at = core.line, len(self.swarm.log)
                key = at, line.term, line.view, line.cluster, message.step, peer
                self.late |= {(*key, i) for part in message.contents for i in part.ids}
            return original(core, peer, message, now)

        with (
            patch.object(CheckedSwarm, "run", run),
            patch.object(CoordinatedStep, "_sealed", sealed),
            patch.object(Coordinator, "receive", receive),
        ):
            outcome = simulate(seed, Coverage(), faults=FAULTS, steps=STEPS)
        assert outcome.violation is None, outcome

    def _applied(self, volunteer, record):
        line, step = record.step.line, record.step
        for cover in record.covers:
            key = line.cluster, line.view, step.number, record.plan, cover.block
            said = AppliedEvent.model_construct(
                kind="applied",
                peer=volunteer,
                step=step.number,
                base=step.base_of(cover.block),
                cover=cover.slots,
            )
            self.applied[key].append(said)

    @property
    def surviving(self):
        if self.seed % 2:
            return list(lineage(self.swarm.log).decisions)
        commits = History.of(self.swarm.log).commits
        return [one for step in sorted(commits) for one in decisions_of(commits[step])]

    def contributions(self):
        microbatches = self.swarm.config.microbatches
        delays = self.swarm.config.delays
        return ContributionLog(self.swarm.log, self.surviving, self.applied, microbatches, BLOCKS, delays)


def is_told(history):
    """Listed contributions that differ from the work that was done."""
    log, microbatches = history.swarm.log, history.swarm.config.microbatches
    each = history.contributions()
    listed, tally = list(each), each.tally()
    used = Counter((one.batch, one.id) for one in listed if one.state == USED)
    expected = {(batch, microbatch) for batch in range(STEPS) for microbatch in range(microbatches)}
    assert used == Counter(expected), "each id is used exactly once"
    assert sum(tally.used.values()) == tally.signed == len(expected), "and its holders say so"
    assert (tally.waiting, tally.silent) == (0, 0)
    assert all(0 <= one.staleness <= history.swarm.config.staleness for one in listed)
    assert all(one.base == one.step - one.staleness for one in listed)
    assert {(one.batch, one.id) for one in listed} == expected
    assert (tally.late, tally.lost) == tuple(
        sum(one.state == state for one in listed) for state in (LATE, LOST)
    )
    _nothing_is_silent(history, log, listed)
    _what_came_afterwards_is_told(history, log, listed)
    return listed, tally


def _nothing_is_silent(history, log, listed):
    """Whatever was reported of a step that was committed, or given up by who took it, was added up there, or
    is in the list as late or lost.
    """
    named = {(one.view, one.cluster, one.step, *one.peers, one.id) for one in listed if one.state != USED}
    term = view = 0
    for record in log:
        cluster, term = record.get("cluster", 0), record.get("term", term)
        for step in record.get("given_up", [record] if record["kind"] == "commit" else []):
            number = step["step"]
            added = {
                (peer, i, block)
                for block in range(BLOCKS)
                for said in history.applied[cluster, view, number, step.get("plan"), block]
                for peer, ids in said.cover
                for i in ids
            }
            for peer, i, block in history.reported[term, view, cluster, number] - added:
                known = {(view, cluster, number, peer, i), (view, cluster, number, i)}
                assert known & named, f"{record['kind']} of step {number}: {i} by {peer} at block {block}"
        view = record["view"] if record["kind"] == "rollback" else view


def _what_came_afterwards_is_told(history, log, listed):
    """Unless its cluster commits nothing more in that reign.

    Who had left the step is named there already, if it was to do it or had said so: what it did is lost, or a
    duplicate.
    """
    staleness = history.swarm.config.staleness
    left = {
        (r.get("cluster", 0), r["version"] + ahead, r["peer"])
        for r in log
        if r["kind"] == "gone"
        for ahead in range(staleness + 1)
    }
    named = {
        (one.view, one.cluster, one.step, *one.peers, one.id)
        for one in listed
        if one.why in (AFTERWARDS, REDONE)
        or (one.why == DUPLICATE and {(one.cluster, one.step, peer) for peer in one.peers} & left)
    }
    for at, term, view, cluster, *what in history.late:
        last = [r["kind"] == "commit" and (r["term"], r["view"], r.get("cluster", 0)) for r in log[at:]]
        if (term, view, cluster) in last:
            assert (view, cluster, *what) in named, f"{what} came after the end of its step"


def test_every_contribution_is_used_once_or_named_as_late_or_lost():
    whys, staleness, grouped = set(), set(), set()
    for seed in SEEDS:
        listed, tally = is_told(Played(seed))
        whys |= {one.why for one in listed}
        staleness |= tally.used.keys()
        grouped |= {one.group is not None for one in listed if one.state == USED}
    assert whys >= {"", REDONE, TAKEN_BACK, DUPLICATE, AFTERWARDS, GIVEN_UP}
    assert staleness == {0, 1, 2, 3}
    assert grouped == {False, True}


def deaf(self, peer, ids):
    """It is not written down."""


def gone(self, step, peer, ids):
    """Reports after the end of a step are not read."""


def unread(self):
    """Counted work is not lost with a step that fails."""


MUTANTS = {
    "afterwards": lambda: patch.object(LateWork, "late", gone),
    "late": lambda: patch.object(Unused, "late", deaf),
    "lost": lambda: patch.object(Unused, "lost", deaf),
    "given up": lambda: patch.object(StepLedger, "give_up", unread),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_books_that_are_silent_are_found_out(name):
    with MUTANTS[name]():
        for seed in reversed(SEEDS):
            played = Played(seed)
            try:
                is_told(played)
            except AssertionError:
                return
    pytest.fail("nobody has missed anything")
