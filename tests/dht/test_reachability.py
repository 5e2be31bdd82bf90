"""The pure cores: which helpers are asked, what their findings mean, and which path leads to whom."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.reach.reachability import (
    CONFIRM_S,
    HELPERS,
    RECHECK_S,
    RETRY_S,
    ROUND_S,
    Ask,
    PeerPath,
    PeerPaths,
    Reachability,
    ReachFinding,
    ReachKind,
    Settle,
    judge,
)
from hetpeer.dht.streams.abuse import DIAL_WINDOW_S, DIALS_PER_IP, DIALS_PER_PEER, DialBudget

OUTSIDE, NEAR = "51.51.51.7", "192.168.1.7"


def finding(helper: str, *, reached: bool, ip: str = OUTSIDE) -> ReachFinding:
    return ReachFinding(helper=helper, ip=ip, port=4001 if reached else 0)


def asked(effects: list) -> list[str]:
    return [effect.helper for effect in effects if isinstance(effect, Ask)]


def settled(effects: list) -> list[tuple[ReachKind, int]]:
    return [(e.estimate.reach, e.estimate.peers) for e in effects if isinstance(e, Settle)]


@pytest.mark.parametrize(
    ("reached", "near", "reach", "peers"),
    [
        ([], [], ReachKind.UNKNOWN, 0),
        ([True, True], [], ReachKind.PUBLIC, 2),
        ([True], [], ReachKind.PUBLIC, 1),
        ([False], [], ReachKind.PRIVATE, 1),
        (
            [True, False],
            [],
            ReachKind.PRIVATE,
            1,
        ),  # to be thought open when one is not is worse than the reverse
        ([False], [True, True], ReachKind.PRIVATE, 1),  # neighbours come in where nobody else does
        ([], [True, False, True], ReachKind.PUBLIC, 2),
    ],
)
def test_findings_are_weighed(reached: list[bool], near: list[bool], reach: ReachKind, peers: int) -> None:
    findings = [finding(f"o{i}", reached=r) for i, r in enumerate(reached)]
    findings += [finding(f"n{i}", reached=r, ip=NEAR) for i, r in enumerate(near)]
    estimate = judge(findings)
    assert (estimate.reach, estimate.peers) == (reach, peers)


def test_two_are_asked_and_a_third_if_one_cannot_tell() -> None:
    core = Reachability(0.0)
    assert asked(core.met(0.0, ["a", "b", "c"])) == ["a", "b"]
    assert asked(core.answered(0.1, "a", None)) == ["c"]
    assert not core.answered(0.2, "b", finding("b", reached=True))
    assert settled(core.answered(0.3, "c", finding("c", reached=True))) == [(ReachKind.PUBLIC, 2)]


def test_a_second_helper_adds_to_what_one_said() -> None:
    core = Reachability(0.0)
    core.met(0.0, ["a"])
    assert settled(core.answered(0.1, "a", finding("a", reached=False))) == [(ReachKind.PRIVATE, 1)]
    assert asked(core.met(5.0, ["a", "b"])) == ["b"]
    assert settled(core.answered(5.1, "b", finding("b", reached=False))) == [(ReachKind.PRIVATE, 2)]
    assert not core.met(5.2, ["a", "b", "c"])


def test_silence_is_judged_without() -> None:
    core = Reachability(0.0)
    core.met(0.0, ["a", "b"])
    core.answered(0.1, "a", finding("a", reached=True))
    assert not core.tick(ROUND_S - 0.1)
    assert settled(core.tick(ROUND_S)) == [(ReachKind.PUBLIC, 1)]
    assert not core.answered(ROUND_S + 1, "b", finding("b", reached=False))  # too late


def test_nothing_known_is_tried_again() -> None:
    core = Reachability(0.0)
    assert not core.tick(0.0)
    assert asked(core.met(1.0, ["a"])) == ["a"]
    assert not core.answered(1.1, "a", None)
    assert not core.tick(1.1 + RETRY_S - 0.1)
    assert asked(core.tick(1.1 + RETRY_S)) == ["a"]


def both(core: Reachability, now: float, *, reached: bool) -> list:
    """A round in which both helpers find the same."""
    assert sorted(asked(core.tick(now))) == ["a", "b"]
    core.answered(now, "a", finding("a", reached=reached))
    return core.answered(now, "b", finding("b", reached=reached))


def test_what_was_known_is_given_up_only_if_two_rounds_say_so() -> None:
    core = Reachability(0.0)
    core.met(-1.0, ["a", "b"])
    assert settled(both(core, 0.0, reached=True)) == [(ReachKind.PUBLIC, 2)]
    assert not both(core, RECHECK_S, reached=False)
    assert core.estimate.reach is ReachKind.PUBLIC
    assert not both(core, RECHECK_S + CONFIRM_S, reached=True)
    now = 2 * RECHECK_S + CONFIRM_S
    assert not both(core, now, reached=False)
    assert settled(both(core, now + CONFIRM_S, reached=False)) == [(ReachKind.PRIVATE, 2)]


def test_other_addresses_and_no_relay_are_reasons_to_ask_again() -> None:
    core = Reachability(0.0)
    assert not core.moved(0.0, {"10.0.0.1"})
    core.met(-1.0, ["a", "b"])
    both(core, 0.0, reached=False)
    assert not core.moved(1.0, {"10.0.0.1"})
    assert sorted(asked(core.moved(2.0, {"10.0.0.2"}))) == ["a", "b"]
    for helper in "ab":
        core.answered(2.0, helper, finding(helper, reached=False))
    for now in (3.0, 10.0, 20.0):
        assert not core.unserved(now)
        assert not core.met(now, ["a", "b"])
    assert sorted(asked(core.unserved(2.0 + RETRY_S))) == ["a", "b"]


@given(
    st.lists(st.tuples(st.sampled_from(["met", "answer", "tick", "moved", "unserved"]), st.integers(0, 5)))
)
def test_never_asks_a_stranger_nor_too_many_at_a_time(events: list[tuple[str, int]]) -> None:
    core, known, awaited, clock = Reachability(0.0), [], set(), itertools.count(0, 5)
    for kind, number in events:
        now = float(next(clock))
        match kind:
            case "met":
                known = [f"p{i}" for i in range(number)]
                effects = core.met(now, known)
            case "answer":
                helper = f"p{number}"
                said = [None, finding(helper, reached=False), finding(helper, reached=True, ip=NEAR)][
                    number % 3
                ]
                effects = core.answered(now, helper, said)
                awaited.discard(helper)
            case "tick":
                effects = core.tick(now)
            case "moved":
                effects = core.moved(now, {str(number)})
            case _:
                effects = core.unserved(now)
        if not core._awaited:
            awaited.clear()
        awaited |= set(asked(effects))
        assert set(asked(effects)) <= set(known)
        assert len(awaited) <= 2 * HELPERS
        assert all(reach is not ReachKind.UNKNOWN for reach, _ in settled(effects))


def test_the_budget_is_per_peer_per_address_and_forgets() -> None:
    budget = DialBudget()
    assert sum(budget.admit(0.0, "one", "51.51.51.1") for _ in range(100)) == DIALS_PER_PEER
    assert (
        sum(budget.admit(1.0, f"sybil {i}", "51.51.51.1") for i in range(100))
        == DIALS_PER_IP - DIALS_PER_PEER
    )
    assert budget.admit(1.0, "other", "51.51.51.2")
    assert budget.admit(1.0 + DIAL_WINDOW_S, "one", "51.51.51.1")
    for i in range(1000):
        budget.admit(100.0 + DIAL_WINDOW_S * i, f"peer {i}", f"ip {i}")
    assert len(budget._recent) < 10


R = "QmRelay"
THROUGH = f"/ip4/51.51.51.1/tcp/4001/p2p/{R}/p2p-circuit"
DIRECT = "/ip4/51.51.51.2/tcp/4001"


def test_a_direct_connection_counts_more_than_a_relayed_one() -> None:
    paths = PeerPaths()
    assert not paths.update([("a", THROUGH), ("b", DIRECT), (R, DIRECT)])
    assert (paths.of("a"), paths.of("b"), paths.of("c")) == (PeerPath(relay=R), PeerPath(), None)
    assert (paths.relayed, paths.through(R)) == (["a"], ["a"])
    for both in ([("a", DIRECT), ("a", THROUGH)], [("a", THROUGH), ("a", DIRECT)]):
        paths.update([("a", THROUGH)])
        assert str(paths.of("a")) == f"through {R[-8:]}"
        assert paths.update(both) == ["a"]
        assert str(paths.of("a")) == "direct"
    assert not paths.update([("a", DIRECT)])
    assert not paths.update([])
    assert paths.of("a") is None
    assert not paths.update([("a", DIRECT), ("b", "")])
