"""Raft: one log on several reliable peers, which works as long as most of them are there.

After Ongaro and Ousterhout, "In search of an understandable consensus algorithm" (2014), with pre-vote,
check-quorum, leadership transfer and membership changes by one server at a time from Ongaro's dissertation
(2014; 9.6, 6.4.1, 3.10, 4.1). Pure: messages and time in, effects out. Effects are carried out in order, and
state is durable before any later effect begins, so what a peer says of its log is always true. With one
member every entry is decided when it is durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from hetpeer.bootstrap.consensus.effects import (
    SPREAD,
    Decided,
    Deposed,
    Durable,
    Effect,
    Leading,
    RaftConfig,
    RaftRole,
    SaveBallot,
    SaveEntries,
    SendRaft,
)
from hetpeer.bootstrap.consensus.raft_entries import MEMBERS, Entries, Followers
from hetpeer.bootstrap.consensus.raft_messages import (
    Append,
    Appended,
    LogEntry,
    Message,
    RequestVote,
    TakeOver,
    VoteReply,
)


class Raft:
    """One member, which starts with its `durable` state."""

    def __init__(self, config: RaftConfig, durable: Durable, now: float) -> None:
        self._config = config
        self._me = config.me
        self.term = durable.term
        self._voted_for = durable.voted_for
        self.log = Entries(config.members, durable.entries)
        self.decided = 0
        """Entries that are decided, as far as we know."""
        self._said_decided = 0
        """Entries decided, as the leader last said; some may be missing here, or not be confirmed yet."""
        self.role = RaftRole.FOLLOWER
        self.leader: str | None = None
        self.leading = False
        """Whether proposals may come."""
        self._draws = 0
        self._heard_at = float("-inf")
        self._deadline = now if self.log.members == (self._me,) else now + self._election_timeout_s()
        self._votes: set[str] = set()
        self._followers = Followers((), now)
        self._learners: tuple[str, ...] = ()
        self._beat_at = now
        self._successor: str | None = None

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> list[Effect]:
        """Check the timeouts. To be called a few times in `heartbeat_s`."""
        if self.role is RaftRole.LEADER:
            return self._lead_on(now)
        if now >= self._deadline and self._may_run():
            self.leader = None
            return self._ask(now)
        if self.role is RaftRole.FOLLOWER or now < self._beat_at:
            return []
        asking = self.role is RaftRole.ASKING  # the request or its answer may be lost
        return self._canvass(self.term + asking, now, pre=asking)

    def receive(self, peer: str, message: Message, now: float) -> list[Effect]:
        """Answer a message of `peer` (the transport's word)."""
        match message:
            case RequestVote():
                return self._requested(peer, message, now)
            case VoteReply():
                return self._voted(peer, message, now)
            case Append():
                return self._append(peer, message, now)
            case Appended():
                return self._appended(peer, message, now)
            case TakeOver():
                return self._taking_over(peer, message, now)

    def propose(self, records: Sequence[Mapping[str, Any]], now: float) -> list[Effect]:
        """Append `records`, to be decided, at the current length of the log; only while `leading`.

        They are saved together.
        """
        assert self.leading
        return self._extend([dict(record) for record in records], now)

    def change(self, peers: Sequence[str], now: float) -> list[Effect]:
        """Make `peers` the members, one step a call; only while `leading`. To be called until they are.

        At most one member is added or removed at a time, and only when the change before is decided. A new
        member first catches up as a learner: a peer that is not there cannot take the majority away.
        """
        members = self.log.members
        self._learners = tuple(peer for peer in peers if peer not in members)
        self._followers.welcome(self._learners, now)
        if self.log.changed_at > self.decided:
            return []
        ready = [peer for peer in self._learners if self._followers.caught_up(peer, len(self.log))]
        removed = [peer for peer in members if peer not in peers]
        if ready:
            return self.propose([{"kind": MEMBERS, "peers": [*members, ready[0]]}], now)
        if removed and not self._learners:
            kept = [peer for peer in members if peer != removed[0]]
            return self.propose([{"kind": MEMBERS, "peers": kept}], now)
        return []

    def leave(self) -> list[Effect]:
        """Hand leadership to the member with most of the log once it has all of it: we are about to leave."""
        others = self._others()
        if self.role is not RaftRole.LEADER or not others:
            return []
        self._successor = max(others, key=lambda peer: (self._followers.match(peer), peer))
        return self._hand_over()

    def lacks(self, peer: str) -> int | None:
        """Entries that `peer` lacks: of our log, as leader; of what is decided, if it is us; else None."""
        if peer == self._me:
            return 0 if self.role is RaftRole.LEADER else max(self._said_decided - self.decided, 0)
        return len(self.log) - self._followers.match(peer) if self.role is RaftRole.LEADER else None

    def silent_s(self, peer: str, now: float) -> float | None:
        """Seconds since `peer`, our follower or leader, was last heard; None if neither or never heard."""
        heard = self._followers.answered_at(peer) if self.role is RaftRole.LEADER else None
        if self.role is not RaftRole.LEADER and peer == self.leader:
            heard = self._heard_at
        return None if heard is None else now - heard

    # ── elections ───────────────────────────────────────────────────────────────────────────────────────────

    def _others(self) -> list[str]:
        return [peer for peer in self.log.members if peer != self._me]

    def _may_run(self) -> bool:
        """Whether we may be elected, also while our removal is undecided: we may have more of the log."""
        return self._me in self.log.members or self._me in self.log.members_at(self.decided)

    def _is_most(self, peers: set[str]) -> bool:
        members = self.log.members
        return 2 * len(peers.intersection(members)) > len(members)

    def _election_timeout_s(self) -> float:
        """A random election timeout in seconds, so that two members rarely run against each other."""
        self._draws += 1
        drawn = blake3(f"{self._me} {self.term} {self._draws}".encode()).digest(4)
        return self._config.election_s * (1 + SPREAD * int.from_bytes(drawn, "little") / 2**32)

    def _ask(self, now: float) -> list[Effect]:
        """Begin the pre-vote: a member that was cut off must not depose a leader when it comes back."""
        self.role, self._votes = RaftRole.ASKING, {self._me}
        self._deadline = now + self._election_timeout_s()
        if self._is_most(self._votes):
            return self._run(now)
        return self._canvass(self.term + 1, now, pre=True)

    def _run(self, now: float, *, transfer: bool = False) -> list[Effect]:
        self.role, self._votes = RaftRole.CANDIDATE, {self._me}
        self.term, self._voted_for, self.leader = self.term + 1, self._me, None
        self._deadline = now + self._election_timeout_s()
        ballot = SaveBallot(self.term, self._voted_for)
        if self._is_most(self._votes):
            return [ballot, *self._win(now)]
        return [ballot, *self._canvass(self.term, now, transfer=transfer)]

    def _canvass(self, term: int, now: float, *, pre: bool = False, transfer: bool = False) -> list[Effect]:
        self._beat_at = now + self._config.heartbeat_s
        last_term, length = self.log.end
        request = RequestVote(term=term, length=length, last_term=last_term, pre=pre, transfer=transfer)
        return [SendRaft(peer, request) for peer in self._others() if peer not in self._votes]

    def _requested(self, peer: str, request: RequestVote, now: float) -> list[Effect]:
        """Answer a (pre-)vote request. Granted if the leader is silent and the log of `peer` is complete."""
        led = self.role is RaftRole.LEADER or now - self._heard_at < self._config.election_s
        complete = (request.last_term, request.length) >= self.log.end
        if request.pre:
            granted = request.term > self.term and complete and not led
            if granted and self.role is RaftRole.ASKING:
                # two that ask at a time would split the votes: one gives way
                granted = ((request.last_term, request.length), peer) > (self.log.end, self._me)
                if granted:
                    self._follow(None, now)
            term = request.term if granted else self.term
            return [SendRaft(peer, VoteReply(term=term, granted=granted, pre=True))]
        if request.term > self.term and led and not request.transfer:
            return []
        effects = self._see(request.term, now)
        granted = request.term == self.term and self._voted_for in (None, peer) and complete
        if granted and self._voted_for is None:
            self._voted_for = peer
            self._deadline = now + self._election_timeout_s()
            effects.append(SaveBallot(self.term, peer))
        return [*effects, SendRaft(peer, VoteReply(term=self.term, granted=granted))]

    def _voted(self, peer: str, vote: VoteReply, now: float) -> list[Effect]:
        """Count a (pre-)vote: most pre-votes start an election, most votes make us the leader."""
        if not vote.granted:
            return self._see(vote.term, now)
        awaited = (RaftRole.ASKING, self.term + 1) if vote.pre else (RaftRole.CANDIDATE, self.term)
        if (self.role, vote.term) != awaited:
            return []
        self._votes.add(peer)
        if not self._is_most(self._votes):
            return []
        return self._run(now) if vote.pre else self._win(now)

    def _taking_over(self, peer: str, message: TakeOver, now: float) -> list[Effect]:
        if (self.role, self.leader, self.term) != (RaftRole.FOLLOWER, peer, message.term):
            return []
        return self._run(now, transfer=True)

    def _win(self, now: float) -> list[Effect]:
        """Lead from now on. A leader knows what is decided once an entry of its own term is (section 8)."""
        self.role, self.leader = RaftRole.LEADER, self._me
        self._followers, self._learners, self._successor = Followers(self._others(), now), (), None
        self._beat_at = now + self._config.heartbeat_s
        return self._extend([None], now)

    def _see(self, term: int, now: float) -> list[Effect]:
        """Adopt `term` if it is newer than ours."""
        if term <= self.term:
            return []
        self.term, self._voted_for = term, None
        return [SaveBallot(term, None), *self._follow(None, now)]

    def _follow(self, leader: str | None, now: float) -> list[Effect]:
        was, self.role, self.leader = self.role, RaftRole.FOLLOWER, leader
        self.leading = False
        self._deadline = now + self._election_timeout_s()
        return [Deposed()] if was is RaftRole.LEADER else []

    # ── the leader ──────────────────────────────────────────────────────────────────────────────────────────

    def _lead_on(self, now: float) -> list[Effect]:
        """Send heartbeats. Step down if most members do not answer: another leader may exist."""
        longest = self._config.election_s * (1 + SPREAD)
        if not self._is_most(self._followers.heard_since(now - longest) | {self._me}):
            return self._follow(None, now)
        if now < self._beat_at:
            return []
        self._beat_at = now + self._config.heartbeat_s
        return [self._update(peer) for peer in (*self._others(), *self._learners)]

    def _update(self, peer: str) -> Effect:
        return SendRaft(peer, self._followers.append(peer, self.log, self.term, self.decided))

    def _extend(self, records: Sequence[dict[str, Any] | None], now: float) -> list[Effect]:
        place = len(self.log)
        entries = tuple(LogEntry(term=self.term, record=record) for record in records)
        self.log.replace(place, entries)
        others = self._others()
        self._followers.welcome(others, now)
        sends = [self._update(peer) for peer in others if self._followers.idle(peer, place)]
        return [SaveEntries(place, entries), *sends, *self._count(now)]

    def _appended(self, peer: str, answer: Appended, now: float) -> list[Effect]:
        if answer.term > self.term:
            return self._see(answer.term, now)
        known = peer in self.log.members or peer in self._learners
        if self.role is not RaftRole.LEADER or answer.term < self.term or not known:
            return []
        lacks = self._followers.answered(peer, answer, len(self.log), now)
        return [*([self._update(peer)] if lacks else []), *self._count(now), *self._hand_over()]

    def _count(self, now: float) -> list[Effect]:
        """Decide entries of this term that most members have, and all before them (section 5.4.2)."""
        length = self._followers.had_by_most(self.log.members, self._me, len(self.log))
        if length <= self.decided or self.log.term_before(length) != self.term:
            return []
        effects = self._decide(length)
        if not self.leading:
            self.leading = True
            effects.append(Leading(self.term))
        if self._me not in self.log.members_at(self.decided):
            effects += self._follow(None, now)
        return effects

    def _hand_over(self) -> list[Effect]:
        successor = self._successor
        if successor is None or self._followers.match(successor) < len(self.log):
            return []
        self._successor = None
        return [SendRaft(successor, TakeOver(term=self.term))]

    # ── the log ─────────────────────────────────────────────────────────────────────────────────────────────

    def _append(self, peer: str, message: Append, now: float) -> list[Effect]:
        """Take entries of the leader `peer`; a log that does not fit is answered with where to try again."""
        if message.term < self.term:
            return [SendRaft(peer, Appended(term=self.term, fits=False, length=len(self.log)))]
        effects = [*self._see(message.term, now), *self._follow(peer, now)]
        self._heard_at = now
        self._said_decided = message.committed
        begin, log = message.begin, self.log
        if begin > len(log) or log.term_before(begin) != message.last_term:
            again = len(log) if begin > len(log) else log.conflict(begin)
            return [*effects, SendRaft(peer, Appended(term=self.term, fits=False, length=again))]
        place, entries = begin, message.entries
        while entries and place < len(log) and log.term_at(place) == entries[0].term:
            place, entries = place + 1, entries[1:]
        if entries:
            assert place >= self.decided, "a decided entry would be replaced"
            log.replace(place, entries)
            effects.append(SaveEntries(place, entries))
        length = begin + len(message.entries)
        effects += self._decide(min(message.committed, length))
        return [*effects, SendRaft(peer, Appended(term=self.term, fits=True, length=length))]

    def _decide(self, length: int) -> list[Effect]:
        told: list[Effect] = [Decided(self.decided, length)] if length > self.decided else []
        self.decided = max(self.decided, length)
        return told
