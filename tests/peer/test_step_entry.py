"""Whose links are kept beside those of the step."""

from hetpeer.peer.training.step_entry import KEPT, LinkedPeers

PLACE = (2, 4)


def test_who_exchanges_parameters_with_us_stays_known_and_who_only_takes_part_does_not():
    known = LinkedPeers()
    known.averages({"me": PLACE, "a": (0, 3), "b": (3, 6), "c": (0, 2), "d": (4, 6)}, PLACE)
    assert set(known) == {"me", "a", "b", "c", "d"}
    known.averages({"me": PLACE, "e": PLACE}, PLACE)
    assert set(known) == {"me", "a", "b", "e"}


def test_who_leaves_is_forgotten():
    known = LinkedPeers()
    known.averages({"a": PLACE, "b": PLACE, "c": (0, 2)}, PLACE)
    known.forget(["a", "c"])
    assert set(known) == {"b"}


def test_so_many_are_kept_and_those_met_longest_ago_are_not():
    known = LinkedPeers()
    for number in range(KEPT):
        known.averages({f"{number}": PLACE}, PLACE)
    known.averages({"0": PLACE}, PLACE)
    known.averages({"new": PLACE}, PLACE)
    assert set(known) == {"new", *map(str, range(KEPT))} - {"1"}


def test_without_a_place_nobody_is_met():
    known = LinkedPeers()
    known.averages({"a": PLACE}, None)
    known.averages({"b": PLACE}, None)
    assert set(known) == {"b"}
