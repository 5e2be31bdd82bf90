"""Lines that are measured before a move relies on them: which, in which turns, and until when."""

from collections.abc import Collection

import pytest

from hetpeer.bootstrap.coordinator.rebalancing import Arrangement
from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.peer.planning.asked_lines import (
    HOPES,
    MOST,
    TIMES,
    Hope,
    Line,
    lines_known,
    lines_needed,
    settled,
    turns,
)

THIRDS = ((0, 1), (1, 2), (2, 3))
HALVES = ((0, 2), (2, 3))


def pipeline(*peers: str, backups: Collection[str] = ()) -> Arrangement:
    seats = {peer: (0, place) for peer, place in zip(peers, THIRDS, strict=False)}
    return Arrangement([THIRDS], seats, backups=frozenset(backups))


def test_needed_are_lines_along_pipelines_and_between_holders_of_the_same_blocks() -> None:
    seats = {
        "a": (0, (0, 1)),
        "b": (0, (1, 2)),
        "c": (0, (2, 3)),
        "d": (1, (0, 2)),
        "e": (1, (2, 3)),
    }
    assert lines_needed(Arrangement([THIRDS, HALVES], seats)) == {
        ("a", "b"),
        ("b", "c"),
        ("d", "e"),
        ("a", "d"),
        ("b", "d"),
        ("c", "e"),
    }


def test_backups_send_nothing() -> None:
    assert lines_needed(pipeline("a", "b", "c", backups={"b"})) == set()


def test_a_line_is_known_if_both_directions_are() -> None:
    def noting(*others: str, rate: float = 1.0) -> Advert:
        return Advert(links=tuple(LinkNote(to=other, rate=rate) for other in others))

    adverts = {"a": noting("b", "c"), "b": noting("a"), "c": noting("a", rate=0.0)}
    assert lines_known(adverts) == {("a", "b")}
    short = LinkNote(to="a", rate=1e5, trip_s=0.3, activation_bytes=16_000)
    assert lines_known(adverts | {"b": Advert(links=(short,))}) == set()


def test_nobody_has_two_lines_in_one_turn() -> None:
    lines = [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d"), ("a", "c")]
    found = turns(lines)
    assert sorted(line for turn in found for line in turn) == sorted(lines)
    for turn in found:
        assert len({peer for line in turn for peer in line}) == 2 * len(turn)
    assert len(found) == 3


async def test_it_is_asked_until_the_best_one_needs_no_unknown_line() -> None:
    """The first hope is false: with its lines measured, another arrangement is the best."""
    measured: set[Line] = set()

    async def search(hope: Hope | None) -> Arrangement | None:
        assert hope == Hope(HOPES[0], set())
        return pipeline("c", "b", "a") if ("a", "c") in measured else pipeline("a", "c", "b")

    async def ask(lines: Collection[Line]) -> Collection[Line]:
        measured.update(lines)
        return lines

    found = await settled(search, lambda: measured, ask, set())
    assert found is not None
    assert lines_needed(found) <= measured
    assert measured == {("a", "c"), ("b", "c"), ("a", "b")}


async def test_what_nobody_measures_is_not_hoped_for() -> None:
    in_vain: set[Line] = set()

    async def search(hope: Hope | None) -> Arrangement | None:
        assert hope is not None
        assert hope.in_vain is in_vain
        return pipeline("a", "b", "c")

    async def ask(lines: Collection[Line]) -> Collection[Line]:
        return [line for line in lines if "c" not in line]

    known: set[Line] = {("a", "b")}
    assert await settled(search, lambda: known, ask, in_vain) is not None
    assert in_vain == {("b", "c")}


async def test_in_the_end_nothing_is_hoped_for() -> None:
    """A swarm in which each measurement raises another hope: TIMES questions, MOST lines each at most."""
    asked: list[Collection[Line]] = []

    async def search(hope: Hope | None) -> Arrangement | None:
        if hope is None:
            return None
        layout = tuple((block, block + 1) for block in range(2 * MOST))
        seats = {f"{len(asked)}-{block}": (0, place) for block, place in enumerate(layout)}
        return Arrangement([layout], seats)

    async def ask(lines: Collection[Line]) -> Collection[Line]:
        asked.append(lines)
        return lines

    assert await settled(search, set, ask, set()) is None
    assert [len(lines) for lines in asked] == [MOST] * TIMES


async def test_more_is_hoped_for_while_nothing_is_found() -> None:
    """A line that is far faster than others like it: twice its error does not make it look worth a move."""
    hopes: list[float] = []
    measured: set[Line] = set()

    async def search(hope: Hope | None) -> Arrangement | None:
        assert hope is not None
        hopes.append(hope.errors)
        return pipeline("a", "b") if hope.errors == HOPES[-1] or measured else None

    async def ask(lines: Collection[Line]) -> Collection[Line]:
        measured.update(lines)
        return lines

    assert await settled(search, lambda: measured, ask, set()) is not None
    assert measured == {("a", "b")}
    assert hopes == [*HOPES, HOPES[-1]]


@pytest.mark.parametrize("known", [True, False])
async def test_nobody_is_asked_where_nothing_is_found_or_all_is_known(known: bool) -> None:
    async def search(_hope: Hope | None) -> Arrangement | None:
        return pipeline("a", "b") if known else None

    async def ask(_lines: Collection[Line]) -> Collection[Line]:
        raise AssertionError

    found = await settled(search, lambda: {("a", "b")}, ask, set())
    assert (found is not None) == known
