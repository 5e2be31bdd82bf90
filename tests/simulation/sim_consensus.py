"""Simulated reliable peers that keep one log: the real Raft core of each, slow disks, and a network that
loses messages.

Checked all the time: a term has one leader, and nobody is told two different entries for one index. Messages
are lost, doubled and overtake each other; peers die between two effects, freeze, leave, and are added and
removed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from hetpeer.bootstrap.consensus.effects import (
    Decided,
    Deposed,
    Durable,
    Effect,
    Leading,
    RaftConfig,
    SaveBallot,
    SaveEntries,
    SendRaft,
)
from hetpeer.bootstrap.consensus.raft import Raft
from hetpeer.bootstrap.consensus.raft_messages import LogEntry, Message
from hetpeer.peer.simulate.network.world import World
from hetpeer.peer.simulate.sim_hooks import ViolationError

TICK_S = 0.1
DISK_S = (0.0, 0.03)
MakeRaft = Callable[[RaftConfig, Durable, float], Raft]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConsensusConfig:
    """Settings of the network; `lost` and `doubled` are shares of messages."""

    peers: int = 3
    latency_s: tuple[float, float] = (0.005, 0.12)
    lost: float = 0.03
    doubled: float = 0.05
    late_s: float = 8.0
    """Most seconds by which the second copy of a message is late."""


class SimReliablePeer:
    """One reliable peer: a disk, and at times a process."""

    def __init__(self, consensus: SimConsensus, name: str) -> None:
        self.name = name
        self.raft: Raft | None = None
        self.disk = Durable()
        self.frozen_until = 0.0
        self._consensus = consensus
        self._effects: deque[Effect] = deque()
        self._busy = False
        self._life = 0

    def start(self) -> None:
        """Start a process from the disk."""
        if self.raft is not None:
            return
        consensus, disk = self._consensus, self.disk
        self._life += 1
        self._effects.clear()
        self._busy = False
        config = RaftConfig(me=self.name, members=consensus.first)
        known = Durable(disk.term, disk.voted_for, deepcopy(disk.entries))
        self.raft = consensus.make(config, known, consensus.world.now)
        self._tick(self._life)

    def kill(self) -> None:
        """Kill the process; the disk stays, pending effects are lost."""
        self.raft = None
        self._life += 1

    def act(self, act: Callable[[Raft, float], Iterable[Effect]]) -> None:
        """Give an event to the core, now or when the process goes on."""
        world, life = self._consensus.world, self._life
        if world.now < self.frozen_until:
            world.at(self.frozen_until, lambda: self.act(act) if life == self._life else None)
        elif self.raft is not None:
            self._effects.extend(act(self.raft, world.now))
            self._go_on()

    def _tick(self, life: int) -> None:
        if life == self._life:
            self.act(lambda raft, now: raft.tick(now))
            self._consensus.world.after(TICK_S, lambda: self._tick(life))

    def _go_on(self) -> None:
        """Carry out effects one after the other; saving takes a while."""
        world = self._consensus.world
        while self._effects and not self._busy and self.raft is not None:
            effect = self._effects.popleft()
            if isinstance(effect, SaveBallot | SaveEntries):
                self._busy = True
                wait = world.random.uniform(*DISK_S)
                world.after(wait, partial(self._saved, effect, self._life))
                if isinstance(effect, SaveEntries) and self._consensus.ambush():
                    self._die(wait / 2)
            else:
                self._consensus.carry_out(self, effect)

    def _saved(self, effect: SaveBallot | SaveEntries, life: int) -> None:
        if life != self._life:
            return
        if isinstance(effect, SaveBallot):
            self.disk.term, self.disk.voted_for = effect.term, effect.voted_for
        else:
            self.disk.entries.replace(effect.begin, effect.entries)
        self._busy = False
        self._go_on()
        if isinstance(effect, SaveBallot) and self._consensus.ambush():
            self._die(0.0)

    def _die(self, delay: float) -> None:
        self._consensus.world.after(delay, self.kill)
        self._consensus.world.after(delay + 0.05, self.start)


class SimConsensus:
    """One history of several reliable peers."""

    def __init__(self, seed: int, config: SimConsensusConfig, make: MakeRaft = Raft) -> None:
        self.world = World(seed)
        self.make = make
        names = [f"r{number}" for number in range(config.peers)]
        self.first = tuple(names)
        self.seats = {name: SimReliablePeer(self, name) for name in names}
        self.truth: list[LogEntry] = []
        """Decided entries."""
        self.leaders: dict[int, str] = {}
        self.led_at: list[float] = []
        """Virtual seconds at which a peer began to lead."""
        self.ambushes = 0
        """Number of deaths to come while a peer saves entries, or just after it has saved a ballot."""
        self.calm = False
        """Whether no message is lost or doubled any more."""
        self._config = config
        self._cut: set[tuple[str, str]] = set()
        self._proposed = 0

    def start(self) -> None:
        for seat in self.seats.values():
            seat.start()

    def leader(self) -> SimReliablePeer | None:
        """Leader of the latest term; None if no peer leads."""
        leading = [seat for seat in self.seats.values() if seat.raft is not None and seat.raft.leading]
        return max(leading, key=lambda seat: seat.raft.term if seat.raft else 0, default=None)

    def propose(self, most: int = 3) -> int:
        """Let the leader, if there is one, propose some records; returns the last one's number."""
        seat = self.leader()
        records = []
        for _ in range(self.world.random.randint(1, most)):
            self._proposed += 1
            records.append({"kind": "number", "number": self._proposed})
        if seat is not None:
            seat.act(lambda raft, now: raft.propose(records, now) if raft.leading else ())
        return self._proposed

    def ambush(self) -> bool:
        """Whether the peer that saves something is to die."""
        if not self.ambushes or self.world.random.random() < 0.5:
            return False
        self.ambushes -= 1
        return True

    def is_decided(self, number: int) -> bool:
        return any(entry.record is not None and entry.record.get("number") == number for entry in self.truth)

    def cut(self, source: str, target: str) -> None:
        """Let nothing pass in this direction."""
        self._cut.add((source, target))

    def heal(self) -> None:
        self._cut.clear()

    def carry_out(self, seat: SimReliablePeer, effect: Effect) -> None:
        """Carry out an effect that is not for the disk."""
        match effect:
            case SendRaft(to, message):
                self._send(seat.name, to, message)
            case Decided(begin, end) if seat.raft is not None:
                for place, entry in enumerate(seat.raft.log.part(begin, end - begin), begin):
                    self._check(seat, place, entry)
            case Leading(term):
                if self.leaders.setdefault(term, seat.name) != seat.name:
                    raise ViolationError(f"{seat.name} and {self.leaders[term]} lead in term {term}")
                self.led_at.append(self.world.now)
            case Deposed():
                pass

    def _check(self, seat: SimReliablePeer, place: int, entry: LogEntry) -> None:
        if place < len(self.truth):
            if self.truth[place] != entry:
                raise ViolationError(f"{seat.name} is told another entry at {place}")
            return
        if place > len(self.truth):
            raise ViolationError(f"{seat.name} is told place {place} before {len(self.truth)}")
        self.truth.append(entry)

    def _send(self, source: str, target: str, message: Message) -> None:
        random, config = self.world.random, self._config
        if (source, target) in self._cut or (not self.calm and random.random() < config.lost):
            return
        times = 1 + (not self.calm and random.random() < config.doubled)
        for number in range(times):
            delay = random.uniform(*config.latency_s) + (random.uniform(0, config.late_s) if number else 0.0)
            self.world.after(delay, lambda: self._deliver(source, target, message))

    def _deliver(self, source: str, target: str, message: Message) -> None:
        self.seats[target].act(lambda raft, now: raft.receive(source, message, now))


class ConsensusFaults:
    """Injects `count` faults at random times within `until_s`."""

    def __init__(self, consensus: SimConsensus, count: int, until_s: float) -> None:
        self._consensus = consensus
        self._random: random.Random = consensus.world.random
        self._until_s = until_s
        for _ in range(count):
            consensus.world.at(self._random.uniform(0.0, until_s), self._strike)

    def _strike(self) -> None:
        consensus, draw = self._consensus, self._random
        seat = draw.choice(list(consensus.seats.values()))
        leader = consensus.leader()
        if leader is not None and draw.random() < 0.5:
            seat = leader
        away = draw.choice((0.05, 1.0, 4.0, 12.0))
        match draw.randrange(8):
            case 0 | 1:
                seat.kill()
                consensus.world.after(away, seat.start)
            case 2:
                seat.frozen_until = consensus.world.now + away
            case 3:
                for other in consensus.seats:
                    consensus.cut(seat.name, other)
                    if draw.random() < 0.5:
                        consensus.cut(other, seat.name)
                consensus.world.after(away, consensus.heal)
            case 4:
                one, other = draw.sample(sorted(consensus.seats), 2)
                consensus.cut(one, other)
                consensus.world.after(away, consensus.heal)
            case 5:
                seat.act(lambda raft, _: raft.leave())
                consensus.world.after(1.0, seat.kill)
                consensus.world.after(1.0 + away, seat.start)
            case 6:
                self._change()
            case 7:
                consensus.ambushes += 1

    def _change(self) -> None:
        """Change the members, with repeated requests, as a manifest does."""
        consensus, draw = self._consensus, self._random
        peers = draw.sample(sorted(consensus.seats), draw.choice((1, 3, len(consensus.seats))))

        def ask() -> None:
            leader = consensus.leader()
            if leader is not None:
                leader.act(lambda raft, now: raft.change(peers, now) if raft.leading else ())

        for number in range(8):
            consensus.world.after(0.5 * number, ask)
