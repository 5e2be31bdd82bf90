from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from hetpeer.dht.identity.addresses import Address, at_socket
from hetpeer.peer.arrival.find_run import LONGEST_PAUSE_S, ROUNDS, Round, rounds

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
A, B, C = (at_socket("127.0.0.1", port, PEER) for port in (1, 2, 3))
places = st.lists(st.sampled_from([A, B, C]), unique=True).map(tuple)


def test_whom_nobody_here_ever_reached_is_given_up_after_some_rounds() -> None:
    turns = list(rounds((A, B), None))
    assert [turn.pause_s for turn in turns] == [1.0, 2.0, 4.0, 8.0, None]
    assert {turn.addresses for turn in turns} == {(A, B)}


def test_remembered_addresses_are_tried_as_soon_as_the_named_ones_have_failed_and_for_ever() -> None:
    turns = list(islice(rounds((A,), (A, B, C)), 40))
    assert turns[0] == Round((A,), 0.0)
    assert {turn.addresses for turn in turns[1:]} == {(A, B, C)}
    assert [turn.pause_s for turn in turns[1:7]] == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_where_none_are_named_the_remembered_are_tried_from_the_first_round_on() -> None:
    turns = list(islice(rounds((), (A, B)), 3))
    assert turns == [Round((A, B), 1.0), Round((A, B), 2.0), Round((A, B), 4.0)]


@settings(deadline=None)
@given(places, st.none() | places)
def test_every_round_dials_the_named_and_only_strangers_give_up(
    named: tuple[Address, ...], remembered: tuple[Address, ...] | None
) -> None:
    turns = list(islice(rounds(named, remembered), 30))
    assert len(turns) == (ROUNDS if remembered is None else 30)
    for turn in turns:
        assert turn.addresses[: len(named)] == named
        assert turn.pause_s is None or turn.pause_s <= LONGEST_PAUSE_S
    assert (turns[-1].pause_s is None) == (remembered is None)
    if remembered is not None:
        assert set(turns[1].addresses) == {*named, *remembered}
