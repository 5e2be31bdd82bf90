"""Who is asked to check, and who is checked in any case."""

from hetpeer.bootstrap.conduct.reputation import (
    DISPUTES,
    LAPSES,
    MAX_PAIRS,
    MAX_PEERS,
    RECENT,
    WATCHED,
    CheckDuty,
    Reputation,
)


def watched(standings, peer, contributions=2 * WATCHED):
    return [standings.contributes(peer) for _ in range(contributions)].count(True)


def lapse(standings, *peers, times=LAPSES):
    for _ in range(times):
        standings.lapsed([[(peer, CheckDuty.CHECKS) for peer in peers]])


def test_who_lets_three_checks_in_a_row_lapse_is_not_asked_again_and_is_checked_for_a_while():
    standings = Reputation()
    lapse(standings, "a", times=LAPSES - 1)
    assert not standings.is_mute("a")
    standings.answered([("a", CheckDuty.CHECKS)])
    lapse(standings, "a", times=LAPSES - 1)
    assert not watched(standings, "a"), "not in a row"
    lapse(standings, "a", times=1)
    assert standings.is_mute("a")
    standings.answered([("a", CheckDuty.CHECKS)])
    assert standings.is_mute("a")
    assert watched(standings, "a") == WATCHED
    lapse(standings, "a")
    assert not watched(standings, "a"), "nobody has waited for it again"


def test_who_holds_up_several_checks_of_a_step_has_done_so_once():
    standings = Reputation()
    for _ in range(LAPSES - 1):
        standings.lapsed(
            [[("a", CheckDuty.CHECKS)], [("a", CheckDuty.CHECKS), ("b", CheckDuty.LENDS)]] * LAPSES
        )
    assert not standings.is_mute("a")
    lapse(standings, "a", times=1)
    assert standings.is_mute("a")


def test_who_shows_or_lends_has_not_checked_yet():
    standings = Reputation()
    for _ in range(LAPSES):
        assert not standings.is_mute("a")
        lapse(standings, "a", times=1)
        standings.answered([("a", CheckDuty.SHOWS), ("a", CheckDuty.LENDS)])
    assert standings.is_mute("a")


def test_what_somebody_known_for_it_may_have_held_up_is_held_against_nobody_else():
    standings = Reputation()
    lapse(standings, "a")
    lapse(standings, "a", "b", times=9)
    assert not standings.is_mute("b")
    lapse(standings, "b", "c")
    assert standings.is_mute("b")
    assert standings.is_mute("c"), "nobody knows which of the two"


def test_whom_all_checks_of_a_step_have_waited_for_has_held_them_up_alone():
    standings = Reputation()
    silent = ("d", CheckDuty.COMPARES)
    for _ in range(LAPSES):
        standings.lapsed(
            [[("a", CheckDuty.CHECKS), silent], [("b", CheckDuty.CHECKS), silent, ("e", CheckDuty.LENDS)]]
        )
    assert [peer for peer in "abde" if standings.is_mute(peer)] == ["d"]
    for _ in range(LAPSES):
        standings.lapsed(
            [[("a", CheckDuty.CHECKS), silent], [("a", CheckDuty.CHECKS)], [("b", CheckDuty.CHECKS)]]
        )
    assert standings.is_mute("a"), "nobody is in all of the others"
    assert standings.is_mute("b")


def test_who_is_in_dispute_with_three_others_is_checked_for_a_while():
    standings = Reputation()
    for other in ("b", "c", "b", "b"):
        standings.disputed("a", other)
    assert not watched(standings, "a")
    standings.disputed("a", "d")
    assert watched(standings, "a") == WATCHED
    assert not watched(standings, "b"), "with one other only"
    standings.disputed("a", "e")
    assert not watched(standings, "a"), "they count once"


def test_disputes_are_forgotten_after_a_hundred_contributions():
    standings = Reputation()
    for number in range(DISPUTES):
        standings.disputed("a", str(number))
        assert not watched(standings, "a", RECENT)


def test_it_remembers_so_many_and_no_more():
    standings = Reputation()
    lapse(standings, "a")
    for number in range(MAX_PEERS):
        standings.contributes(str(number))
    assert not standings.is_mute("a")
    assert len(standings._known) == MAX_PEERS


def test_who_is_apart_from_most_of_its_neighbours_is_shunned():
    standings = Reputation()
    one, other, third = (frozenset(pair) for pair in ("ab", "ac", "ad"))
    assert standings.part([one, frozenset("a")])
    assert standings.apart == {one}
    assert not standings.part([one]), "it would be no use to begin anew"
    assert not standings.is_shunned("a", "b"), "one alone may lie"
    assert standings.part([other, one], "w")
    assert not standings.is_shunned("a", "bc"), "one checker's word"
    assert standings.part([third])
    assert standings.is_shunned("a", "bde")
    assert not standings.is_shunned("a", "bdef")
    assert not standings.is_shunned("b", "ade")


def test_who_was_apart_from_one_that_is_banned_is_not_blamed_for_it():
    standings = Reputation()
    standings.part([frozenset("ab"), frozenset("ac"), frozenset("ad")])
    standings.banned("b")
    assert standings.apart == {frozenset("ac"), frozenset("ad")}
    assert not standings.is_shunned("a", "bcef")
    assert standings.is_shunned("a", "cde")


def test_what_one_checker_alone_has_found_is_forgotten_with_it():
    standings = Reputation()
    standings.part([frozenset("ab")], "w")
    standings.part([frozenset("ac")], "v")
    standings.banned("w")
    assert standings.apart == {frozenset("ac")}


def test_what_two_checkers_find_later_is_no_longer_the_word_of_one():
    standings = Reputation()
    standings.part([frozenset("ab"), frozenset("ac")], "w")
    assert not standings.is_shunned("a", "bc")
    assert not standings.part([frozenset("ab"), frozenset("ac")])
    assert standings.is_shunned("a", "bc")
    standings.banned("w")
    assert standings.apart == {frozenset("ab"), frozenset("ac")}


def test_no_more_pairs_are_kept_apart_than_so_many():
    standings = Reputation()
    assert standings.part(frozenset(("a", str(number))) for number in range(MAX_PAIRS))
    assert not standings.part([frozenset("bc")])
