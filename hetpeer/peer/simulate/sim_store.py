"""The coordinator's checkpoint store in a simulated swarm: it fetches states from those who save them, and survives crashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.state.effects import CollectCheckpoint
from hetpeer.peer.simulate.network.world import World
from hetpeer.peer.simulate.sim_coordinator import Host
from hetpeer.peer.simulate.sim_numerics import Numerics

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_volunteer import Volunteer

RETRY_S, TRIES = 0.3, 15
SLOW_S, SLOW = 8.0, 0.1
"""A fetch may take so long, of so many one."""


class Store:
    """Of `host`, whose durable log is `log`."""

    def __init__(
        self,
        world: World,
        host: Host,
        volunteers: Mapping[str, Volunteer],
        numerics: Numerics,
        log: Sequence[Mapping[str, Any]],
    ) -> None:
        self._world = world
        self._host = host
        self._volunteers = volunteers
        self._numerics = numerics
        self._log = log
        self._states: dict[tuple[int, int, int, str], Any] = {}
        """(cluster, version, block, digest) → state: what is collected late for an order that is past takes nothing else's place."""
        self._asked: CollectCheckpoint | None = None
        """The last order."""

    def collect(self, order: CollectCheckpoint) -> None:
        """Fetch the blocks' states from those who save them; one that cannot be had ends it."""
        self._collect(order, set(), TRIES)

    def _collect(self, order: CollectCheckpoint, here: set[int], tries: int) -> None:
        host, random = self._host, self._world.random
        reign, version, savers = host.reign, order.version, order.savers
        self._asked = order

        def fetch() -> None:
            if reign != host.reign or host.core is None:
                return
            block = next(b for b in savers if b not in here)
            saver = self._volunteers[savers[block]]
            state = saver.state(version, block) if saver.alive and not saver.frozen else None
            if state is not None:
                here.add(block)
                digest = self._numerics.digest(state)
                self._states[order.line.cluster, version, block, digest] = state
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
        """The checkpoint that was asked for last cannot be collected or written."""
        if self._asked is not None:
            self._failed(self._asked)

    def _failed(self, order: CollectCheckpoint) -> None:
        self._host.event("not_saved", lambda core, now: core.not_saved(order, now))

    # ── what is complete ─────────────────────────────────────────────────────────────────────────────────────────

    def sealed(self, cluster: int, version: int, block: int) -> Any:
        """A block's state from a complete checkpoint, for volunteers; None if there is none of that version, or the coordinator is down."""
        if self._host.core is None:
            return None
        if version == 0:
            return self._numerics.initial(block)
        digests = self._complete().get((cluster, version))
        return None if digests is None else self._states.get((cluster, version, block, digests[block]))

    def last(self) -> dict[int, Any]:
        """Block → state, of the last complete checkpoint."""
        blocks = range(self._numerics.blocks)
        complete = self._complete()
        if not complete:
            return {block: self._numerics.initial(block) for block in blocks}
        (cluster, version), digests = list(complete.items())[-1]
        return {block: self._states[cluster, version, block, digests[block]] for block in blocks}

    def _complete(self) -> dict[tuple[int, int], Mapping[int, str]]:
        """Cluster and version → block → digest, in the log's order."""
        checkpoints = [record for record in self._log if record["kind"] == "checkpoint"]
        found: dict[tuple[int, int], Mapping[int, str]] = {}
        for record in checkpoints:
            found.pop((record.get("cluster", 0), record["version"]), None)
            found[record.get("cluster", 0), record["version"]] = record["blocks"]
        return found
