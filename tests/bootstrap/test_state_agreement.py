"""Whose word on a state counts: most of those who have made it, whoever speaks first (docs/trust.md,
"Agreement on states").
"""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.effects import CoordinatorState
from tests.bootstrap.court import BLOCKS, Court, kinds


def decided(*peers, **changes):
    """A step is committed, and nobody has said yet what came of it."""
    court = Court(**changes).begin(*peers)
    court.count(*peers)
    for peer in peers:
        court.vote(peer)
    return court


def gone(court):
    return [record["peer"] for record in court.records if record["kind"] == "gone"]


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_most_are_right_whoever_speaks_first(order):
    court = decided("a", "b", "c")
    for peer in order:
        court.applied(peer, digest="false" if peer == "c" else "state")
    assert gone(court) == ["c"]
    assert court.sent["c", "fenced"].why == "its state is not that of most holders"
    assert set(court.core.working()) == {"a", "b"}


def test_the_first_word_convicts_nobody():
    court = decided("a", "b", "c")
    court.applied("c", digest="false")
    court.applied("a")
    assert not gone(court)
    court.applied("b")
    assert gone(court) == ["c"]


def test_a_second_word_does_not_count():
    court = decided("a", "b", "c")
    for peer, digest in (("a", "state"), ("c", "state"), ("c", "false"), ("b", "state")):
        court.applied(peer, digest=digest)
    assert not gone(court)


def test_nobody_says_anything_of_blocks_that_are_not_its_own():
    court = Court(layouts=(((0, 1), (1, 2)),)).begin("a", "b", "c", "d")
    court.count("a", "b")
    for peer in "abcd":
        court.vote(peer)
    version = court.core.history.version
    everything = tuple(m.Held(block=b, version=version, digest="false") for b in range(BLOCKS))
    court.tell("a", m.Applied(line=court.line, step=version - 1, held=everything))
    assert court.core.members.volunteers["a"].digests == {}


def test_who_has_not_spoken_when_the_next_step_is_decided_is_not_waited_for():
    court = decided("a", "b", "c", "d")
    for peer, digest in (("d", "false"), ("a", "state"), ("b", "state")):
        court.applied(peer, digest=digest)
    assert not gone(court), "two of four"
    court.count("a")
    for peer in "abcd":
        court.vote(peer)
    assert gone(court) == ["d"]
    for peer in "abc":
        court.vote(peer)
    assert court.core.history.version == 2


def test_who_says_so_again_and_again_does_not_come_back():
    court = Court(steps=99, checkpoint_every=99).begin("a", "b", "c")
    for times in range(3):
        if times:
            court.prepare("c")
            while "c" in court.core._context.disputed_pairs.resting:
                court.commit("a", "b")
            court.commit("a", "b")
            court.ready("c")
        court.count("a")
        for peer in "abc":
            court.vote(peer)
        for peer in "cab":
            court.applied(peer, digest="false" if peer == "c" else "state")
    assert [record["peer"] for record in court.records if record["kind"] == "banned"] == ["c"]


def test_where_it_is_word_against_word_the_run_goes_back_to_what_all_had_and_one_rests():
    court = decided("a", "b", checkpoint_every=9)
    court.applied("b", digest="false")
    assert kinds(court.applied("a")) == ["gone", "rollback"]
    assert court.records[-1]["to_version"] == 0
    (one,) = gone(court)
    other = ({"a", "b"} - {one}).pop()
    court.prepare_again(other)
    court.prepare(one)
    assert court.core.state is CoordinatorState.TRAINING, "nobody waits for who rests"
    court.commit(other)
    assert court.order.version == 1, "so that the next time costs less"


def test_a_copy_is_no_word_of_its_own():
    """Two who have copied a false state are not more than the one who has made his own."""
    court = decided("a", "b", checkpoint_every=9)
    court.applied("b")
    for copy in ("x", "y"):
        court.prepare(copy)
        court.ready(copy, digest="false")
    court.applied("a")
    assert sorted(gone(court)) == ["x", "y"]
    assert set(court.core.working()) == {"a", "b"}


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────


def saving(*peers):
    return decided(*peers, checkpoint_every=1)


def give(court, **digests):
    """All savers give their states; who of them gives what else."""
    for block, saver in court.order.savers.items():
        digest = digests.get(saver, "state")
        court.do(court.core.saved(court.order, block, f"{digest} {block}", court.now))


def checkpoints(court):
    return [record["version"] for record in court.records if record["kind"] == "checkpoint"]


def test_a_checkpoint_is_what_most_holders_have_and_not_what_its_saver_gives():
    court = saving("a", "b", "c")
    for peer in "abc":
        court.applied(peer)
    give(court, a="another")
    assert gone(court) == ["a"]
    assert not checkpoints(court)


def test_a_checkpoint_waits_until_it_is_certain_but_not_for_ever():
    court = saving("a", "b")
    court.applied("a")
    give(court)
    assert not checkpoints(court)
    court.applied("b")
    assert checkpoints(court) == [1]
    court = saving("a", "b")
    court.applied("a")
    give(court)
    for _ in range(60):
        for peer in "ab":
            court.tell(peer, m.Paced(computing=0.0, links={}))
        court.tick(0.2)
    assert checkpoints(court) == [1], "b is there, and says nothing"


def test_what_was_said_of_a_version_is_known_when_it_is_past():
    court = Court(checkpoint_every=2).begin("a", "b", "c")
    for _ in range(3):
        court.commit("a", "b", "c")
    assert (court.order.version, court.core.history.version) == (2, 3)
    give(court, a="another")
    assert gone(court) == ["a"]
    assert not checkpoints(court)
