"""States of blocks in a simulated swarm: fetched, copied and given by a volunteer, and kept in the
coordinator's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Effect
from hetpeer.averaging.member.member import Member
from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.state.effects import CollectCheckpoint
from hetpeer.peer.simulate.network.world import World
from hetpeer.peer.simulate.sim_coordinator import SimCoordinator
from hetpeer.peer.simulate.sim_hooks import ViolationError
from hetpeer.peer.simulate.sim_numerics import Symbols
from hetpeer.peer.simulate.sim_worker import Answer, SimWorker

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_swarm import SimSwarm
    from hetpeer.peer.simulate.sim_volunteer import SimVolunteer

FETCH_RETRY_S = 0.3
RETRY_S, TRIES = 0.3, 15
SLOW_S, SLOW = 8.0, 0.1
"""Most seconds of a slow fetch, and the share of slow fetches."""


@dataclass(eq=False)
class SimStates:
    """States of volunteer `name` of `swarm`, in `worker`.

    `fetch_s` gives the least and most seconds of the transfer of one block; `later` calls the core when the
    process comes to it.
    """

    _swarm: SimSwarm
    _name: str
    _member: Member
    _worker: SimWorker
    _later: Answer
    _fetch_s: Callable[[], tuple[float, float]]
    _copies: dict[tuple[m.TermView, int, int], Any] = field(default_factory=dict)
    """(term and view, version, block) → state that the coordinator may fetch; also of the last checkpoint."""
    _fetching: int = 0
    _order: e.FetchState | None = None
    """The newest order, as long as it is under way."""

    # ── ours ────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, order: e.FetchState) -> None:
        """Load block after block, with retries; a later order replaces an earlier one, or goes on with it."""
        assert self._member.place is not None
        place = range(*self._member.place)
        earlier, self._order = self._order, order
        if earlier is not None and earlier.goes_on_as(order, place):
            return
        self._fetching += 1
        number, missing = self._fetching, list(place)
        digests: dict[int, str] = {}
        ours = all(self._own(order, block) is not None for block in place)

        def go_on(core: Member) -> Iterable[Effect]:
            newest = self._order
            if number != self._fetching or newest is None:
                return ()
            if not missing:
                self._order = None
                return core.life.loaded(newest.line, newest.version, digests)
            block = missing[0]
            state = self._find(newest, block)
            if state is None:
                self._swarm.world.after(FETCH_RETRY_S, lambda: self._later(go_on))
                return ()
            missing.pop(0)
            digests[block] = self._swarm.numerics.digest(state)
            self._worker.load(order.version, block, state, next_one)
            return ()

        def next_one() -> None:
            transfer = 0.0 if ours else self._swarm.world.random.uniform(*self._fetch_s())
            self._swarm.world.after(transfer, lambda: self._later(go_on))

        next_one()

    def give_up(self) -> None:
        """End the fetch under way and forget all copies: the process gets another place."""
        self._fetching += 1
        self._order = None
        self._copies.clear()

    def _own(self, order: e.FetchState, block: int) -> Any:
        """Our copy of just the state that `order` names; None if there is none."""
        for (_, version, its_block), state in self._copies.items():
            same = (version, its_block) == (order.version, block)
            if same and self._swarm.numerics.digest(state) == order.digests.get(block):
                return state
        return None

    def _find(self, order: e.FetchState, block: int) -> Any:
        """Our copy, or the state from a holder or the coordinator's checkpoint; None if nobody has it now."""
        if (own := self._own(order, block)) is not None:
            return own
        wanted = order.digests.get(block)
        for name in order.sources.get(block, ()):
            holder = self._swarm.volunteers[name]
            if name != self._name and holder.alive and not holder.frozen:
                state = holder.state(order.line.cluster, order.version, block)
                if state is not None and wanted in (None, self._swarm.numerics.digest(state)):
                    return state
        stored = self._swarm.store.sealed(order.origin, order.version, block)
        if stored is not None and wanted is not None:
            self._copies[order.line, order.version, block] = stored
        return stored

    # ── for others ──────────────────────────────────────────────────────────────────────────────────────────

    def copy(self, order: e.SaveState) -> None:
        """Copy the states that `order` names, when the worker comes to it.

        Raises `ViolationError` if they are not there any more.
        """

        def copy(_core: Member) -> Iterable[Effect]:
            at = (order.line, order.version)
            self._copies = {
                key: state for key, state in self._copies.items() if key[:2] == at or key[1] == order.stored
            }
            for block, digest in order.digests.items():
                version = max(self._worker.states[block])
                state = self._worker.states[block][version]
                exact = (version, self._swarm.numerics.digest(state)) == (order.version, digest)
                if not exact:
                    raise ViolationError(f"{self._name} is to copy version {order.version} of block {block}")
                self._copies[order.line, order.version, block] = self._worker.conduct.state_saved(state)
            return ()

        self._worker.submit(0.0, copy)

    def give(self, version: int, block: int) -> Any:
        """State of `block` at `version` for another peer; None if it is not here."""
        member = self._member
        if (member.line, version, block) in self._copies:
            return self._copies[member.line, version, block]
        if (
            member.version != version
            or block not in member.life.position.digests
            or member.phase is Phase.APPLYING
        ):
            return None
        states = self._worker.states[block]
        return states[version] if max(states) == version else None


@dataclass(eq=False)
class SimCheckpointStore:
    """Checkpoints of the coordinator `host`, whose durable log is `log`; they survive its crashes."""

    _world: World
    _host: SimCoordinator
    _volunteers: Mapping[str, SimVolunteer]
    _numerics: Symbols
    _log: Sequence[Mapping[str, Any]]
    _states: dict[tuple[int, int, int, str], Any] = field(default_factory=dict)
    """(cluster, version, block, digest) → state.

    A state that comes late for an old order replaces no other one.
    """
    _asked: CollectCheckpoint | None = None
    """Last order."""

    def collect(self, order: CollectCheckpoint) -> None:
        """Fetch the blocks' states from the volunteers that save them; it fails if one is not available.

        An order that is under way is dropped without an answer, as by the product's driver.
        """
        self._asked = order
        self._collect(order, set(), TRIES)

    def _collect(self, order: CollectCheckpoint, here: set[int], tries: int) -> None:
        """Fetch the states of a checkpoint one by one from `savers`; `here`: blocks that are stored."""
        host, random = self._host, self._world.random
        life, version, savers = host.life, order.version, order.savers
        cluster = order.line.cluster

        def fetch() -> None:
            if life != host.life or host.core is None or order is not self._asked:
                return
            block = next(b for b in savers if b not in here)
            saver = self._volunteers[savers[block]]
            state = saver.state(cluster, version, block) if saver.alive and not saver.frozen else None
            if state is not None:
                here.add(block)
                digest = self._numerics.digest(state)
                self._states[cluster, version, block, digest] = state
                host.event("saved", lambda core, now: core.saved(order, block, digest, now))
                if len(here) < len(savers):
                    self._collect(order, here, TRIES)
            elif tries:
                self._collect(order, here, tries - 1)
            else:
                self._failed(order)

        slow = random.random() < SLOW
        wait = (SLOW_S if slow else RETRY_S) * random.random()
        self._world.after(wait, lambda: host.later(fetch))

    def fail(self) -> None:
        """Let the checkpoint that was ordered last fail."""
        if self._asked is not None:
            self._failed(self._asked)

    def _failed(self, order: CollectCheckpoint) -> None:
        self._host.event("not_saved", lambda core, now: core.not_saved(order, now))

    # ── what is complete ────────────────────────────────────────────────────────────────────────────────────

    def sealed(self, cluster: int, version: int, block: int) -> Any:
        """State from a complete checkpoint; None without one of that version or without a coordinator."""
        if self._host.core is None:
            return None
        if version == 0:
            return self._numerics.initial(block)
        digests = self._complete().get((cluster, version))
        return None if digests is None else self._states.get((cluster, version, block, digests[block]))

    def last(self) -> dict[int, Any]:
        """Block → state, in the last complete checkpoint."""
        blocks = range(self._numerics.blocks)
        complete = self._complete()
        if not complete:
            return {block: self._numerics.initial(block) for block in blocks}
        (cluster, version), digests = list(complete.items())[-1]
        return {block: self._states[cluster, version, block, digests[block]] for block in blocks}

    def _complete(self) -> dict[tuple[int, int], Mapping[int, str]]:
        """(cluster, version) → block → digest, in the log's order."""
        checkpoints = [record for record in self._log if record["kind"] == "checkpoint"]
        found: dict[tuple[int, int], Mapping[int, str]] = {}
        for record in checkpoints:
            found.pop((record.get("cluster", 0), record["version"]), None)
            found[record.get("cluster", 0), record["version"]] = record["blocks"]
        return found
