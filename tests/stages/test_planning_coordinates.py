"""Network coordinates: what few round trips say of all, and how little a liar moves."""

import math

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scenarios.measuring import after, laboratory, unseen
from benchmarks.scenarios.networks import dt_fm
from hetpeer.stages.planning.network_coordinates import (
    DIMENSIONS,
    FARTHEST_S,
    MOST_PEERS,
    PULL,
    RECENT,
    ROUNDS,
    STEP,
    UNIT_S,
    UNSURE,
    Coordinate,
    OwnCoordinate,
)
from tests.amounts import mostly_proof

TWO_MINUTES = 24
"""Rounds of five seconds."""


def placed(number: int, radius: float = 0.04) -> Coordinate:
    """One of many points on a sphere, each with 4 ms of its own."""
    x, y, z = np.random.default_rng(number).normal(size=DIMENSIONS)
    scale = radius / math.hypot(x, y, z)
    return Coordinate((x * scale, y * scale, z * scale), 4e-3, 0.05)


def settled(honest: int, lies: dict[str, tuple[float, Coordinate]] | None = None) -> OwnCoordinate:
    """One that is in the middle, after a hundred moves by true round trips, and by `lies`."""
    middle, own = Coordinate((0.0, 0.0, 0.0), 4e-3), OwnCoordinate("QmOwn")
    for number in range(honest):
        own.pinged(str(number), middle.trip_s(placed(number)), placed(number))
    for liar, (trip_s, coordinate) in (lies or {}).items():
        own.pinged(liar, trip_s, coordinate)
    for _ in range(100):
        own.move()
    return own


def off(own: OwnCoordinate) -> float:
    """Worst error of its distances to points that it has not met, as a share."""
    middle = Coordinate((0.0, 0.0, 0.0), 4e-3)
    others = [placed(1000 + number) for number in range(50)]
    return max(abs(own.coordinate.trip_s(o) / middle.trip_s(o) - 1.0) for o in others)


NETWORKS = ["worldwide", "homes", "multi_dc", "regional", "city", "regions", "continents", "last miles"]


@pytest.mark.parametrize("name", mostly_proof(NETWORKS, ["worldwide", "homes"]))
def test_after_two_minutes_few_measurements_say_what_all_lines_are(name: str) -> None:
    """Median errors of pairs that nobody measured: a tenth of latency, a fifth of the rate."""
    if name in {"homes", "city", "regions"}:
        network = laboratory(name, 7)
    elif name in {"continents", "last miles"}:
        network = unseen(name, 7)
    else:
        network = dt_fm(name)
    found = after(network, TWO_MINUTES, 5)
    latency, rate = found.medians()
    assert latency <= 0.1
    assert rate <= 0.2
    if name == "worldwide":
        assert rate < np.median(found.by_ends) / 4, "the ends alone say little there"


def test_a_newcomer_has_a_coordinate_after_five_pings() -> None:
    own = settled(5)
    assert own.is_known
    assert off(own) < 0.25
    assert own.coordinate.error >= 0.2, "few round trips fit nearly any point"
    assert off(settled(16)) < 0.03


def test_who_has_met_nobody_says_so() -> None:
    own = OwnCoordinate("QmOwn")
    own.move()
    assert not own.is_known
    assert own.coordinate.error == UNSURE
    own.pinged("a", 0.03, OwnCoordinate("QmNeitherKnows").coordinate)
    own.move()
    assert own.is_known
    assert own.coordinate.height == 0.015
    assert OwnCoordinate("QmOwn", own.coordinate).is_known


def test_a_liar_moves_nobody_by_more_than_its_share() -> None:
    """One of sixteen says that it is anywhere, with no error, and answers as late as it likes."""
    for place in ((1.0, 1.0, 1.0), (-1.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        for trip_s in (1e-4, 0.08, 9.9):
            lie = Coordinate(place, FARTHEST_S, 0.02)
            assert off(settled(15, {"liar": (trip_s, lie)})) < 1 / 8, (place, trip_s)


@given(
    st.tuples(*[st.floats(-FARTHEST_S, FARTHEST_S)] * 3),
    st.floats(0, FARTHEST_S),
    st.floats(0, 1),
    st.floats(1e-4, 9.9),
)
def test_one_sample_moves_a_coordinate_by_a_bounded_part(
    at: tuple[float, float, float], height: float, error: float, trip_s: float
) -> None:
    """One of k samples adds at most 1/k of STEP * PULL in each round, in units of the harmonic mean trip."""
    own = settled(15)
    before = own.coordinate
    own.pinged("liar", trip_s, Coordinate(at, height, max(error, 0.02)))
    own.move()
    honest = [before.trip_s(placed(number)) for number in range(15)]
    weights = [1 / (1 + max(0.05 / before.error, 1.0)) / trip for trip in honest]
    share = STEP * PULL * 0.5 / (0.5 / trip_s + sum(weights)) * ROUNDS
    assert math.dist(own.coordinate.at, before.at) <= share + 1e-3
    assert abs(own.coordinate.height - before.height) <= share + 1e-3


@pytest.mark.parametrize("trip_s", [math.nan, math.inf, -1.0, 0.0, 10.0, 1e300])
def test_a_round_trip_that_is_none_changes_nothing(trip_s: float) -> None:
    own = OwnCoordinate("QmOwn")
    own.pinged("a", trip_s, placed(1))
    own.carried("b", trip_s)
    assert not own.met


@pytest.mark.parametrize(
    "numbers",
    [
        (),
        (1, 2, 3, 4),
        (1, 2, 3, 4, 5, 6),
        (1.0, 2, 3, 4, 5),
        (True, 2, 3, 4, 5),
        (math.nan, 2, 3, 4, 5),
        (10**9, 2, 3, 4, 5),
        (1, 2, 3, -4, 5),
        (1, 2, 3, 10**6, 5),
        ("1", 2, 3, 4, 5),
    ],
)
def test_what_is_no_coordinate(numbers: tuple) -> None:
    assert Coordinate.of(numbers) is None


def test_an_advert_says_it_in_few_bytes() -> None:
    coordinate = Coordinate((0.12345, -0.3, 0.0), 0.0123, 0.07)
    numbers = coordinate.numbers()
    assert len(msgpack.packb(list(numbers))) <= 20
    again = Coordinate.of(numbers)
    assert again is not None
    assert math.dist(again.at, coordinate.at) < 2 * UNIT_S
    assert again.error == coordinate.error
    far = Coordinate((5.0, -5.0, 0.0), 7.0)
    assert Coordinate.of(far.numbers()) == Coordinate((1.0, -1.0, 0.0), 1.0)
    assert Coordinate.of((0, 0, 0, 0, 10**12)) == Coordinate((0.0, 0.0, 0.0), 0.0, UNSURE)


def test_a_link_in_use_wins_over_pings_and_a_late_ping_counts_little() -> None:
    own = OwnCoordinate("QmOwn")
    own.pinged("a", 0.5)
    own.pinged("a", 0.04)
    own.move()
    assert own.coordinate.height == 0.02
    again = OwnCoordinate("QmOwn")
    again.carried("a", 0.03)
    again.pinged("a", 0.01)
    again.move()
    assert again.coordinate.height == 0.015


def test_a_way_that_got_longer_is_noticed() -> None:
    own = OwnCoordinate("QmOwn")
    own.pinged("a", 0.01)
    for _ in range(RECENT):
        own.pinged("a", 0.04)
    own.move()
    assert own.coordinate.height == 0.02


def test_the_number_of_peers_that_are_kept_is_bounded() -> None:
    own = OwnCoordinate("QmOwn")
    for number in range(2 * MOST_PEERS):
        own.pinged(str(number), 0.03)
    assert len(own.met) == MOST_PEERS
    assert str(2 * MOST_PEERS - 1) in own.met
    own.keep_only({"40", "41", "999"})
    assert set(own.met) == {"40", "41"}


def test_what_peers_say_in_adverts_counts_for_those_that_were_met() -> None:
    own = OwnCoordinate("QmOwn")
    own.carried("a", 0.1)
    own.heard({"a": placed(1), "b": placed(2)})
    assert set(own.met) == {"a"}
    before = own.coordinate
    own.move()
    assert own.coordinate != before
