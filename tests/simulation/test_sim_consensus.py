"""Several reliable peers keep one log: nothing decided is lost or decided twice, and somebody leads again
soon.
"""

from collections import Counter

import pytest

from hetpeer.bootstrap.consensus.effects import (
    Decided,
    Durable,
    RaftConfig,
    RaftRole,
    SaveBallot,
    SaveEntries,
    SendRaft,
)
from hetpeer.bootstrap.consensus.raft import Raft
from hetpeer.bootstrap.consensus.raft_entries import StoredEntries
from hetpeer.bootstrap.consensus.raft_messages import Append, Appended, LogEntry, VoteReply
from hetpeer.peer.simulate.sim_hooks import ViolationError
from tests.amounts import mostly_proof
from tests.simulation.sim_consensus import ConsensusFaults, SimConsensus, SimConsensusConfig

TROUBLE_S, CALM_S = 40.0, 30.0
FAULTS, PROPOSED = 20, 200
HISTORIES = 100
FEW = 30
NEW_LEADER_S = 5.0


def history(seed: int, make=Raft, faults: int = FAULTS) -> SimConsensus:
    """Faults and proposals for a while, then calm; raises ViolationError."""
    consensus = SimConsensus(seed, SimConsensusConfig(peers=(3, 5)[seed % 2]), make)
    ConsensusFaults(consensus, faults, TROUBLE_S)
    consensus.start()
    for _ in range(PROPOSED):
        consensus.world.run(consensus.world.now + TROUBLE_S / PROPOSED, lambda: False)
        consensus.propose()
    consensus.calm, consensus.ambushes = True, 0
    consensus.heal()
    for seat in consensus.seats.values():
        seat.start()
    consensus.world.run(TROUBLE_S + CALM_S, lambda: False)
    last = consensus.propose()
    consensus.world.run(consensus.world.now + 3.0, lambda: consensus.is_decided(last))
    if not consensus.is_decided(last):
        raise ViolationError("liveness: nothing is decided after all is well again")
    twice = [n for n, times in Counter(_numbers(consensus)).items() if times > 1]
    if twice:
        raise ViolationError(f"decided twice: {twice}")
    return consensus


def _numbers(consensus: SimConsensus) -> list[int]:
    return [entry.record["number"] for entry in consensus.truth if entry.record and "number" in entry.record]


@pytest.mark.parametrize("count", mostly_proof([FEW, HISTORIES], [FEW]))
def test_histories(count):
    decided = [len(_numbers(history(seed))) for seed in range(count)]
    assert sum(decided) > PROPOSED * count / 4


def led(seed: int, **settings) -> SimConsensus:
    """One whose first leader is there."""
    consensus = SimConsensus(seed, SimConsensusConfig(**settings))
    consensus.start()
    consensus.world.run(20.0, lambda: consensus.leader() is not None)
    return consensus


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("peers", [3, 5])
def test_a_leader_that_dies_is_replaced_within_five_seconds(peers, seed):
    consensus = led(seed, peers=peers, lost=0.0, doubled=0.0)  # as our channels are
    number = consensus.propose()
    consensus.world.run(consensus.world.now + 2.0, lambda: False)
    for reigns in range(1, peers // 2 + 1):
        died = consensus.world.now
        consensus.leader().kill()
        consensus.world.run(died + NEW_LEADER_S, lambda reigns=reigns: len(consensus.led_at) > reigns)
        assert len(consensus.led_at) == reigns + 1
        assert consensus.is_decided(number)


def test_a_leader_that_leaves_is_replaced_at_once():
    consensus = led(3, lost=0.0, doubled=0.0)
    leader, at = consensus.leader(), consensus.world.now
    leader.act(lambda raft, _: raft.leave())
    consensus.world.run(at + 1.0, lambda: len(consensus.led_at) > 1)
    assert consensus.led_at[-1] - at < 1.0
    assert consensus.leader() is not leader


def test_the_minority_decides_nothing():
    consensus = led(1, lost=0.0, doubled=0.0)
    leader = consensus.leader()
    for other in consensus.seats:
        consensus.cut(leader.name, other)
        consensus.cut(other, leader.name)
    leader.act(lambda raft, now: raft.propose([{"kind": "number", "number": -1}], now))
    consensus.world.run(consensus.world.now + 10.0, lambda: False)
    assert leader.raft.role is not RaftRole.LEADER
    consensus.heal()
    number = consensus.propose()
    consensus.world.run(consensus.world.now + 5.0, lambda: consensus.is_decided(number))
    assert consensus.is_decided(number)
    assert not consensus.is_decided(-1)


def test_who_leads_knows_who_lacks_what_and_since_when_it_is_silent():
    consensus = led(1, lost=0.0, doubled=0.0)
    leader = consensus.leader()
    one, other = (seat for seat in consensus.seats.values() if seat is not leader)
    consensus.world.run(consensus.world.now + 2.0, lambda: False)

    def known(at, of):
        return at.raft.lacks(of.name), at.raft.silent_s(of.name, consensus.world.now)

    assert known(leader, leader) == (0, None)
    assert known(leader, one)[0] == known(one, one)[0] == 0
    assert known(one, other) == (None, None), "who follows knows of itself and of who leads"
    assert known(one, leader)[0] is None
    assert known(leader, one)[1] < 1.0
    assert known(one, leader)[1] < 1.0
    for name in consensus.seats:
        consensus.cut(name, one.name)
        consensus.cut(one.name, name)
    cut_at = consensus.world.now
    for _ in range(3):
        consensus.propose(1)
        consensus.world.run(consensus.world.now + 1.0, lambda: False)
    assert known(leader, one)[0] == 3
    assert known(leader, one)[1] > consensus.world.now - cut_at - 1.0
    assert known(leader, other)[0] == 0
    assert known(one, one)[0] == 0, "it cannot know"
    consensus.heal()
    consensus.world.run(consensus.world.now + 5.0, lambda: False)
    leader = consensus.leader()
    assert all(leader.raft.lacks(name) == 0 for name in consensus.seats)


def test_who_follows_lacks_what_it_does_not_know_to_be_decided():
    """Its later entries may be another leader's."""
    entries = [LogEntry(term=1, record={"kind": "number", "number": number}) for number in range(10)]
    config = RaftConfig(me="r0", members=("r0", "r1", "r2"))
    raft = Raft(config, Durable(1, None, StoredEntries(entries)), 0.0)
    raft.receive("r1", Append(term=2, begin=4, last_term=1, committed=10), 0.0)
    assert (raft.decided, raft.lacks("r0")) == (4, 6)
    raft.receive("r1", Append(term=2, begin=4, last_term=1, entries=tuple(entries[4:]), committed=10), 0.0)
    assert (raft.decided, raft.lacks("r0")) == (10, 0)


def test_a_member_that_lost_its_log_is_not_answered_at_once():
    """It refuses whatever comes after what it had said to have: leader and member would talk without end."""
    consensus = led(1, lost=0.0, doubled=0.0)
    leader, now = consensus.leader(), consensus.world.now + 1.0
    consensus.propose()
    consensus.world.run(now, lambda: False)
    other = next(seat for seat in consensus.seats.values() if seat is not leader)
    empty = Raft(RaftConfig(me=other.name, members=consensus.first), Durable(), now)
    (told,) = [e for e in leader.raft.tick(now + 0.5) if isinstance(e, SendRaft) and e.to == other.name]
    *_, answer = empty.receive(leader.name, told.message, now)
    assert not answer.message.fits
    assert leader.raft.receive(other.name, answer.message, now) == []
    assert leader.raft.lacks(other.name) == 0, "it is what it was: nothing that was decided is decided anew"


def test_a_peer_that_is_not_there_is_not_made_a_member():
    consensus = SimConsensus(1, SimConsensusConfig(peers=2))
    consensus.first = ("r0",)
    consensus.seats["r0"].start()
    consensus.world.run(5.0, lambda: consensus.leader() is not None)
    for _ in range(10):
        consensus.seats["r0"].act(lambda raft, now: raft.change(("r0", "r1"), now))
        consensus.world.run(consensus.world.now + 0.5, lambda: False)
    assert consensus.seats["r0"].raft.log.members == ("r0",)
    assert consensus.leader() is not None
    consensus.seats["r1"].start()
    for _ in range(10):
        consensus.seats["r0"].act(lambda raft, now: raft.change(("r0", "r1"), now) if raft.leading else ())
        consensus.world.run(consensus.world.now + 0.5, lambda: False)
    assert consensus.seats["r1"].raft.log.members == ("r0", "r1")


# ── seeded bugs that the histories must find ────────────────────────────────────────────────────────────────


class BlindVoter(Raft):
    """Does not look at the candidate's log."""

    def _requested(self, peer, request, now):
        last_term, length = self.log.end
        return super()._requested(
            peer, request.model_copy(update={"last_term": last_term + 1, "length": length + 1}), now
        )


class SpeaksBeforeItSaves(Raft):
    """Says that it has entries before they are durable."""

    def receive(self, peer, message, now):
        effects = super().receive(peer, message, now)
        return sorted(effects, key=lambda effect: isinstance(effect, SaveEntries))


class OldTermsCount(Raft):
    """Takes for decided what most have, of whatever term (Raft's figure 8)."""

    def _count(self, now):
        length = self._followers.had_by_most(self.log.members, self._me, len(self.log))
        return [*self._decide(length), *super()._count(now)]


class KeepsItsOwn(Raft):
    """Takes entries without asking whether those before are the same."""

    def _append(self, peer, message, now):
        begin = min(message.begin, len(self.log))
        return super()._append(
            peer, message.model_copy(update={"begin": begin, "last_term": self.log.term_before(begin)}), now
        )


class ForgetsItsBallot(Raft):
    """Term and vote are not durable."""

    def receive(self, peer, message, now):
        return [e for e in super().receive(peer, message, now) if not isinstance(e, SaveBallot)]

    def tick(self, now):
        return [e for e in super().tick(now) if not isinstance(e, SaveBallot)]


class CommandsAnybody(Raft):
    """Adds and removes members before the change before is decided."""

    def change(self, peers, now):
        decided, self.decided = self.decided, len(self.log)
        try:
            return super().change(peers, now)
        finally:
            self.decided = decided


class Half(Raft):
    """Half of the members are enough."""

    def _is_most(self, peers):
        return 2 * len(peers.intersection(self.log.members)) >= len(self.log.members) - 1


MUTANTS = [
    BlindVoter,
    SpeaksBeforeItSaves,
    OldTermsCount,
    KeepsItsOwn,
    ForgetsItsBallot,
    CommandsAnybody,
    Half,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_seeded_bugs_are_found(mutant):
    for seed in range(400):
        try:
            history(seed, mutant)
        except (ViolationError, AssertionError):
            return
    pytest.fail("no history found it")


def test_messages_of_others_change_nothing():
    """Answers of strangers, of old terms, and to what was never asked."""
    consensus = led(0, lost=0.0, doubled=0.0)
    raft, now = consensus.leader().raft, consensus.world.now
    term = raft.term
    assert raft.receive("stranger", Appended(term=term, fits=True, length=1 << 40), now) == []
    assert raft.receive("r9", VoteReply(term=term, granted=True), now) == []
    assert raft.receive("r0", Appended(term=term - 1, fits=False, length=0), now) == []
    effects = raft.receive("r2", Appended(term=term, fits=False, length=1 << 40), now)
    assert all(isinstance(e, SendRaft) for e in effects)
    assert not any(isinstance(e, Decided) for e in effects)
