"""The coordinator's checkpoint store in a simulated swarm: it fetches states from those who save them, and survives crashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.decisions import CollectCheckpoint
from hetpeer.peer.simulate.host import Host
from hetpeer.peer.simulate.numerics import Numerics
from hetpeer.peer.simulate.world import World

if TYPE_CHECKING:
    from hetpeer.peer.simulate.volunteer import Volunteer

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
        self._states = {(0, 0, b): numerics.initial(b) for b in range(numerics.blocks)}
        """(cluster, version, block) → state."""
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
                self._states[order.line.cluster, version, block] = state
                digest = self._numerics.digest(state)
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
        complete = version == 0 or (cluster, version) in self._complete()
        if not complete or self._host.core is None:
            return None
        return self._states.get((cluster, version, block))

    def last(self) -> dict[int, Any]:
        """Block → state, of the last complete checkpoint."""
        cluster, version = [(0, 0), *self._complete()][-1]
        return {block: self._states[cluster, version, block] for block in range(self._numerics.blocks)}

    def _complete(self) -> list[tuple[int, int]]:
        """Clusters and versions in the log's order."""
        return [(r.get("cluster", 0), r["version"]) for r in self._log if r["kind"] == "checkpoint"]
