"""One life of the network: a p2pd, its connections, and hivemind's DHT node on top.

`Node` makes a new one when p2pd dies. Only this file, records.py and addresses.py touch hivemind's classes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from hetpeer.dht.base.runtime import Clock
from hetpeer.dht.identity.addresses import Address, hivemind_unix_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia import first_contact
from hetpeer.dht.kademlia.table import KnownKeys
from hetpeer.dht.p2pd.listener import Listener
from hetpeer.dht.p2pd.p2pd_control import P2pdControl, P2pdError
from hetpeer.dht.p2pd.p2pd_process import NodeConfig, P2pd

DHT_START_DEADLINE_S = 15.0
REJOIN_DEADLINE_S = 2.0
_HIVEMIND_STOP_S = 1.0

_log = logging.getLogger(__name__)


class NetworkSession:
    """A p2pd with all attached to it, from `start` to `close`; `p2pd.exited` is set when it is dead."""

    def __init__(
        self, p2pd: P2pd, identity: Identity, clock: Clock, listener: Listener, keys: KnownKeys
    ) -> None:
        self.p2pd = p2pd
        self.control = P2pdControl(p2pd.control_path)
        self.dht: Any = None
        self.addresses: list[Address] = []
        self.gate: Callable[[str], Awaitable[bool]] | None = None
        """Whether dialling a peer makes sense, after a wait for relays; hivemind's calls go through it."""
        self._identity = identity
        self._clock = clock
        self._listener = listener
        self._keys = keys
        self._served: set[str] = set()
        self._p2p: Any = None

    @classmethod
    async def start(
        cls,
        config: NodeConfig,
        identity: Identity,
        clock: Clock,
        listener: Listener,
        keys: KnownKeys,
        *,
        port: int,
    ) -> NetworkSession:
        """A session in no swarm yet: p2pd up, `listener`'s handlers registered, our addresses known.

        `keys`: the DHT keys in use here. Raises what `P2pd.start` does, and `P2pdError`.
        """
        import hivemind.dht.node  # noqa: F401 - the first import takes seconds: before any deadline runs

        session = cls(await P2pd.start(config, identity, port=port), identity, clock, listener, keys)
        try:
            listener.handlers[first_contact.PROTOCOL] = first_contact.answer_hello(session.control, clock)
            for protocol in list(listener.handlers):
                await session.serve(protocol)
            await session.refresh_addresses()
        except BaseException:
            await session.close()
            raise
        return session

    async def serve(self, protocol: str) -> None:
        """Have p2pd hand streams of `protocol` to the listener. Raises `P2pdError`."""
        if protocol not in self._served:  # p2pd refuses a second time
            self._served.add(protocol)
            await self.control.send_streams_to(protocol, self._listener.path)

    async def refresh_addresses(self) -> None:
        """Ask p2pd where we can be reached; this changes when a relay slot is won. Raises `P2pdError`."""
        self.addresses = await self.control.own_addresses()

    def listening_port(self) -> int:
        """The TCP port that p2pd listens on; 0 if it names none."""
        places = [address.socket for address in self.addresses if not address.relay]
        return next((place[1] for place in places if place is not None), 0)

    async def join(self, peers: Iterable[Address], *, alone_ok: bool) -> list[str]:
        """Connect to `peers`; returns the ids of those that answer and whose clocks agree with ours.

        Raises `LocalError`: HP-NET-002 none answers (not with `alone_ok`), HP-NET-004 our clock is off,
        HP-ID-002 our identity is in use elsewhere.
        """
        hellos, reasons = await first_contact.meet(self.control, self._clock, peers)
        if reasons and not hellos and not alone_ok:
            raise first_contact.nobody_answers(reasons)
        fit = first_contact.check_clock(hellos)
        for one in fit:
            await first_contact.check_alone(self.control, self._clock, self._identity, one)
        return [one.peer_id for one in fit]

    async def rejoin(self, peers: Iterable[Address]) -> list[str]:
        """Join again, for a node that goes on in any case: never raises, takes at most REJOIN_DEADLINE_S.

        Dials only where something listens: after a failed dial p2pd would not try again for 5 s.
        """
        hellos, _ = await first_contact.meet(
            self.control, self._clock, peers, timeout_s=REJOIN_DEADLINE_S, knock=True
        )
        return [one.peer_id for one in hellos if one.clock_agrees]

    async def start_dht(self, peer_ids: list[str], previous: Any) -> None:
        """Run hivemind's DHTNode here, joined through `peer_ids`, with the records of a `previous` node.

        Raises `P2pdError`, also if p2pd dies meanwhile: hivemind itself would wait for ever.
        """
        starting = asyncio.ensure_future(self._start_hivemind(peer_ids, previous))
        dying = asyncio.ensure_future(self.p2pd.exited.wait())
        try:
            await asyncio.wait(
                {starting, dying}, timeout=DHT_START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            dying.cancel()
            starting.cancel()  # no effect when done
            await asyncio.gather(dying, starting, return_exceptions=True)
        if starting.cancelled():
            raise P2pdError("it died or did not answer while the DHT node started")
        if (error := starting.exception()) is not None:
            raise P2pdError(f"the DHT node does not start: {error!r}") from error

    async def ping(self, peer_id: str) -> None:
        """Make this peer and us known to each other in the DHT again; failures are left to the next time."""
        from hivemind.p2p import PeerID

        if self.dht is None:  # closed meanwhile
            return
        try:
            await self.dht.protocol.call_ping(PeerID.from_base58(peer_id))
        except Exception as error:  # noqa: BLE001 - hivemind lets out any error of parsing a peer's answer
            _log.debug("%s was not pinged: %r", peer_id, error)

    async def close(self) -> None:
        """Leave the DHT and end p2pd, within about 3 s. Idempotent."""
        if self.dht is not None:
            self.dht.is_alive = False
            # hivemind says good-bye to p2pd, and would wait for ever for a dead one
            if not self.p2pd.exited.is_set():
                await _at_most(_HIVEMIND_STOP_S, self.dht.shutdown())
            self.dht = None
        if self._p2p is not None:
            await _at_most(_HIVEMIND_STOP_S, self._p2p.shutdown())
            self._p2p = None
        await self.p2pd.close()

    async def _start_hivemind(self, peer_ids: list[str], previous: Any) -> None:
        """Start hivemind's DHT node on our p2pd; it takes the stored records of the session `previous`."""
        from hivemind.dht import node as hivemind_node
        from hivemind.dht.routing import DHTID
        from hivemind.p2p import P2P
        from hivemind.proto.dht_pb2 import NodeInfo
        from hivemind.utils.logging import use_hivemind_log_handler

        from hetpeer.dht.kademlia.records import DHTProtocol, OwnerValidator

        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # it logs remote faults with tracebacks
        self._p2p = await P2P.replicate(hivemind_unix_address(self.control.path))
        if self.gate is not None:
            _hold_back(self._p2p._client, self.gate)  # noqa: SLF001 - hivemind dials whenever it likes
        client = self._p2p._client.control  # noqa: SLF001 - hivemind never looks at how its two tasks end
        for task in (client._read_task, client._write_task):  # noqa: SLF001
            task.add_done_callback(_retrieve)
        # The node answers pings a moment before it can describe itself, and a returning peer is pinged at
        # once.
        DHTProtocol.node_info = NodeInfo()
        hivemind_node.DHTProtocol = DHTProtocol  # hivemind has no parameter for it
        self.dht = await hivemind_node.DHTNode.create(
            p2p=self._p2p,
            # The same id after each start: with a new one everybody would go on looking for the old one, too.
            node_id=DHTID.generate(source=self._identity.peer_id.encode()),
            initial_peers=[f"/p2p/{peer_id}" for peer_id in peer_ids],
            record_validator=OwnerValidator(self._identity, self._clock, self._keys),
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            ensure_bootstrap_success=False,  # `join` has tested more, and says what is wrong
            strict=False,
        )
        if previous is not None:
            self.dht.protocol.storage = previous.protocol.storage


def _hold_back(client: Any, gate: Callable[[str], Awaitable[bool]]) -> None:
    """Make hivemind's client await `gate` before each call, and refuse calls that it forbids."""
    call = client.call_unary_handler

    async def patient_call(peer_id: Any, name: str, data: bytes) -> bytes:
        if not await gate(peer_id.to_base58()):
            raise P2pdError("nothing listens at the addresses of this peer")
        answer: bytes = await call(peer_id, name, data)
        return answer

    client.call_unary_handler = patient_call


async def _at_most(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the outcome, so that a dead p2pd is not logged again when the task is collected."""
    if not task.cancelled():
        task.exception()
