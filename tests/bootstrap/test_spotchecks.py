"""Who checks whom in a step."""

import random

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.checkers import unchecked
from hetpeer.bootstrap.spotcheck import CheckRules
from hetpeer.bootstrap.spotchecks import SpotChecks
from hetpeer.bootstrap.standing import LAPSES, Part, Standings
from hetpeer.stages.execution.routes import Hop

PEERS = "abcd"


def step(seed=0, standings=None, peers=PEERS):
    """In which all of `peers` hold all blocks, and everybody is to be checked. Returns its checks, and the roster."""
    chance = random.Random(seed)
    rules = CheckRules(share=1.0, draw=chance.random, key=bytes, distance=lambda _one, _other: 0.0)
    line, roster = m.Line(term=1, view=0), dict.fromkeys(peers, (0, 6))
    way = (Hop("a", 0, 6),)
    return SpotChecks(rules, standings or Standings(), line, 3, roster, [10] * 6, lambda _id: way), roster


def counts(checks, peer, microbatch):
    """`peer` counts it; returns who is to compute which microbatches once more."""
    return told(checks.accepted(peer, [m.Contents(begin=0, end=6, ids=(microbatch,))], ()))


def told(effects):
    tasks = [task for effect in effects for task in effect.message.tasks]
    return [(task.route[0].peer, task.id) for task in tasks]


def checkers(seed, standings=None):
    """Everybody counts one microbatch, in some order: who checks whom."""
    checks, _ = step(seed, standings)
    order = random.Random(seed).sample(PEERS, len(PEERS))
    told = {peer: counts(checks, peer, number) for number, peer in enumerate(order)}
    return {peer: checker for peer, tasks in told.items() for checker, _ in tasks}


@pytest.mark.parametrize("seed", range(50))
def test_everybody_is_checked_by_another_and_none_is_left_over(seed):
    found = checkers(seed)
    assert sorted(found) == sorted(found.values()) == sorted(PEERS)
    assert all(peer != checker for peer, checker in found.items())


def test_who_comes_when_all_have_somebody_to_check_is_checked_too_and_nobody_checks_more_than_two():
    checks, roster = step(peers="abc")
    begun = [counts(checks, peer, number) for number, peer in enumerate(roster)]
    assert sorted(checker for tasks in begun for checker, _ in tasks) == ["a", "b", "c"]
    late = {}
    for number, peer in enumerate("defg", 3):
        roster[peer] = (0, 6)
        late[peer] = counts(checks, peer, number)
    assert all(late.values())
    found = [checker for tasks in (*begun, *late.values()) for checker, _ in tasks]
    assert max(map(found.count, found)) <= 2


def test_nobody_can_foresee_by_whom():
    assert {checkers(seed)["a"] for seed in range(50)} == set("bcd")


def test_who_does_not_answer_checks_nobody():
    standings = Standings()
    for _ in range(LAPSES):
        standings.lapsed([[("a", Part.CHECKS)]])
    assert "a" not in checkers(0, standings).values()


def test_another_takes_over_from_a_checker_that_leaves():
    checks, _ = step()
    ((checker, _),) = counts(checks, "a", 1)
    checks.lost(checker)
    assert checks.over
    ((other, microbatch),) = told(checks.compare(1, {}, (), lambda _peer: ()))
    assert microbatch == 1
    assert other not in ("a", checker)


def test_what_is_counted_after_something_was_lost_is_checked_too():
    checks, _ = step()
    assert counts(checks, "a", 1)
    checks.lost("a")
    assert [microbatch for _, microbatch in counts(checks, "a", 2)] == [2]


def test_who_holds_what_no_other_holds_in_one_piece_is_checked_by_nobody_and_that_is_known():
    """Two others hold its blocks between them: docs/trust.md says what is to come of that."""
    checks, roster = step()
    roster.update(a=(0, 6), b=(0, 3), c=(3, 6), d=(0, 2))
    assert unchecked(roster) == ["a"]
    assert counts(checks, "a", 0) == []
    assert told(checks.accepted("b", [m.Contents(begin=0, end=3, ids=(1,))], ())) == [("a", 1)]
    roster["e"] = (0, 6)
    assert unchecked(roster) == []
    assert counts(checks, "a", 2) == [("e", 0), ("e", 2)], "all that it counts, as soon as somebody else can"
