"""A reliable peer's part in the log: the Raft core driven by channels, the real clock and the disk.

Decided records go, in order, into the ledger, the file that audit, export and status read. The journal beside
it holds what this peer has promised to the others. One consumer carries out effects one after another, so
what a message relies on is on the disk before it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from hetpeer.bootstrap.consensus import effects as e
from hetpeer.bootstrap.consensus import raft_messages as m
from hetpeer.bootstrap.consensus.effects import Journal
from hetpeer.bootstrap.consensus.raft import Raft
from hetpeer.bootstrap.log.credit import Credit
from hetpeer.bootstrap.log.history import History, Record
from hetpeer.bootstrap.log.loss_curves import GroupedCurves, LogCurves
from hetpeer.bootstrap.log.record_log import FirstRecords, Log
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import ExitCode, LocalError, PeerLostError
from hetpeer.dht.base.runtime import Clock, to_its_end
from hetpeer.dht.channels.channel import Channel, Parcel
from hetpeer.dht.channels.channel_server import ChannelServer, dial
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd.listener import CONTROL as CONTROL_BUDGET
from hetpeer.dht.streams.stream import Stream

LOG: Final = "hetpeer/1/log"
TICK_S = 0.1
BACKLOG = 64
"""Messages that may wait for a member that is away; it gets newer ones when it is back."""
RENEWAL_S = 0.2
LEAVE_S = 1.0

_log = logging.getLogger(__name__)


class DeposedError(Exception):
    """We lead no longer. A record that was proposed may be decided by another leader yet, or be lost."""


def credit_in(manifest: Manifest, records: Iterable[Record]) -> Credit:
    """Credit by `records`, in tokens (or samples) times blocks; later ones can be added (docs/credit.md)."""
    grouped = None if manifest.averaging is None else manifest.training.steps
    credit = Credit(manifest.data.tokens_per_sample, grouped)
    for record in records:
        credit.add(record)
    return credit


@dataclass(frozen=True, slots=True)
class RunLogs:
    """The two files: decided records, and what this peer has promised."""

    ledger: Log
    journal: Log


@contextmanager
def run_logs(run: RunDirectory) -> Iterator[RunLogs]:
    """The files of `run`, open for this process alone. Raises `LocalError` as `Log.open`."""
    with (
        contextlib.closing(Log.open(run.log_path)) as ledger,
        contextlib.closing(Log.open(run.journal_path)) as journal,
    ):
        yield RunLogs(ledger, journal)


class Replica:
    """The replica of `run` at `node`; `run()` drives it for as long as the files are open."""

    def __init__(
        self, node: Node, run: RunDirectory, membership_config: MembershipConfig, logs: RunLogs, clock: Clock
    ) -> None:
        self._node = node
        self.membership_config = membership_config
        self._journal, self._ledger = journal, ledger = Journal(logs.journal), logs.ledger
        self._clock = clock
        self.records = FirstRecords(ledger)
        """Decided records that are on the disk; everything folded here has the same ones."""
        self.history = History(whole=False)
        """The same records, folded."""
        self.credit = credit_in(run.manifest, ())
        """Credit by the same records."""
        self.curves: LogCurves | GroupedCurves = (
            LogCurves() if run.manifest.averaging is None else GroupedCurves(lambda: self.credit.counting)
        )
        for record in self.records:
            self._fold(record)
        self._known = len(self.records)
        self._told = 0
        self._told_entries = 0
        """Entries of the log that were reported; some have no record."""
        config = e.RaftConfig(me=node.peer_id, members=run.manifest.coordinators)
        self._raft = Raft(config, journal.durable, clock.monotonic())
        self._effects: asyncio.Queue[e.Effect | None] = asyncio.Queue()
        """Effects to carry out; None: look for records to propose."""
        self._proposals: list[tuple[Sequence[Mapping[str, Any]], asyncio.Future[None]]] = []
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """Length of the decided log → who waits for it."""
        self._leading = asyncio.Event()
        self._deposed = asyncio.Event()
        self._channels: dict[str, Channel] = {}
        self._served = ChannelServer(self._accept, m.MAX_MESSAGE_BYTES)

    # ── what the coordinator uses ───────────────────────────────────────────────────────────────────────────

    @property
    def me(self) -> str:
        """The id of this peer."""
        return self._node.peer_id

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as we know."""
        return self._raft.leader

    @property
    def members(self) -> Sequence[str]:
        """Reliable peers by the log: this one is among them unless it is new or was replaced."""
        return self._raft.log.members

    @property
    def term(self) -> int:
        """Number of elections that we know of."""
        return self._raft.term

    def lacks(self, peer: str) -> int | None:
        """Entries of the log that `peer`, or this peer itself, lacks; None: unknown here."""
        return self._raft.lacks(peer)

    @property
    def is_current(self) -> bool:
        """Whether `records` has all that is known here to be decided."""
        return self.lacks(self.me) == 0 and self._told_entries == self._raft.decided

    def silent_s(self, peer: str) -> float | None:
        """Seconds since `peer`, which follows or leads us, was last heard; None: it does neither."""
        return self._raft.silent_s(peer, self._clock.monotonic())

    def company(self) -> set[str]:
        """The other reliable peers: members, future members, and those that were members until just now."""
        return {*self.members, *self.membership_config.peers} - {self.me}

    @property
    def is_leading(self) -> bool:
        """Whether this peer leads and proposals may come."""
        return self._raft.leading

    def settled(self, peers: Sequence[str]) -> bool:
        """Whether we lead and it is decided that `peers` are the members."""
        log = self._raft.log
        decided = log.members_at(self._raft.decided)
        return self.is_leading and set(decided) == set(log.members) == set(peers)

    def shape(self, peers: Sequence[str]) -> None:
        """Take one step, as the leader, towards `peers` as the members, if one can be taken."""
        if self.is_leading and set(self.members) != set(peers):
            self._queue(self._raft.change(peers, self._clock.monotonic()))

    async def leading(self) -> None:
        """Return when we lead, and `records` has everything that is decided."""
        await self._leading.wait()

    async def deposed(self) -> None:
        """Return when we lead no longer."""
        await self._deposed.wait()

    def record(self, *records: Mapping[str, Any]) -> asyncio.Future[None]:
        """Have `records` decided: once the future is done, they are on most members' disks.

        All that comes while the disk is busy is proposed and saved together, in the order of the calls. The
        future raises `DeposedError` if we lead no longer.
        """
        decided = asyncio.get_running_loop().create_future()
        self._proposals.append((records, decided))
        self._effects.put_nowait(None)
        return decided

    def _propose(self) -> None:
        """Propose all records that wait for it, if we lead."""
        proposals, self._proposals = self._proposals, []
        records = [record for group, _ in proposals for record in group]
        if not self._raft.leading:
            for _, decided in proposals:
                if not decided.done():
                    decided.set_exception(DeposedError())
        elif records:
            place = len(self._raft.log)
            effects = self._raft.propose(records, self._clock.monotonic())
            for group, decided in proposals:
                place += len(group)
                self._waiting[place] = decided
            self._queue(effects)

    async def leave(self) -> None:
        """Hand over leadership before we leave; return within LEAVE_S, with or without a successor."""
        if self._leading.is_set() and len(self.members) > 1:
            self._queue(self._raft.leave())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self.deposed()

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Take part until cancelled. Raises `LocalError` if the disk fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._consume())
                await self._node.serve(LOG, self._served.handle, CONTROL_BUDGET)
                tasks.create_task(self._tick())
                tasks.create_task(self._keep_company(tasks))
        finally:
            self._served.close()

    async def _tick(self) -> None:
        while True:
            self._queue(self._raft.tick(self._clock.monotonic()))
            await asyncio.sleep(TICK_S)

    def _queue(self, effects: Sequence[e.Effect]) -> None:
        for effect in effects:
            self._effects.put_nowait(effect)

    async def _consume(self) -> None:
        """Carry out raft's effects in order, for ever: what is saved is durable before the next effect."""
        while True:
            effect = await self._effects.get()
            if failpoints.armed and effect is not None:
                failpoints.before(effect)
            match effect:
                case None:
                    self._propose()
                case e.SaveBallot() | e.SaveEntries():
                    await to_its_end(self._journal.save, effect)
                case e.SendRaft(to, message):
                    self._say(to, message)
                case e.Decided(begin, end):
                    await self._decided(begin, end)
                case e.Leading(term):
                    _log.info("leading in term %d, with %d records", term, len(self.records))
                    self._deposed.clear()
                    self._leading.set()
                case e.Deposed():
                    self._leading.clear()
                    self._deposed.set()
                    for waiting in self._waiting.values():
                        if not waiting.done():
                            waiting.set_exception(DeposedError())
                    self._waiting.clear()

    async def _decided(self, begin: int, end: int) -> None:
        """Append the decided entries from `begin` to before `end` to the run's log, with one write.

        Raises `LocalError` HP-LOG-003.
        """
        decided = self._raft.log.records
        told = [
            (place, record) for place, record in enumerate(decided[begin:end], begin) if record is not None
        ]
        known = max(0, min(len(told), self._known - self._told))
        for number, (_, record) in enumerate(told[:known], self._told):
            if self.records[number] != record:
                raise LocalError(
                    "HP-LOG-003",
                    f"{self._ledger.path} does not tell what was decided: record {number} is another",
                    why="one of the run's logs was replaced by another run's, or by an older copy",
                    fix="put the folder log/ back as a whole if this is the only reliable peer; "
                    "of several, name another in its place (hetpeer amend)",
                    exit_code=ExitCode.VERSION,
                )
        new: list[Record] = [record for _, record in told[known:]]
        if new:
            await to_its_end(self._ledger.append, *new)
        for record in new:
            self._fold(record)
        self.records.length += len(new)
        for number, (place, _) in enumerate(told, self._told):
            decided.shelve(place, self.records, number)
        self._told += len(told)
        self._told_entries = end
        for length in [length for length in self._waiting if length <= end]:
            waiting = self._waiting.pop(length)
            if not waiting.done():
                waiting.set_result(None)

    def _fold(self, record: Record) -> None:
        self.history.add(record)
        self.credit.add(record)
        self.curves.add(record)

    # ── the others ──────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, to: str, message: m.Message) -> None:
        channel = self._channels.get(to)
        if channel is not None and len(channel.outbox) < BACKLOG:
            channel.send(Parcel({}, (m.encode(message),)))

    async def _keep_company(self, tasks: asyncio.TaskGroup) -> None:
        touched: dict[str, asyncio.Task[None]] = {}
        while True:
            company = self.company()
            for peer in company - touched.keys():
                touched[peer] = tasks.create_task(self._keep_in_touch(peer))
            for peer in touched.keys() - company:
                touched.pop(peer).cancel()
            await asyncio.sleep(TICK_S)

    async def _keep_in_touch(self, peer: str) -> None:
        """Keep a channel for messages to `peer`; its own messages come in a channel of its own."""
        number = 0
        while True:
            number += 1
            key = f"{self._clock.monotonic()}.{number}"
            channel = self._channels[peer] = Channel(peer, key, _Member(self, peer), m.MAX_MESSAGE_BYTES)
            try:
                await dial(self._node, LOG, channel)
            except PeerLostError as error:
                _log.debug("a new channel to %s: %s", peer, error.why)
            finally:
                channel.close()
            await asyncio.sleep(RENEWAL_S)

    def _accept(self, peer: str, _key: str) -> _Member | None:
        return _Member(self, peer) if peer in self.company() else None

    def received(self, peer: str, message: m.Message) -> None:
        """Answer a message of another member."""
        self._queue(self._raft.receive(peer, message, self._clock.monotonic()))


class _Member:
    """The receiver of another member's channel."""

    def __init__(self, replica: Replica, peer: str) -> None:
        self._replica = replica
        self._peer = peer

    async def frame(
        self, _channel: Channel, _header: Mapping[str, Any], payload: Stream, _length: int
    ) -> None:
        self._replica.received(self._peer, m.decode(await payload.receive_bytes(m.MAX_MESSAGE_BYTES)))

    async def beat(self, _channel: Channel) -> None: ...

    def up(self, _channel: Channel) -> None: ...

    def down(self, _channel: Channel) -> None: ...
