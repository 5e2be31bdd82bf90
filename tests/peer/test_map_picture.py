"""The map of a swarm: places by times, lines by rates, the same in words; names are text."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.discovery import BACKUP, Advert, LinkNote
from hetpeer.peer.watching.map_picture import KINDS, MBIT, MOST, DrawnMap, drawn_map
from hetpeer.peer.watching.status_summary import summarise
from hetpeer.peer.watching.swarm_map import USUAL_S, completed, positions, spread, turned_like
from hetpeer.stages.planning.network_coordinates import Coordinate
from tests.bootstrap.engine import make_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("map"))


def peer_id(number: int) -> str:
    return f"Qm{number:044}"


def swarm(run: RunDirectory, count: int, names: list[str] | None = None, **link: float) -> DrawnMap:
    """The map of volunteers in a row; each names the next one, `link` says how it is reached."""
    adverts = {}
    for number in range(count):
        to = peer_id(number + 1)[-8:]
        notes = (LinkNote(to=to, **{"trip_s": 0.02, "rate": 5 * MBIT} | link),) if number + 1 < count else ()
        name = names[number] if names else f"volunteer {number}"
        adverts[peer_id(number)] = Advert(
            role="volunteer", name=name, state="training", block_begin=0, block_end=1, links=notes
        )
    return drawn_map(summarise(run.signed, adverts, 1000.0), peer_id(0))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def nodes(svg: str) -> list[tuple[float, float]]:
    found = [one for one in ET.fromstring(svg).iter() if one.get("class") == "node"]
    return [
        (float(one.get("cx") or one.get("x") or 0), float(one.get("cy") or one.get("y") or 0))
        for one in found
    ]


# ── places ──────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_times_on_a_plane_are_found_again(count: int, seed: int) -> None:
    points = np.random.default_rng(seed).uniform(-1, 1, (count, 2))
    times = np.linalg.norm(points[:, None] - points[None], axis=2)
    found = positions(times)
    again = np.linalg.norm(found[:, None] - found[None], axis=2)
    assert np.allclose(again, times, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_whatever_is_measured_all_pairs_have_a_finite_time(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    times = np.where(random.random((count, count)) < 0.3, random.uniform(0.001, 0.2, (count, count)), np.nan)
    found = completed(times)
    assert np.isfinite(found).all()
    assert np.array_equal(found, found.T)
    assert not found.diagonal().any()
    assert np.isfinite(positions(found)).all()


def test_without_any_measurement_all_are_alike() -> None:
    assert completed(np.full((3, 3), np.nan)).tolist() == (USUAL_S * (1 - np.eye(3))).tolist()


def test_a_map_drawn_again_does_not_spin() -> None:
    before = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
    turn = np.array([[0.0, 1.0], [1.0, 0.0]])  # mirrored, too
    same = [(number, number) for number in range(3)]
    again = turned_like(before @ turn, before[:3], same)
    assert np.allclose(again - again.mean(axis=0), before - before.mean(axis=0))
    assert np.array_equal(turned_like(before @ turn, before[:1], same[:1]), before @ turn)


@pytest.mark.parametrize("count", [1, 2, 200])
def test_peers_at_one_point_are_pushed_apart(count: int) -> None:
    placed, scale = spread(np.zeros((count, 2)), 600.0, 350.0, 9.0)
    assert scale == 0.0
    assert (placed >= 0).all()
    assert (placed <= (600.0, 350.0)).all()
    gaps = np.linalg.norm(placed[:, None] - placed[None], axis=2)[~np.eye(count, dtype=bool)]
    assert gaps.min(initial=9.0) >= 6.0


# ── the picture ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [1, 2, 30, 200])
def test_all_peers_are_drawn_apart_and_inside(run: RunDirectory, count: int) -> None:
    drawn = swarm(run, count)
    root = ET.fromstring(drawn.svg)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    places = nodes(drawn.svg)
    assert len(places) == count
    assert len(set(places)) == count
    assert all(0 < x < width and 0 < y < height for x, y in places)
    lines = [one for one in root.iter(f"{SVG}line") if one.get("class") == "line"]
    assert len(lines) == count - 1
    assert drawn.svg == swarm(run, count).svg


def test_more_than_can_be_drawn(run: RunDirectory) -> None:
    drawn = swarm(run, MOST + 20)
    assert len(nodes(drawn.svg)) == MOST
    assert f"of {MOST + 20} peers" in drawn.words
    assert peer_id(0) in drawn.points


def test_names_that_find_no_room_are_counted(run: RunDirectory) -> None:
    said = texts(swarm(run, 200).svg)
    named = sum(text.startswith("volunteer ") for text in said)
    assert f"{200 - named} names left out for want of room" in said
    assert "volunteer 0" in said  # one's own
    assert not any("left out" in text for text in texts(swarm(run, 3).svg))


@pytest.mark.parametrize(
    ("rate", "kind"), [(0.0, 3), (5 * MBIT, 2), (50 * MBIT, 1), (500 * MBIT, 0), (5e14, 3)]
)
def test_a_line_looks_and_reads_like_its_rate(run: RunDirectory, rate: float, kind: int) -> None:
    drawn = swarm(run, 2, rate=rate)
    (line,) = [one for one in ET.fromstring(drawn.svg).iter(f"{SVG}line") if one.get("class") == "line"]
    look = KINDS[kind]
    assert (line.get("stroke"), float(line.get("stroke-width", "0"))) == (look.colour, look.width)
    assert (line.get("stroke-dasharray") or "") == look.dashes
    assert ("; line: " in drawn.words) == (kind < 3)


def test_no_two_kinds_of_lines_differ_by_colour_alone() -> None:
    assert len({(kind.width, kind.dashes) for kind in KINDS}) == len(KINDS)
    assert all(one.width > other.width for one, other in pairwise(KINDS))


def test_of_both_directions_the_slower_counts(run: RunDirectory) -> None:
    ends = [peer_id(number)[-8:] for number in range(2)]
    adverts = {
        peer_id(0): Advert(role="volunteer", name="ada", links=(LinkNote(to=ends[1], rate=200 * MBIT),)),
        peer_id(1): Advert(role="volunteer", name="bob", links=(LinkNote(to=ends[0], rate=2 * MBIT),)),
    }
    drawn = drawn_map(summarise(run.signed, adverts, 1000.0))
    assert "; line: ada and bob, 2.0 Mbit/s" in drawn.words


def test_the_words_say_what_the_picture_shows(run: RunDirectory) -> None:
    ends = [peer_id(number)[-8:] for number in range(3)]
    notes = (
        LinkNote(to=ends[1], rate=200 * MBIT, trip_s=0.02),
        LinkNote(to=ends[2], rate=5 * MBIT, trip_s=0.3),
    )
    adverts = {
        peer_id(n): Advert(role="volunteer", name=name) for n, name in enumerate(("ada", "bob", "eve"))
    }
    adverts[peer_id(0)] = adverts[peer_id(0)].model_copy(update={"links": notes})
    drawn = drawn_map(summarise(run.signed, adverts, 1000.0))
    assert drawn.words == (
        "3 volunteers and 0 reliable peers; nearest: ada and bob, 10 ms one way; farthest: ada and eve, "
        "150 ms one way; slowest line: ada and eve, 5.0 Mbit/s; fastest line: ada and bob, 200.0 Mbit/s"
    )
    root = ET.fromstring(drawn.svg)
    assert (root.get("role"), root.findtext(f"{SVG}title")) == ("img", drawn.words)


def test_coordinates_place_peers_whose_times_nobody_measured(run: RunDirectory) -> None:
    """A line of three, 10 ms from one to the next; a fourth peer says nothing of where it is."""
    adverts = {
        peer_id(n): Advert(
            role="volunteer", name=f"v{n}", coordinate=Coordinate((0.02 * n, 0.0, 0.0), 0.0, 0.1).numbers()
        )
        for n in range(3)
    }
    drawn = drawn_map(summarise(run.signed, adverts, 1000.0))
    first, second, third = (np.array(drawn.points[peer_id(n)]) for n in range(3))
    assert np.linalg.norm(first - second) == pytest.approx(0.01, rel=0.01)
    assert np.linalg.norm(first - third) == pytest.approx(0.02, rel=0.01)
    silent = {peer_id(3): Advert(role="volunteer"), peer_id(4): Advert(role="volunteer", coordinate=(1, 2))}
    assert len(nodes(drawn_map(summarise(run.signed, adverts | silent, 1000.0)).svg)) == 5


def test_a_backup_has_a_dot(run: RunDirectory) -> None:
    def discs(state: str) -> int:
        advert = Advert(role="volunteer", state=state, block_begin=0, block_end=1)
        drawn = drawn_map(summarise(run.signed, {peer_id(0): advert}, 1000.0))
        return len(list(ET.fromstring(drawn.svg).iter(f"{SVG}circle")))

    assert discs(BACKUP) == discs("joining") + 1


HOSTILE = [
    "<script>x</script>",
    "a\" onload='x'",
    "]]>",
    "&lt;b&gt;",
    "</svg>",
    "x" * 300,
    "\u202eevil\x00\x1b[31m",
    "",
]


def test_names_are_text(run: RunDirectory) -> None:
    """Adverts lose such characters where they come in; the picture would not need that."""
    adverts = {
        peer_id(number): Advert.model_construct(
            **Advert(role="volunteer").model_dump() | {"name": name, "links": ()}
        )
        for number, name in enumerate(HOSTILE)
    }
    drawn = drawn_map(summarise(run.signed, adverts, 1000.0))
    root = ET.fromstring(drawn.svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        *("svg", "title", "rect", "line", "circle", "text"),
    }
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)
    assert "<script>" in "".join(texts(drawn.svg))


def test_the_next_map_lies_as_the_one_before(run: RunDirectory) -> None:
    first = swarm(run, 6)
    adverts = {
        peer_id(number): Advert(
            role="volunteer",
            name=f"volunteer {number}",
            links=(LinkNote(to=peer_id((number + 1) % 6)[-8:], trip_s=0.02 + 0.001 * number),),
        )
        for number in range(6)
    }
    status = summarise(run.signed, adverts, 1000.0)
    turned = {peer: (-y, x) for peer, (x, y) in first.points.items()}
    for before in (first.points, turned):
        found = drawn_map(status, before=before)
        pairs = [np.array([found.points[peer], before[peer]]) for peer in before]
        products = sum(float(pair[0] @ pair[1]) for pair in pairs)
        assert products > 0
