"""Whether sums are what was sent, and whose word is against whose, with real fingerprints and everybody's
answers made by hand.
"""

import itertools

import numpy as np
import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.reduce.reduce_shards import shares_of
from hetpeer.bootstrap.conduct.reputation import CheckRules
from hetpeer.bootstrap.trust.sum_proof import SumProof
from hetpeer.bootstrap.trust.sum_proofs import StepSumProofs
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.block.fingerprint import KEY_BYTES, distance, fingerprint, pack, unpack
from tests.bootstrap.court import Court

LINE = m.TermView(term=1, view=0)
ELEMENTS = 1000
NUMBERS = np.random.default_rng(0)


def rules(draw=lambda: 0.0):
    keys = itertools.count(1)
    return CheckRules(
        share=0.1,
        draw=draw,
        key=lambda: next(keys).to_bytes(KEY_BYTES, "big"),
        distance=distance,
    )


def cover(peers, block=0, reducers=None):
    return m.Cover(
        block=block,
        slots=tuple((peer, (number,)) for number, peer in enumerate(peers)),
        reducers=tuple((peer, 1) for peer in reducers or peers),
        receivers=tuple(peers),
    )


class Swarm:
    """Holders of one block, each with its part.

    `sums` what has come of all; `said`: what somebody says of its part or of the sum, in place of the truth.
    """

    def __init__(self, peers, seed=0, **said):
        self.peers = peers
        self.parts = {peer: self.vector() for peer in peers}
        self.sent = {}
        """(plan, sender) → what it sends there, where that is not its part."""
        self.said = said
        self.besides = {}
        """Who → what it adds to its part where a share is asked for: not where the whole is."""
        self.rules = rules(np.random.default_rng(seed).random)
        self.proofs = StepSumProofs(self.rules, LINE, 3, {0: ELEMENTS})
        self.plan = 0
        self.covers = {}
        self.secrets = {}
        self.asked = []

    def part(self, plan, peer):
        return self.sent.get((plan, peer), self.parts[peer])

    def sums(self):
        return sum(self.part(self.plan, peer) for peer in self.peers)

    def vector(self):
        return NUMBERS.standard_normal(ELEMENTS).astype(np.float32)

    def reduce(self, wrong=""):
        """Another plan; `wrong`: whose share of the sum is false, each element by one.

        All vote, and are asked for their proofs.
        """
        self.plan += 1
        reducers = self.proofs.choose(0, self.peers, self.peers)
        wrong = reducers[0] if wrong == "the witness" else wrong
        told = self.covers[self.plan] = cover(self.peers, reducers=reducers)
        self.proofs.plan(self.plan, [told])
        total = self.sums()
        for reducer, begin, end in shares_of(told, ELEMENTS):
            total[begin:end] += reducer == wrong
        self.secrets[self.plan] = {peer: self.rules.key() for peer in self.peers}
        self.prove(self.proofs.begin(), total)
        return reducers

    def prove(self, asked, total):
        """Everybody answers until nobody is asked any more."""
        while asked:
            follow = []
            for effect in asked:
                self.asked.append((effect.to, effect.message))
                follow += self.proofs.receive(effect.to, self.answer(effect.to, effect.message, total))
            asked = follow

    def answer(self, peer, message, total):
        named = {"line": LINE, "step": 3, "plan": message.plan}
        if isinstance(message, m.Testify):
            received = [
                m.Receipt(peer=sender, mark=marked(mark, self.said.get(f"{peer} of {sender}", part)))
                for mark in message.marks
                for sender in self.peers
                for part in [self.part(message.plan, sender)]
            ]
            return m.Testimony(**named, received=tuple(received))
        part, got = self.said.get(f"{peer}'s part", self.parts[peer]), self.said.get(f"{peer}'s sum", total)
        beside = part + self.besides.get(peer, np.float32(0))
        return m.Proved(
            **named,
            parts=tuple(
                marked(mark, part if mark.end - mark.begin == ELEMENTS else beside) for mark in message.marks
            ),
            sums=tuple(marked(mark, got) for mark in message.marks),
            key=self.secrets[message.plan][peer],
        )


def marked(mark, vector):
    values = pack(fingerprint(vector[mark.begin : mark.end], mark.block, mark.begin, mark.key))
    return mark.model_copy(update={"values": values})


def pairs(swarm):
    return {tuple(sorted(pair)) for theirs in swarm.proofs.disputes().values() for pair in theirs}


# ── what was sent ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_sent_is_proven_with_one_question():
    swarm = Swarm("abcd")
    swarm.reduce()
    assert swarm.proofs.over
    assert not swarm.proofs.found_false
    assert len(swarm.asked) == 4
    assert pairs(swarm) == set()


@pytest.mark.parametrize("liar", "abcd")
def test_what_a_reducer_has_added_besides_is_found_and_another_adds_it_up(liar):
    swarm = Swarm("abcd")
    swarm.reduce(wrong=liar)
    assert swarm.proofs.over
    assert swarm.proofs.found_false
    assert pairs(swarm) == set(), "it may be a sender's doing"
    (witness,) = swarm.reduce()
    assert witness != liar
    assert swarm.proofs.over
    assert not swarm.proofs.found_false
    assert pairs(swarm) == {tuple(sorted((liar, witness)))}


@pytest.mark.parametrize("seed", range(4))
def test_who_frames_reducers_is_in_dispute_with_whoever_has_got_its_part(seed):
    """Reducers that were in question are not: what they had received of it was its part."""
    swarm = Swarm("abcd", seed, **{"d's part": NUMBERS.standard_normal(ELEMENTS).astype(np.float32)})
    swarm.reduce()
    assert swarm.proofs.found_false
    swarm.said.clear()
    (witness,) = swarm.reduce()
    suspects = {"a", "b", "c", "d"}
    expected = {("d", other) for other in suspects - {"d"}} if witness == "d" else {(witness, "d")}
    assert pairs(swarm) == {tuple(sorted(pair)) for pair in expected}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("says", [1, 2])
def test_who_sends_something_else_in_each_plan_is_in_dispute_with_who_has_got_what_it_does_not_say(
    seed, says
):
    """Not they with each other, though they have got other things of it."""
    swarm = Swarm("abcd", seed)
    swarm.sent[1, "d"] = swarm.vector()
    swarm.reduce()
    swarm.said["d's part"] = swarm.part(says, "d")
    swarm.reduce()
    found = pairs(swarm)
    assert found
    assert all("d" in pair for pair in found)


@pytest.mark.parametrize("peers", ["ab", "abc", "abcdefgh"])
@pytest.mark.parametrize("sender", "ab")
def test_who_says_of_a_share_what_it_does_not_say_of_the_whole_is_found(peers, sender):
    """The reducer adds something, and it, or another of its mind, says that this was its part of the
    share; of the whole, which spot checks compare, it says the truth.
    """
    swarm = Swarm(peers)
    (begin, end), *_ = [(i, j) for who, i, j in shares_of(cover(peers), ELEMENTS) if who == "a"]
    swarm.besides[sender] = np.zeros(ELEMENTS, np.float32)
    swarm.besides[sender][begin:end] = 1
    swarm.reduce(wrong="a")
    assert swarm.proofs.found_false
    assert swarm.proofs.contradict() == {sender}
    assert pairs(swarm) == set(), "nothing of what it has said is held against anybody"


@pytest.mark.parametrize("seed", range(4))
def test_whose_words_on_shares_add_up_is_in_dispute_over_the_one_that_it_took_from(seed):
    """The key is known when shares are asked for: what it says too much of its own share it says too
    little of another.
    """
    swarm = Swarm("abcd", seed)
    shares = {who: (begin, end) for who, begin, end in shares_of(cover("abcd"), ELEMENTS)}
    honest = swarm.answer

    def answer(peer, message, total):
        said = honest(peer, message, total)
        if peer != "a" or message.plan > 1 or message.marks[0].end - message.marks[0].begin == ELEMENTS:
            return said
        begin, end = shares["a"]
        key = message.marks[0].key
        added = fingerprint(np.ones(end - begin, np.float32), 0, begin, key)
        much = {shares["a"]: added, shares["b"]: -added}
        parts = tuple(
            part.model_copy(
                update={"values": pack(unpack(part.values) + much.get((part.begin, part.end), 0.0))}
            )
            for part in said.parts
        )
        return said.model_copy(update={"parts": parts})

    swarm.answer = answer
    swarm.reduce(wrong="a")
    assert swarm.proofs.found_false
    assert swarm.proofs.contradict() == set()
    swarm.reduce()
    assert not swarm.proofs.found_false
    found = pairs(swarm)
    assert found
    assert all("a" in pair for pair in found)


@pytest.mark.parametrize(("times", "drowns"), [(1e5, False), (1e9, True)])
def test_a_part_in_which_all_others_drown_is_its_senders_doing(times, drowns):
    """One that is long, as of a sample that the model has never seen, is none: what is not as expected is
    its rounding.
    """
    swarm = Swarm("abcd")
    swarm.parts["d"] *= np.float32(times)
    swarm.reduce()
    assert swarm.proofs.found_false == drowns
    assert swarm.proofs.huge() == ({"d"} if drowns else set())
    assert pairs(swarm) == set()


def test_two_parts_that_are_long_hide_nothing():
    swarm = Swarm("abcdef")
    for peer, times in (("e", 1e6), ("f", -1e6)):
        swarm.parts[peer] = np.full(ELEMENTS, times, np.float32)
    swarm.reduce(wrong="a")
    assert swarm.proofs.found_false
    assert swarm.proofs.huge() == {"e", "f"}


def test_a_reducer_that_says_it_had_something_else_is_in_dispute_with_its_sender_and_the_witness():
    swarm = Swarm("abcd", **{"a of b": np.ones(ELEMENTS, np.float32)})
    swarm.reduce(wrong="a")
    (witness,) = swarm.reduce()
    assert pairs(swarm) == {("a", "b"), tuple(sorted(("a", witness)))}


def test_a_witness_that_lies_is_in_dispute_with_those_of_whom_it_says_so():
    for seed in range(9):
        swarm = Swarm("abcd", seed, **{"c of b": np.ones(ELEMENTS, np.float32)})
        swarm.reduce(wrong="a")
        (witness,) = swarm.reduce()
        if witness == "c":
            assert pairs(swarm) == {("b", "c")}
            return
    pytest.fail("it was never the witness")


def test_who_disowns_what_it_got_is_in_dispute_with_all_reducers():
    swarm = Swarm("abcd", **{"d's sum": np.zeros(ELEMENTS, np.float32)})
    swarm.reduce()
    assert not swarm.proofs.found_false
    assert pairs(swarm) == {("a", "d"), ("b", "d"), ("c", "d")}


def test_of_two_it_is_word_against_word():
    swarm = Swarm("ab")
    swarm.reduce(wrong="a")
    assert swarm.proofs.found_false
    assert pairs(swarm) == {("a", "b")}


def test_a_sum_of_the_witness_is_proven_like_any():
    swarm = Swarm("abcd")
    swarm.reduce(wrong="a")
    (witness,) = swarm.reduce(wrong="the witness")
    assert swarm.proofs.found_false
    (third,) = swarm.reduce()
    assert third != witness
    assert not swarm.proofs.found_false
    assert pairs(swarm) == {tuple(sorted(pair)) for pair in (("a", witness), (witness, third))}


def test_a_claim_ends_where_there_is_nothing_to_compare_any_more():
    swarm = Swarm("abcd")
    swarm.reduce(wrong="a")
    swarm.peers = "abc"
    swarm.reduce()
    assert swarm.proofs.over
    assert not any(isinstance(message, m.Testify) for _, message in swarm.asked)
    assert pairs(swarm) == set()
    assert swarm.proofs.fled() == {"d"}
    assert swarm.proofs.fled() == set()


def test_what_is_rounded_is_not_false_and_what_is_huge_hides_nothing():
    for noise, false in ((1e-7, False), (1e-3, True)):
        swarm = Swarm("abc")
        swarm.sent[1, "a"] = (swarm.parts["a"] * (1 + noise * swarm.vector())).astype(np.float32)
        swarm.reduce()
        assert swarm.proofs.found_false == false
    huge = np.full(ELEMENTS, 3e38, np.float32)
    swarm = Swarm("abcdef", **{"a's part": huge, "b's part": -huge})
    swarm.reduce(wrong="a")
    assert swarm.proofs.found_false, "two of one mind do not hide what a third adds"


# ── who is asked ────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_asked_about_a_block_with_one_holder_or_without_parameters():
    for peers, elements in (("a", ELEMENTS), ("abc", 0)):
        proofs = StepSumProofs(rules(), LINE, 0, {0: elements})
        proofs.plan(1, [cover(peers)])
        assert proofs.begin() == []
        assert proofs.over
        assert not proofs.silent


def test_of_many_blocks_some_are_asked_for_that_nobody_can_foresee():
    blocks = range(2 * m.MOST_MARKS)
    proof = SumProof(
        1,
        [cover("ab", block) for block in blocks],
        dict.fromkeys(blocks, 10),
        rules(np.random.default_rng(0).random),
    )
    asked = proof.begin()
    assert {len(marks) for marks in asked.values()} == {m.MOST_MARKS}
    assert [mark.block for mark in asked["a"]] != list(blocks)[: m.MOST_MARKS]


def test_what_is_too_much_to_be_asked_for_is_added_up_by_one():
    """Of so many reducers not all shares can be looked at, so nobody knows which is false."""
    peers = [f"peer {number}" for number in range(m.MOST_MARKS + 9)]
    swarm = Swarm(peers)
    swarm.rules = rules(lambda: 0.0)
    swarm.proofs.rules = swarm.rules
    assert len(swarm.reduce(wrong=peers[-1])) == len(peers)
    assert swarm.proofs.found_false
    assert len(swarm.reduce()) == 1
    assert not swarm.proofs.found_false
    assert pairs(swarm) == set()


def test_where_half_say_that_it_is_false_it_is_added_up_anew():
    swarm = Swarm("abc", **{"c's sum": np.zeros(ELEMENTS, np.float32)})
    swarm.reduce()
    assert swarm.proofs.found_false
    assert pairs(swarm) == {("a", "c"), ("b", "c")}


def test_so_many_claims_are_looked_into_as_fit_into_messages():
    blocks = range(3 * m.MOST_MARKS)
    proofs = StepSumProofs(rules(), LINE, 3, dict.fromkeys(blocks, ELEMENTS))
    covers = [cover("abc", block) for block in blocks]
    proofs.plan(1, covers)
    for effect in proofs.begin():
        named = {"line": LINE, "step": 3, "plan": 1, "key": bytes(KEY_BYTES)}
        nothing = [marked(mark, np.zeros(ELEMENTS, np.float32)) for mark in effect.message.marks]
        something = [marked(mark, np.ones(ELEMENTS, np.float32)) for mark in effect.message.marks]
        follow = proofs.receive(effect.to, m.Proved(**named, parts=tuple(nothing), sums=tuple(something)))
    for effect in follow:
        nothing = [marked(mark, np.zeros(ELEMENTS, np.float32)) for mark in effect.message.marks]
        something = [marked(mark, np.ones(ELEMENTS, np.float32)) for mark in effect.message.marks]
        proofs.receive(effect.to, m.Proved(**named, parts=tuple(nothing), sums=tuple(something)))
    assert proofs.found_false
    alone = {block: proofs.choose(block, "abc", "abc") for block in blocks}
    proofs.plan(2, [cover("abc", block, alone[block]) for block in blocks])
    assert 0 < max(len(proofs.marks(peer)) for peer in "abc") <= m.MOST_MARKS
    for effect in proofs.begin():
        assert len(effect.message.marks) <= m.MOST_MARKS


def test_under_which_key_it_has_received_everybody_says_before_it_knows_what_is_in_question():
    swarm = Swarm("abc")
    first = swarm.secrets
    swarm.reduce(wrong="a")
    (claim,) = swarm.proofs._claims
    assert claim.secret == first[1]["a"]
    answer = swarm.answer

    def another_key(peer, message, total):
        return answer(peer, message, total).model_copy(update={"key": bytes([len(swarm.asked)] * KEY_BYTES)})

    swarm = Swarm("abc")
    answer, swarm.answer = swarm.answer, another_key
    swarm.reduce(wrong="a")
    (claim,) = swarm.proofs._claims
    assert claim.secret[0] <= 3, "it was asked for the shares of all three afterwards"


def test_who_does_not_answer_is_waited_for():
    proofs = StepSumProofs(rules(), LINE, 3, {0: ELEMENTS})
    proofs.plan(1, [cover("abc")])
    assert not proofs.silent, "not all have voted"
    assert proofs.begin()
    assert not proofs.begin(), "once"
    assert proofs.silent == {"a", "b", "c"}
    proofs.void()
    assert not proofs.silent


@pytest.mark.parametrize("wrong", ["key", "values", "places", "missing"])
def test_an_answer_that_nobody_honest_gives_is_refused(wrong):
    swarm = Swarm("abc")
    swarm.proofs.plan(1, [cover("abc")])
    (ask, *_) = swarm.proofs.begin()
    swarm.secrets[1] = dict.fromkeys("abc", bytes(KEY_BYTES))
    right = swarm.answer(ask.to, ask.message, swarm.sums())
    (mark,) = right.parts
    changes = {
        "key": {"key": b""},
        "values": {"sums": (mark.model_copy(update={"values": np.full(256, np.nan).tobytes()}),)},
        "places": {"parts": (mark.model_copy(update={"end": 7}),)},
        "missing": {"parts": ()},
    }
    with pytest.raises(ProtocolError):
        swarm.proofs.receive(ask.to, right.model_copy(update=changes[wrong]))
    assert ask.to in swarm.proofs.silent
    assert swarm.proofs.receive("stranger", right) == []
    assert swarm.proofs.receive(ask.to, right.model_copy(update={"plan": 9})) == []


# ── at the coordinator ──────────────────────────────────────────────────────────────────────────────────────


def proving(peers, **changes):
    """All of `peers` have voted."""
    court = Court(checks=rules(lambda: 0.9), **changes).begin(*peers)
    court.count(peers[0])
    for peer in peers:
        court.vote(peer)
    return court


def test_nothing_is_committed_before_all_have_proven_it():
    court = proving("abc")
    assert court.core.history.version == 0
    court.prove("a")
    court.prove("b")
    assert court.core.history.version == 0
    court.prove("c")
    assert court.core.history.version == 1


def test_who_votes_twice_changes_nothing():
    court = proving("abc")
    asked = court.sent["a", "prove"]
    court.vote("a")
    assert court.sent["a", "prove"] is asked


def test_who_says_nothing_has_to_come_back_as_another():
    court = proving("abc", reduce_s=5.0, lease_s=100.0)
    court.prove("a")
    court.prove("b")
    court.tick(14.0)
    assert court.core.members.volunteers.keys() == {"a", "b", "c"}, "they may be slow"
    court.tick(2.0)
    assert court.core.members.volunteers.keys() == {"a", "b"}


def test_who_talks_of_something_else_has_said_nothing():
    court = proving("abc", reduce_s=5.0, lease_s=100.0)
    court.prove("a")
    court.prove("b")
    for _ in range(16):
        court.tick(1.0)
        court.tell("c", m.Proved(line=court.line, step=0, plan=7, parts=(), sums=()))
        court.tell("c", m.Testimony(line=court.line, step=0, plan=7, received=()))
    assert court.core.members.volunteers.keys() == {"a", "b"}


def test_a_sum_that_is_false_is_added_up_by_another():
    court = proving("abc")
    told = court.sent["a", "plan"]
    assert [len(one.reducers) for one in told.covers] == [3, 3]
    for peer in "abc":
        court.prove(peer, got=1.0)
    for peer in "abc":
        court.prove(peer, got=1.0)
    again = court.sent["a", "plan"]
    assert again.plan == told.plan + 1
    assert [len(one.reducers) for one in again.covers] == [1, 1]
    witness = again.covers[0].reducers[0][0]
    assert court.sent[witness, "plan"].marks
    assert court.core.history.version == 0
