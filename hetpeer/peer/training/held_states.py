"""States that a volunteer serves: to late joiners what it holds, to the coordinator a copy for the
checkpoint.

Copies of the last complete checkpoint stay until a later one is complete. If the run goes back to it, nothing
is fetched from anybody (docs/protocol.md, "Back to a checkpoint").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from hetpeer.averaging.effects import SaveState
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.member_life import Phase
from hetpeer.averaging.messages import TermView
from hetpeer.bootstrap.storage.file_service import Served
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.transport.exchange import PassingState, StateRoomError
from hetpeer.peer.transport.worker_posts import WorkerPosts
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.worker_messages import CommandFailedError

STATE_WAIT_S = 20.0
"""Seconds that a request for a new state waits at most while the holder still applies the update."""
SPARE = 2
"""Copies of an earlier version stay if the limit of the disk has room for this many more sets of copies: one
for those in the making, one for what else lies there.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A state as the worker held it, `nbytes` long."""

    state: PassingState
    nbytes: int
    digest: str


class HeldStates:
    """States of the blocks of `member`, as the worker holds them at the time of a request.

    `changed` is set after every batch of effects of the core: waiting requests then look again.
    """

    def __init__(self, member: Member, changed: asyncio.Event) -> None:
        self._member = member
        self._posts: WorkerPosts | None = None
        self._state_bytes: Mapping[int, int] = {}
        self._snapshots: dict[tuple[TermView, int, int], _Copy] = {}
        """(term-view, version, block) → the copy. A version differs between term-views."""
        self._ordered: tuple[TermView, int] | None = None
        """Term-view and version of the checkpoint that is collected, or was collected last."""
        self._changed = changed
        self._told = False
        """Whether it was said that states cannot be copied, since the last one that was."""

    def use(self, posts: WorkerPosts | None, state_bytes: Mapping[int, int]) -> None:
        """Serve what the worker of `posts` holds. `state_bytes`: block → most bytes of its state file."""
        self._posts, self._state_bytes = posts, state_bytes
        self._drop(list(self._snapshots))

    def snapshot(self, order: SaveState) -> list[Coroutine[Any, Any, None]]:
        """Copy the states of `order` for a checkpoint. The copies are posted before this returns, so no later
        update changes them; the caller awaits the returned coroutines, which keep them.

        A state that there is no room for is not copied: the checkpoint is tried again.
        """
        assert self._posts is not None
        at = self._ordered = (order.line, order.version)
        stored = order.stored if self._has_room else None
        self._drop([key for key in self._snapshots if key[:2] != at and key[1] != stored])
        copying = []
        for block, digest in order.digests.items():
            try:
                state, written = self._dump(block)
            except StateRoomError as error:
                self._failed(block, error)
                continue
            copying.append(self._keep((*at, block), digest, state, written))
        return copying

    async def _keep(
        self,
        key: tuple[TermView, int, int],
        digest: str,
        state: PassingState,
        written: Coroutine[Any, Any, int],
    ) -> None:
        try:
            nbytes = await written
        except BaseException as error:
            state.drop()
            if not isinstance(error, CommandFailedError):
                raise
            self.give_way()  # the disk may be full: the next try has that room
            self._failed(key[2], error)
        else:
            self._told = False
            self._drop([key])
            self._snapshots[key] = _Copy(state, nbytes, digest)
            self._changed.set()

    # ── our own use of copies ───────────────────────────────────────────────────────────────────────────────

    def own(self, version: int, block: int, digest: str) -> tuple[PassingState, Extent] | None:
        """Our copy of just that state, with one more user, and its place; None if there is none."""
        for (_, its_version, its_block), copy in self._snapshots.items():
            if (its_version, its_block, copy.digest) == (version, block, digest):
                return copy.state.use(), Extent(copy.state.extent.offset, copy.nbytes)
        return None

    def keep(self, line: TermView, version: int, block: int, digest: str, state: PassingState) -> None:
        """Keep a state of a complete checkpoint that was fetched, if there is plenty of room."""
        if block in self._state_bytes and self._has_room:
            self._drop([(line, version, block)])
            self._snapshots[line, version, block] = _Copy(state.use(), state.extent.nbytes, digest)

    def give_way(self) -> bool:
        """Drop all copies but those of the checkpoint that was ordered last; whether there were any."""
        dropped = [key for key in self._snapshots if key[:2] != self._ordered]
        self._drop(dropped)
        return bool(dropped)

    @property
    def _has_room(self) -> bool:
        """Whether copies of another version may stay beside those in the making."""
        if self._posts is None:
            return False
        share = self._posts.exchange.share
        return share.limit - share.used >= SPARE * sum(self._state_bytes.values())

    def _dump(self, block: int) -> tuple[PassingState, Coroutine[Any, Any, int]]:
        """A new copy of `block`. Raises `StateRoomError` if there is no room even without earlier copies."""
        assert self._posts is not None
        try:
            return self._posts.dump(block, self._state_bytes[block])
        except StateRoomError:
            if not self.give_way():
                raise
        return self._posts.dump(block, self._state_bytes[block])

    # ── for others ──────────────────────────────────────────────────────────────────────────────────────────

    def _failed(self, block: int, error: LocalError) -> None:
        level, self._told = logging.DEBUG if self._told else logging.WARNING, True
        _log.log(level, "block %d is not copied for the checkpoint: %s", block, error)

    def _drop(self, keys: Iterable[tuple[TermView, int, int]]) -> None:
        """Forget copies."""
        for key in keys:
            if (copy := self._snapshots.pop(key, None)) is not None:
                copy.state.drop()

    @asynccontextmanager
    async def find(self, cluster: int, version: int, block: int) -> AsyncIterator[Served | None]:
        """Context with the state of `block` at `version`: the copy for the checkpoint, else a new one.

        Waits up to STATE_WAIT_S if the update in progress leads to `version`. None if we cannot give it: our
        cluster or version is another, the wait is over, there is no room, or the worker failed.
        """
        try:
            found = await self._find(cluster, version, block)
        except (TimeoutError, CommandFailedError, LocalError) as error:
            _log.debug("state of block %d at %d is not given: %s", block, version, error)
            found = None
        if found is None:
            yield None
            return
        try:
            yield Served(found.state.part(found.nbytes), {"digest": found.digest})
        finally:
            found.state.drop()

    async def _find(self, cluster: int, version: int, block: int) -> _Copy | None:
        """The copy that `find` gives, with one more user."""
        if cluster != self._member.line.cluster:
            return None
        async with asyncio.timeout(STATE_WAIT_S):
            while True:
                if kept := self._snapshots.get((self._member.line, version, block)):
                    kept.state.use()
                    return kept
                if self._holds(version, block) and self._posts is not None:
                    # `dump` posts its command now, so the worker copies before any later update. The
                    # digest is read before the await for the same reason.
                    state, written = self._dump(block)
                    digest = self._member.life.position.digests[block]
                    try:
                        return _Copy(state, await written, digest)
                    except BaseException:
                        state.drop()
                        raise
                if not self._may_come(version):
                    return None
                self._changed.clear()
                await self._changed.wait()

    def _may_come(self, version: int) -> bool:
        """Whether the update in progress may lead to `version`; requests for other versions do not wait."""
        ours = self._member.version
        return ours is not None and ours <= version <= ours + 1

    def _holds(self, version: int, block: int) -> bool:
        member = self._member
        return (
            member.version == version
            and block in member.life.position.digests
            and member.phase is not Phase.APPLYING
        )
