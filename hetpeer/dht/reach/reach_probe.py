"""Finding out whether others can reach us by asking them, and p2pd's configuration that follows. Drives
reachability.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.identity.addresses import Address, at_socket, far_first, is_far, relay_in
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.p2pd.p2pd_control import P2pdError
from hetpeer.dht.p2pd.p2pd_process import NodeConfig
from hetpeer.dht.reach.dialback import MAX_HINTS, MAX_PORTS, DialBackHint, ask
from hetpeer.dht.reach.reachability import ROUND_S, Ask, Effect, Reachability, ReachEstimate, ReachKind

MEET_S = 2.5
"""Seconds to connect to a peer that a helper named, so that it can be asked in the same round."""
MAX_ADDRESSES = 2
"""Addresses of one peer in a hint."""
HINT_S = 1.0
"""Seconds that a helper has to look up addresses of its peers."""

_log = logging.getLogger(__name__)


class ReachProbe:
    """Estimate of our reachability, and the known relays. `config` is the user's own."""

    def __init__(self, config: NodeConfig, peer_id: str, clock: Clock) -> None:
        self.core = Reachability(clock.monotonic())
        self._config = config
        self._peer_id = peer_id
        self._clock = clock
        self._known = {address.peer_id: address for address in config.peers}
        self._relays: dict[str, Address] = {relay.peer_id: relay for relay in config.relays}
        self._port = 0

    @property
    def estimate(self) -> ReachEstimate:
        """The present estimate."""
        return self.core.estimate

    @property
    def relays(self) -> list[Address]:
        """The relays known by now, in the order of preference."""
        return list(self._relays.values())

    def forwarded(self, own: Collection[Address], helpers: int = 1) -> Address | None:
        """Our address behind a router that forwards the port; None if it is one of our `own`, or unknown.

        At least `helpers` peers outside our network must have reached us there.
        """
        estimate = self.estimate
        if estimate.reach is not ReachKind.PUBLIC or not estimate.outside or estimate.alike < helpers:
            return None
        there = at_socket(estimate.ip, estimate.port, self._peer_id)
        return None if there in own else there

    async def round(self, session: NetworkSession, port: int, *, served: bool) -> None:
        """Ask helpers if it is time, for at most ROUND_S; then `estimate` is up to date.

        `port`: where we listen. `served`: whether some relay has a slot for us, if we need one.
        """
        self._port = port
        with suppress(TimeoutError):
            async with asyncio.timeout(ROUND_S), asyncio.TaskGroup() as group:
                now = self._clock.monotonic()
                effects = self.core.moved(now, _machine_addresses())
                if not served:
                    effects += self.core.unserved(now)
                self._perform(group, session, [*effects, *await self._met(session)])
        self.core.tick(self._clock.monotonic())  # helpers that did not answer are not waited for any longer

    def adapted(self, current: NodeConfig, session: NetworkSession, *, served: bool) -> NodeConfig:
        """p2pd's configuration by what is known; `current` is its present one. `served` as in `round`."""
        if self._config.reachability != "ask":
            return current
        estimate, own = self.estimate, session.addresses
        near = tuple(address for address in own if not address.relay and not is_far(address))
        if estimate.reach is ReachKind.PRIVATE and current.reachability == "private" and served:
            return current
        if estimate.reach is ReachKind.PRIVATE and self._relays:
            relays = tuple(self._relays.values())
            return replace(self._config, reachability="private", relays=relays, announce=near)
        if estimate.reach is ReachKind.PUBLIC:
            if (there := self.forwarded(own)) is not None:
                return replace(self._config, announce=(there, *near))
            return self._config if current.reachability == "private" else current
        return current

    async def hints(self, session: NetworkSession, asker: str) -> tuple[Sequence[str], Sequence[str]]:
        """(relays, other peers) as addresses, for a peer that asks us to dial it."""
        relays = list(self._relays.values())
        if self._config.reachability == "public":
            relays = far_first(session.addresses)[:2] + relays
        direct = {peer for peer, text in await _connections(session) if peer != asker and not relay_in(text)}
        near = random.sample(sorted(direct), min(len(direct), 2 * MAX_HINTS))  # each is a request to p2pd
        asking = [asyncio.ensure_future(_addresses_of(session, peer)) for peer in near]
        if asking:
            await asyncio.wait(
                asking, timeout=HINT_S
            )  # p2pd searches the network for a peer that has just left
            for task in asking:
                task.cancel()
        found = [task.result() for task in asking if task.done() and not task.cancelled()]
        # The best address of each, then the second: it may be where a connection came from, where nothing
        # listens.
        others = [other for turn in itertools.zip_longest(*found) for other in turn if other is not None]
        return [str(relay) for relay in relays], [str(other) for other in others]

    # ── a round ────────────────────────────────────────────────────────────────────────────────────────────

    def _perform(self, group: asyncio.TaskGroup, session: NetworkSession, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                group.create_task(self._ask(group, session, effect.helper))
            else:
                _log.info("reachability: %s, found by %d peers", effect.estimate.reach, effect.estimate.peers)

    async def _ask(self, group: asyncio.TaskGroup, session: NetworkSession, helper: str) -> None:
        def hinted(hint: DialBackHint) -> None:
            for relay in hint.relays:
                self._note_relay(relay)
            for other in hint.others:
                if other.peer_id != self._peer_id:
                    group.create_task(self._meet(group, session, other))

        finding = None
        try:
            finding = await ask(session.control, helper, self._ports(session), hinted)
        except RemoteError as error:
            _log.debug("dial-back by %s: %s", helper, error)
        self._perform(group, session, self.core.answered(self._clock.monotonic(), helper, finding))

    def _note_relay(self, relay: Address) -> None:
        """Remember a relay. Those named by our user come first, at his addresses, and are never
        crowded out.
        """
        if relay.peer_id in (self._peer_id, *self._relays):
            return
        if relay.peer_id in self._known:
            self._relays = {relay.peer_id: self._known[relay.peer_id], **self._relays}
        elif sum(peer not in self._known for peer in self._relays) < MAX_HINTS:
            self._relays[relay.peer_id] = relay

    async def _meet(self, group: asyncio.TaskGroup, session: NetworkSession, other: Address) -> None:
        with suppress(P2pdError):
            await session.control.connect(other, MEET_S)
            self._perform(group, session, await self._met(session))

    async def _met(self, session: NetworkSession) -> list[Effect]:
        helpers = [peer for peer, text in await _connections(session) if text and not relay_in(text)]
        named_first = sorted(dict.fromkeys(helpers), key=lambda peer: peer not in self._known)
        return self.core.met(self._clock.monotonic(), named_first)

    def _ports(self, session: NetworkSession) -> list[int]:
        """The ports where we listen, and others that lead there (mapped by a router)."""
        found = [place[1] for address in session.addresses if not address.relay and (place := address.socket)]
        return list(dict.fromkeys([self._port, *found]))[:MAX_PORTS]


async def _addresses_of(session: NetworkSession, peer: str) -> list[Address]:
    """Addresses at which others may find a connected peer, the likeliest first."""
    try:
        return far_first(await session.control.addresses_of(peer))[:MAX_ADDRESSES]
    except P2pdError:
        return []


async def _connections(session: NetworkSession) -> list[tuple[str, str]]:
    try:
        return await session.control.connections()
    except P2pdError:
        return []  # p2pd has just died


def _machine_addresses() -> set[str]:
    import psutil

    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
