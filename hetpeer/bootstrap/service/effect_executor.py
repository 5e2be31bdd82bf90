"""The core's effects carried out in order: records, messages, checkpoints, trials, the end of the run.

A `Record` is on the disks of most reliable peers before the next effect begins: one queue and one consumer
keep that order. What takes long (a checkpoint, a microbatch computed here, the end of a session) is a task of
its own, and the core hears of its end as of any event.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.tensor_heads import Introduction
from hetpeer.bootstrap.admission.step_tickets import ticket
from hetpeer.bootstrap.consensus.replica import Replica
from hetpeer.bootstrap.grouped.grouped_run import GroupedRun
from hetpeer.bootstrap.log.record_text import TOLD, record_text
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.service.core_interface import LeaderStart
from hetpeer.bootstrap.service.sample_trials import SampleTrials
from hetpeer.bootstrap.service.sessions import VolunteerSessions, briefly
from hetpeer.bootstrap.state import effects as d
from hetpeer.bootstrap.storage.replication import CheckpointReplication
from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.trouble_line import TroubleLine
from hetpeer.dht.node.node import Node

NOTES = frozenset({"gone", "dispute", "quarrel"})
"""Kinds of records on which nothing depends: what comes after them is done at once."""
SAVE_RETRY_S = 2.0
"""Seconds before a failed checkpoint is tried again: the disk may be full."""

_log = logging.getLogger(__name__)


class EffectExecutor:
    """The effects of one term. `hear` passes an event on to the core; `halted` is set by the core's Halt.

    Cancelled, `run` stops between two effects, which is as safe as a crash.
    """

    def __init__(
        self,
        node: Node,
        run: RunDirectory,
        replica: Replica,
        checkpoints: CheckpointReplication,
        begun: LeaderStart,
        sessions: VolunteerSessions,
        hear: Callable[[Callable[[float], Sequence[d.Effect]]], None],
        halted: asyncio.Future[d.Halt],
    ) -> None:
        self._node = node
        self._run = run
        self._replica = replica
        self._checkpoints = checkpoints
        self._core, self._admission, self._logs = begun.core, begun.admission, begun.logs
        self._sessions = sessions
        self._hear = hear
        self._halted = halted
        self._effects: asyncio.Queue[d.Effect] = asyncio.Queue()
        self._saving: asyncio.Task[None] | None = None
        """The records that were saved last, or are being saved."""
        self._collecting: asyncio.Task[None] | None = None
        self.unsaved = TroubleLine(_log, "checkpoints are saved again")
        """Why no checkpoint can be saved for the time being."""
        self._roster: frozenset[str] = frozenset()
        """Volunteers of the step, or averaging, that began last."""
        self._trials = SampleTrials(run)
        self._trying: set[asyncio.Task[None]] = set()

    def put(self, effects: Sequence[d.Effect]) -> None:
        """Queue `effects`, behind those that are not carried out yet."""
        for effect in effects:
            self._effects.put_nowait(effect)

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Carry out effects until cancelled; what takes long runs in `tasks`."""
        self._tasks = tasks
        while True:
            effects = deque([await self._effects.get()])
            while not self._effects.empty():
                effects.append(self._effects.get_nowait())
            await self._carry_out(effects)

    def stop(self) -> None:
        """Cancel what still runs in the task group, apart from records."""
        for task in (self._collecting, *self._trying):
            if task is not None:
                task.cancel()

    async def _carry_out(self, effects: deque[d.Effect]) -> None:
        """Carry out what came together. At its first decision all its records are saved, in one group.

        Nothing waits for notes, which say what has happened and decide nothing.
        """
        while effects:
            match effect := effects.popleft():
                case d.Record(record):
                    records = [record]
                    if record["kind"] not in NOTES:
                        records += [one.record for one in effects if isinstance(one, d.Record)]
                        effects = deque(one for one in effects if not isinstance(one, d.Record))
                    for one in records:
                        failpoints.reached(f"record_{one['kind']}")
                    decided = self._replica.record(*records)
                    self._saving = self._tasks.create_task(self._recorded(records, decided))
                    if record["kind"] not in NOTES:
                        await self._saving
                case d.Send(to, message):
                    failpoints.reached(f"send_{message.kind}")
                    if isinstance(message, m.Begin):
                        self._know(frozenset(message.roster))
                        self._logs.began(to, message)
                        if message.entry:
                            message = self._with_ticket(to, message)
                    channel = self._sessions.channel(to)
                    if channel is not None:
                        self._sessions.tell(channel, message)
                case d.Disconnect(peer):
                    self._tasks.create_task(self._disconnect(peer))
                case d.CollectCheckpoint():
                    failpoints.reached("collect_checkpoint")
                    if self._collecting is not None:
                        self._collecting.cancel()
                    self._collecting = self._tasks.create_task(self._collect(effect))
                case d.TryMicrobatch():
                    self._trying.add(task := self._tasks.create_task(self._try(effect)))
                    task.add_done_callback(self._trying.discard)
                case d.Halt():
                    if self._saving is not None:
                        await self._saving
                    self._halted.set_result(effect)

    # ── records and messages ────────────────────────────────────────────────────────────────────────────────

    async def _recorded(self, records: Sequence[Mapping[str, Any]], decided: asyncio.Future[None]) -> None:
        """Follow `records` once they are `decided`."""
        grouped = isinstance(self._core, GroupedRun)
        version = None if grouped else self._replica.history.version
        await decided
        for record in records:
            self._admission.recorded(record)
            self._logs.recorded(record)
            if record["kind"] == "checkpoint":
                await self._checkpoints.sealed(record)
            if record["kind"] in TOLD:
                _log.warning("%s", record_text(record, version, grouped=grouped))
            failpoints.reached(f"recorded_{record['kind']}")

    def _know(self, roster: frozenset[str]) -> None:
        """Have no limits on strangers for `roster`, whose step begins, and for all other holders.

        In a grouped run these are in steps of other clusters.
        """
        if roster != self._roster:
            self._roster = roster
            self._node.listener.members = roster.union(self._core.working())

    def _with_ticket(self, to: str, begin: m.Begin) -> m.Begin:
        """`begin` with a ticket that proves to others that the late joiner `to` takes part."""
        place = begin.roster[to]
        word = Introduction(
            line=begin.line,
            step=begin.step,
            incarnation=begin.incarnations[to],
            begin=place[0],
            end=place[1],
        )
        return begin.model_copy(update={"ticket": ticket(self._run.run_id, to, word, self._node.identity)})

    async def _disconnect(self, peer: str) -> None:
        channel = self._sessions.channel(peer)
        if channel is not None:
            await briefly(channel.drained())
            channel.close()
        if self._sessions.channel(peer) is channel:  # otherwise it has begun a new session
            self._sessions.inside.discard(peer)

    # ── checkpoints and trials ──────────────────────────────────────────────────────────────────────────────

    async def _collect(self, order: d.CollectCheckpoint) -> None:
        """Collect a checkpoint: the core completes it once all blocks are here and on most reliable peers."""
        try:
            digests = await self._checkpoints.collect(order, self._replica.members)
        except (RemoteError, LocalError) as error:
            self.unsaved.lasts(error, f"checkpoint {order.version} is not saved, and tried again: {error}")
            await asyncio.sleep(SAVE_RETRY_S)
            self._hear(partial(self._core.not_saved, order))
            return
        self.unsaved.ended()
        for block, digest in zip(sorted(order.savers), digests, strict=True):
            self._hear(partial(self._core.saved, order, block, digest))

    async def _try(self, trial: d.TryMicrobatch) -> None:
        """Compute a microbatch here that volunteers cannot compute."""
        found = await self._trials.find(trial, self._checkpoints.newest_record)
        self._hear(partial(self._core.tried, trial, found))
