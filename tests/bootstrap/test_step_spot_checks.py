"""Who checks whom in a step."""

import random

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.conduct.reputation import LAPSES, CheckDuty, CheckRules, Reputation
from hetpeer.bootstrap.trust.spot_check import SpotCheck
from hetpeer.bootstrap.trust.step_spot_checks import StepSpotChecks, unchecked
from hetpeer.bootstrap.trust.verdicts import CheckOutcome, CheckVerdict
from hetpeer.stages.block.fingerprint import KEY_BYTES
from hetpeer.stages.pipeline.routes import Hop
from tests.bootstrap.court import Court

PEERS = "abcd"


def step(seed=0, standings=None, peers=PEERS):
    """In which all of `peers` hold all blocks, and everybody is to be checked.

    Returns its checks, and the roster.
    """
    chance = random.Random(seed)
    rules = CheckRules(share=1.0, draw=chance.random, key=bytes, distance=lambda _one, _other: 0.0)
    line, roster = m.TermView(term=1, view=0), dict.fromkeys(peers, (0, 6))
    way = (Hop("a", 0, 6),)
    return StepSpotChecks(
        rules, standings or Reputation(), line, 3, roster, [10] * 6, lambda _id: way
    ), roster


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
    standings = Reputation()
    for _ in range(LAPSES):
        standings.lapsed([[("a", CheckDuty.CHECKS)]])
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


class Stages:
    """A step in which A to D hold the first blocks, E to H the others, and everybody before counts what
    goes over each of those behind. `liar`: its sums are false; `silent` says nothing of bundles.
    """

    def __init__(self, standings, liar="", silent=""):
        self.liar, self.silent = liar, silent
        before, behind = "abcd", "efgh"
        self.pieces = {peer: tuple(range(4 * n, 4 * n + 4)) for n, peer in enumerate(before)}
        ways = {
            i: (Hop(peer, 0, 3), Hop(behind[i % 4], 3, 6)) for peer, ids in self.pieces.items() for i in ids
        }
        roster = dict.fromkeys(before, (0, 3)) | dict.fromkeys(behind, (3, 6))
        rules = CheckRules(
            share=1.0,
            draw=random.Random(0).random,
            key=bytes,
            distance=lambda one, other: float(one != other),
        )
        self.line = m.TermView(term=1, view=0)
        self.checks = StepSpotChecks(rules, standings, self.line, 0, roster, [10] * 6, ways.__getitem__)
        sums = tuple(self.pieces.items())
        self.covers = dict.fromkeys(range(3), sums)
        reducers = tuple((peer, 1) for peer in before)
        self.told = [
            m.Cover(block=block, slots=sums, reducers=reducers, receivers=tuple(before)) for block in range(3)
        ]

    def run(self):
        """Until it waits for nobody but those who say nothing.

        Returns what has come of it then, without them.
        """
        for peer, ids in self.pieces.items():
            self.deliver(self.checks.accepted(peer, [m.Contents(begin=0, end=3, ids=ids)], ()))
        while effects := self.checks.compare(1, self.covers, self.told, lambda _peer: ()):
            self.deliver(effects)
        waited = not self.checks.over
        if waited:
            self.checks.expire()
        return [check.outcome.verdict for check in self.checks.take()], waited

    def deliver(self, effects):
        for effect in effects:
            match effect.message:
                case m.Check(tasks=(task,), check=number):
                    checker, after = (hop.peer for hop in task.route)
                    at = {"line": self.line, "step": 0, "check": number, "id": task.id}
                    if after != self.silent:
                        alike = (next(peer for peer, ids in self.pieces.items() if task.id in ids),)
                        word = m.Compared(**at, border=3, back=False, peer=checker, alike=alike)
                        self.deliver(self.checks.receive(after, word))
                    self.deliver(self.checks.receive(checker, m.Checked(**at, begin=0)))
                case m.Show(peer=peer) as show:
                    values = b"false" if peer and peer == self.liar else b"true"
                    begin = 2 * "abcd".index(effect.to)
                    marks = [
                        m.Mark(block=b, begin=begin, end=begin + 2, key=bytes(KEY_BYTES), values=values)
                        for b in range(3 if peer and peer != effect.to else 0)
                    ]
                    marks += [mark.model_copy(update={"values": values}) for mark in show.marks]
                    shown = m.Shown(
                        line=self.line, step=0, check=show.check, plan=show.plan, marks=tuple(marks)
                    )
                    self.deliver(self.checks.receive(effect.to, shown))


def test_sums_need_no_word_of_a_silent_neighbour_and_it_alone_is_held_to_account():
    standings = Reputation()
    for _ in range(LAPSES):
        assert Stages(standings, silent="h").run() == ([CheckVerdict.PASSED] * 4, True)
    assert [peer for peer in "abcdefgh" if standings.is_mute(peer)] == ["h"]
    assert Stages(standings, silent="h").run() == ([CheckVerdict.PASSED] * 4, False), "nobody waits for it"
    assert CheckVerdict.CONVICTED in Stages(standings, liar="a", silent="h").run()[0]
    assert CheckVerdict.CONVICTED in Stages(Reputation(), liar="a", silent="h").run()[0], "nor before"


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


def test_who_leaves_while_it_turns_out_that_it_has_lied_is_gone_once():
    """It has a dispute with all its neighbours, of which nothing was said as long as another check was
    open; with it that one is over.
    """
    rules = CheckRules(
        share=1e-4, proves=False, draw=lambda: 0.9, key=lambda: bytes(KEY_BYTES), distance=lambda *_: 0.0
    )
    court = Court(layouts=(((0, 1), (1, 2)),), checks=rules)
    for peer, first in (("a", 0), ("b", 1), ("d", 0), ("c", 1), ("e", 0)):
        court.hello(peer)
        place = next(one for one in court.sent[peer, "welcome"].places if one.open and one.begin == first)
        court.tell(peer, m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))
        court.tell(peer, m.Prepared())
    court.begin_prepared(*"abdce")
    checks = court.core.machine.steps.first.reduction.checks
    ended, checks._checks[2] = SpotCheck(1, "a", "d"), SpotCheck(2, "d", "a")
    checks._end(
        ended, CheckOutcome(CheckVerdict.DISPUTED, "b", "a", frozenset({frozenset("ab"), frozenset("ac")}))
    )
    court.tell("a", m.Farewell())
    assert "a" not in court.core.members.volunteers
    assert [record["kind"] for record in court.records if record.get("peer") == "a"].count("banned") == 1
    assert court.core.line.view == 1
    assert all(court.sent[peer, "rolled_back"].line == court.core.line for peer in "bcde")
