"""Places, incarnations and holders."""

from hypothesis import given
from hypothesis import strategies as st

from hetpeer.averaging.member.position import choose_place
from hetpeer.averaging.messages import Hello
from hetpeer.bootstrap.state.membership import BlockDemand, Membership
from hetpeer.bootstrap.state.volunteer_state import LifeCycle, VolunteerState
from hetpeer.bootstrap.state.work_shares import shunned
from hetpeer.stages.pipeline.place_memory import Offered, PlaceDemand

COSTS = [
    BlockDemand(elements=10, memory=PlaceDemand(activations=10 * (n + 1)), flops=float(n)) for n in range(4)
]
EVEN, UNEVEN = ((0, 2), (2, 4)), ((0, 1), (1, 4))


def members(*layouts):
    return Membership(layouts or (EVEN, UNEVEN), COSTS)


def join(book, peer, cluster=0, place=None, life_cycle=LifeCycle.READY, **facts):
    volunteer = VolunteerState(peer, 1, 0.0, life_cycle=life_cycle, **facts)
    book.volunteers[peer] = volunteer
    if place is not None:
        assert book.claim(volunteer, cluster, place)
    return volunteer


def test_there_is_always_one_cluster_more_than_volunteers_fill():
    book = members()
    assert [(p.cluster, p.begin, p.end) for p in book.places()] == [(0, 0, 2), (0, 2, 4)]
    join(book, "a", 0, (0, 2))
    places = {(p.cluster, p.begin, p.end): p for p in book.places()}
    assert list(places) == [(0, 0, 2), (0, 2, 4), (1, 0, 1), (1, 1, 4)]
    assert [p.open for p in places.values()] == [False, True, True, True]
    assert [p.holders for p in places.values()] == [1, 0, 1, 0]
    assert places[1, 1, 4].memory_bytes == 20 + 30 + 40


def test_where_all_blocks_are_held_the_least_reliable_holder_gets_a_backup():
    book = Membership((EVEN,), COSTS, {"flighty": 3, "c": 1})
    join(book, "flighty", 0, (0, 2))
    memory = Offered(device=1000)
    assert choose_place(book.places(), memory).begin == 2  # nobody holds these
    join(book, "c", 0, (2, 4))
    assert {(p.cluster, p.begin): p.departures for p in book.places()} == {
        (0, 0): 3, (0, 2): 1, (1, 0): 3, (1, 2): 1,
    }  # fmt: skip
    chosen = choose_place(book.places(), memory)
    assert (chosen.cluster, chosen.begin) == (1, 0)


def test_a_place_is_given_once():
    book = members()
    join(book, "a", 0, (0, 2))
    late = join(book, "b")
    assert not book.claim(late, 0, (0, 2))
    assert not book.claim(late, 0, (0, 1))
    assert not book.claim(late, 7, (0, 2))
    assert book.claim(late, 0, (2, 4))


def test_a_shared_place_is_given_to_any_number_and_the_least_reliable_holder_gets_a_replica():
    book = Membership((EVEN,), COSTS, {"flighty": 3, "c": 1}, only=5)
    join(book, "flighty", 5, (0, 2))
    join(book, "c", 5, (2, 4))
    assert not any(place.open for place in book.places())
    book.shared = True
    chosen = choose_place(book.places(), Offered(device=1000))
    assert (chosen.cluster, chosen.begin, chosen.holders) == (5, 0, 1)
    join(book, "d", 5, (0, 2))
    assert book.holders(0) == ["d", "flighty"]
    back = join(book, "e")
    assert book.adopt(back, (0, 2))
    assert not book.adopt(back, (0, 3))


def test_a_holder_that_comes_back_is_adopted_where_its_range_fits():
    book = members()
    join(book, "a", 0, (0, 2))
    back = join(book, "b")
    assert book.adopt(back, (0, 2))
    assert (back.cluster, back.place) == (2, (0, 2))
    for nonsense in ((0, 3), (2, 2), (3, 9), (-1, 2)):
        assert not book.adopt(join(book, "c"), nonsense)


def test_holders_are_those_that_are_ready():
    book = members()
    join(book, "b", 0, (0, 2))
    join(book, "a", 1, (0, 1))
    join(book, "c", 0, (2, 4), LifeCycle.PREPARED)
    assert book.holders(0) == ["a", "b"]
    assert book.uncovered() == [2, 3]
    assert book.uncovered({"x": (1, 4)}) == [0]
    b = book.volunteers["b"]
    assert book.held_only_by([b]) == [1]
    assert book.held_only_by([b, book.volunteers["a"]]) == [0, 1]


def test_somebody_redundant_fills_a_gap_if_it_is_big_enough():
    book = members(EVEN)
    join(book, "a", 0, (0, 2))
    join(book, "b", 1, (0, 2), offered=Offered(device=20))
    assert book.move_redundant().peer == "a"
    book = members(EVEN)
    join(book, "a", 0, (0, 2))
    assert book.move_redundant() is None


def test_a_new_version_leaves_behind_who_did_not_make_it():
    book = members()
    ready = join(book, "a", 0, (0, 2))
    behind = join(book, "b", 0, (2, 4))
    fetching = join(book, "c", 1, (0, 1), LifeCycle.SYNCING)
    joining = join(book, "d", 1, (1, 4), LifeCycle.JOINING)
    ready.digests = {0: "x"}
    book.outdate(["a"])
    assert [v.life_cycle for v in (ready, behind, fetching, joining)] == [
        LifeCycle.READY,
        LifeCycle.PREPARED,
        LifeCycle.PREPARED,
        LifeCycle.JOINING,
    ]
    assert ready.digests == {}
    book.start_over(same=False)
    assert {v.life_cycle for v in book.volunteers.values()} == {LifeCycle.JOINING}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.booleans()), max_size=20))
def test_no_two_volunteers_ever_have_one_place(moves):
    book = members()
    for peer, choice, leaves in moves:
        if leaves:
            book.volunteers.pop(peer, None)
        else:
            volunteer = book.volunteers.setdefault(peer, VolunteerState(peer, 1, 0.0))
            place = book.places()[choice % len(book.places())]
            book.claim(volunteer, place.cluster, (place.begin, place.end))
        taken = [(v.cluster, v.place) for v in book.volunteers.values() if v.place is not None]
        assert len(taken) == len(set(taken))
        assert any(place.open for place in book.places())


def test_one_busy_moment_does_not_change_an_uplink_much():
    volunteer = VolunteerState("a", 1, 0.0)
    for said, expected in ((0.0, 0.0), (100.0, 100.0), (0.0, 100.0), (50.0, 85.0)):
        volunteer.measured(said)
        assert volunteer.uplink == expected


def test_what_traffic_shows_replaces_what_a_hello_claims():
    volunteer = VolunteerState.of("a", Hello(run="r", incarnation=1, uplink=1e9), 0.0)
    for said, expected in ((0.0, 1e9), (1e6, 1e6), (2e6, 1.3e6)):
        volunteer.measured(said)
        assert volunteer.uplink == expected


def test_words_about_whom_one_shuns_count_between_those_who_take_part_and_who_shuns_most_ends_alone():
    """Otherwise idle names could exclude an honest volunteer, and a liar could choose who sees
    what it sends.
    """
    book = Membership((EVEN,), COSTS)
    one, behind = [], []
    for cluster, (first, second) in enumerate(("ax", "by", "cz")):
        one.append(join(book, first, cluster, (0, 2)))
        behind.append(join(book, second, cluster, (2, 4)))
    for number in range(50):
        join(book, f"idle {number}", life_cycle=LifeCycle.JOINING).shuns = frozenset("a")
    assert shunned(book.ready()) == set()
    one[0].shuns = frozenset(("x", "nobody"))
    assert shunned(book.ready()) == {frozenset("ax")}
    one[0].shuns = frozenset("xy")
    assert shunned(book.ready()) == {frozenset("ax"), frozenset("ay"), frozenset("az")}
    behind[0].shuns = frozenset("b")
    assert frozenset("bx") in shunned(book.ready())
    assert frozenset("ab") not in shunned(book.ready()), "they have nothing to do with each other"


def test_a_version_is_spoken_if_all_of_them_speak_it():
    book = members()
    for peer, version in (("new", 4), ("old", 3)):
        join(book, peer, wire_version=version)
    assert book.speak(4, ["new"])
    assert book.speak(3, ["new", "old"])
    assert not book.speak(4, ["new", "old"])
    assert not book.speak(3, ["new", "nobody"])
