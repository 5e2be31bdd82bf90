"""The states of one process of a simulated volunteer: it fetches them block by block, copies them for a checkpoint, and gives them to others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.averaging.member.member import Effect, Member, Phase
from hetpeer.peer.simulate.proofs.invariants import require
from hetpeer.peer.simulate.sim_worker import Answer, Worker

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_swarm import Swarm

FETCH_RETRY_S = 0.3


class States:
    """Of volunteer `name` of `swarm`, in `worker`. `fetch_s`: how long the transfer of one block takes, by now; `later` as of sim_sender.py."""

    def __init__(
        self,
        swarm: Swarm,
        name: str,
        member: Member,
        worker: Worker,
        later: Answer,
        fetch_s: Callable[[], tuple[float, float]],
    ) -> None:
        self._swarm = swarm
        self._name = name
        self._member = member
        self._worker = worker
        self._later = later
        self._fetch_s = fetch_s
        self._copies: dict[tuple[m.Line, int, int], Any] = {}
        """(line, version, block) → state, for the coordinator to fetch."""
        self._fetching = 0

    # ── ours ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, order: e.FetchState) -> None:
        """Load block after block, as long as it takes; a later order takes the place of an earlier one."""
        assert self._member.place is not None
        self._fetching += 1
        number, missing = self._fetching, list(range(*self._member.place))
        digests: dict[int, str] = {}

        def go_on(core: Member) -> Iterable[Effect]:
            if number != self._fetching:
                return ()
            if not missing:
                return core.state_loaded(order.line, order.version, digests)
            block = missing[0]
            state = self._find(order, block)
            if state is None:
                self._swarm.world.after(FETCH_RETRY_S, lambda: self._later(go_on))
                return ()
            missing.pop(0)
            digests[block] = self._swarm.numerics.digest(state)
            self._worker.load(order.version, block, state, next_one)
            return ()

        def next_one() -> None:
            transfer = self._swarm.world.random.uniform(*self._fetch_s())
            self._swarm.world.after(transfer, lambda: self._later(go_on))

        next_one()

    def _find(self, order: e.FetchState, block: int) -> Any:
        """The state from one of its holders, or from the coordinator's checkpoint; None if nobody has it now."""
        wanted = order.digests.get(block)
        for name in order.sources.get(block, ()):
            holder = self._swarm.volunteers[name]
            if name != self._name and holder.alive and not holder.frozen:
                state = holder.state(order.version, block)
                if state is not None and wanted in (None, self._swarm.numerics.digest(state)):
                    return state
        return self._swarm.store.sealed(order.origin, order.version, block)

    # ── for others ───────────────────────────────────────────────────────────────────────────────────────────────

    def copy(self, order: e.SaveState) -> None:
        """Copy what the order names; the worker still has it when the copy's turn comes."""

        def copy(_core: Member) -> Iterable[Effect]:
            for block, digest in order.digests.items():
                version = max(self._worker.states[block])
                state = self._worker.states[block][version]
                exact = (version, self._swarm.numerics.digest(state)) == (order.version, digest)
                require(exact, f"{self._name} is to copy version {order.version} of block {block}")
                self._copies[order.line, order.version, block] = self._worker.checking.lying.saved(state)
            return ()

        self._worker.submit(0.0, copy)

    def forget_copies(self) -> None:
        """The process gets another place."""
        self._copies.clear()

    def give(self, version: int, block: int) -> Any:
        """What whoever asks for `block` at `version` gets; None if we do not have it."""
        member = self._member
        if (member.line, version, block) in self._copies:
            return self._copies[member.line, version, block]
        if member.version != version or block not in member.digests or member.phase is Phase.APPLYING:
            return None
        states = self._worker.states[block]
        return states[version] if max(states) == version else None
