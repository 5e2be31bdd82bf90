"""A stranger in the network: it takes part in nothing, and makes trouble for everybody. What it does, a
file says (attacks.py).

    python -m tests.hostile.stranger HOST ADDRESS RUN FOLDER

HOST is where it listens, ADDRESS that of the run's reliable peer, FOLDER where its keys are. Each attack goes
on as fast as one core of a hostile machine lets it, but for pauses that leave this machine to the swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
from hivemind.dht import node as hivemind_node
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.position import MAX_EARLY
from hetpeer.averaging.member.tensor_heads import ActivationHead, ShardHead
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.storage.file_service import PROTOCOL as FILES
from hetpeer.bootstrap.storage.file_service import fetch
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.discovery import Roster
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia.records import OwnerValidator
from hetpeer.dht.kademlia.table import MAX_PAYLOAD, MAX_RECORDS, MAX_TTL_S, SHARDS, KnownKeys, shard_of
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.frame import encode_head
from hetpeer.peer.transport.data_plane import TENSORS
from hetpeer.stages.pipeline.routes import Hop
from tests.dht.identities import identities
from tests.hostile.attacks import LOOK_S, UnderWay

OPENING = {"key": "stranger", "has": 0, "begun": False}
MARKUP = "\x1b[31m<script>alert('x')</script>\r\n\u202e"
PAUSE_S = 0.1
STREAMS = 12
"""That drip at once, to each peer: more than it takes."""
LIARS = 3
OUTSIDE = ("../../identity.key", "/etc/passwd", "file/../../manifest", "state/0/0/../..", "file/" + "0" * 64)


class Anything(RecordValidatorBase):  # type: ignore[misc]
    """No rule."""

    def validate(self, _record: DHTRecord) -> bool:
        return True


class KnowsForEver(DHTLocalStorage):  # type: ignore[misc]
    """Says of each key that it has nothing, and that this is the last word on it."""

    def get(self, _key: DHTID) -> ValueWithExpiration:
        return ValueWithExpiration(DictionaryDHTValue(), float("inf"))

    def store(self, *_: Any, **__: Any) -> bool:
        return True

    store_subkey = store


class Stranger:
    """One node, and what it does."""

    def __init__(self, node: Node, host: str, place: Address, run: str, folder: Path) -> None:
        self._node = node
        self._host = host
        self._place = place
        self._run = run
        self._folder = folder
        self._roster = Roster(node, run)
        self._numbers = itertools.count()
        self.attacks: dict[str, Callable[[], Awaitable[None]]] = {
            "nonsense": self.nonsense,
            "early": self.early,
            "sessions": self.sessions,
            "identities": self.identities,
            "poison": self.poison,
            "eclipse": self.eclipse,
            "drip": self.drip,
            "paths": self.paths,
            "names": self.names,
        }

    async def follow(self, attack: UnderWay) -> None:
        """Do what is under way, until that is something else. Never returns."""
        while True:
            name = attack()
            doing = self.attacks.get(name)
            if doing is None:
                await asyncio.sleep(LOOK_S)
                continue
            print(f"begins: {name}", file=sys.stderr, flush=True)
            task = asyncio.ensure_future(doing())
            while attack() == name and not task.done():
                await asyncio.sleep(LOOK_S)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            print(f"ends: {name}", file=sys.stderr, flush=True)

    async def _volunteers(self) -> list[str]:
        coordinator = self._place.peer_id
        return [peer for peer in await self._roster.read() if peer not in (coordinator, self._node.peer_id)]

    async def _everybody(self) -> list[str]:
        return [self._place.peer_id, *await self._volunteers()]

    # ── streams ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _says(self, peer: str, protocol: str, *frames: tuple[dict[str, Any], bytes]) -> None:
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(2.0), await self._node.open(peer, protocol) as stream:
                for header, payload in frames:
                    await stream.send(header, payload)
                await stream.receive()

    async def nonsense(self) -> None:
        """Tensors that are none, of every length, to everybody; messages that are none to the coordinator."""
        volunteers = await self._volunteers()
        for number in itertools.count():
            for peer in volunteers:
                frame = _tensor(peer, 1 + number % 3, bytes(1 << 20 if number % 2 else 60))
                await self._says(peer, TENSORS, (OPENING, b""), frame)
                await asyncio.sleep(PAUSE_S)
            junk = ({"n": 1, "a": 0, "m": {}}, b"\x00" * (1 << (10 + number % 12)))
            await self._says(self._place.peer_id, CONTROL_PROTOCOL, (OPENING, b""), junk)

    async def early(self) -> None:
        """Shards of no elements, which cost no credit, for a reign and a step that will never be: more
        than anybody lets wait.
        """
        while True:
            for peer in await self._volunteers():
                key = f"early {next(self._numbers)}"
                frames = (_early(number) for number in range(1, MAX_EARLY + 1))
                await self._says(peer, TENSORS, (OPENING | {"key": key}, b""), *frames)
                await asyncio.sleep(PAUSE_S)

    async def sessions(self) -> None:
        """One session with the coordinator after the other, each of which begins as if the one before had
        gone.
        """
        hello = m.encode(m.Hello(run=self._run, incarnation=1))
        while True:
            key = f"session {next(self._numbers)}"
            said = asyncio.ensure_future(
                self._says(
                    self._place.peer_id,
                    CONTROL_PROTOCOL,
                    (OPENING | {"key": key}, b""),
                    ({"n": 1, "a": 0, "m": {}}, hello),
                )
            )
            await asyncio.wait([said], timeout=PAUSE_S)
            said.cancel()

    async def drip(self) -> None:
        """More streams than a peer takes, each of which sends a byte now and then."""
        peers = await self._everybody()
        async with asyncio.TaskGroup() as tasks:
            for peer in peers:
                for _ in range(STREAMS):
                    tasks.create_task(self._drips(peer))

    async def _drips(self, peer: str) -> None:
        while True:
            with contextlib.suppress(RemoteError):
                stream = await self._node.open(peer, TENSORS)
                try:
                    for byte in encode_head(OPENING, 0):
                        await stream._wire.write([bytes([byte])])
                        await asyncio.sleep(0.7)
                finally:
                    stream.abort()
            await asyncio.sleep(1.0)

    async def paths(self) -> None:
        """Files that are nobody's business."""
        peers = await self._everybody()
        while True:
            for peer, name in itertools.product(peers, OUTSIDE):
                with contextlib.suppress(RemoteError, TimeoutError):
                    async with asyncio.timeout(2.0):
                        data, _ = await fetch(self._node, peer, name, 1 << 20)
                        print(f"GOT {name} of {peer}: {len(data)} bytes", file=sys.stderr, flush=True)
                await asyncio.sleep(PAUSE_S)
            await self._says(peers[0], FILES, ({"want": 7}, b""))

    # ── taking part ─────────────────────────────────────────────────────────────────────────────────────────

    async def identities(self) -> None:
        """One peer after the other that is new, claims to be the fastest of all, takes a place and is
        never seen again.
        """
        while True:
            identity = Identity.create(self._folder / f"one-{next(self._numbers)}.key")
            with contextlib.suppress(LocalError, RemoteError, TimeoutError):
                node = await Node.start(NodeConfig(host=self._host, peers=(self._place,)), identity)
                try:
                    async with asyncio.timeout(5.0):
                        await self._take_place(node)
                finally:
                    await node.close()

    async def _take_place(self, node: Node) -> None:
        hello = m.Hello(
            run=self._run, incarnation=1, name=MARKUP, memory_bytes=1 << 46, flops_per_second=1e18
        )
        async with await node.open(self._place.peer_id, CONTROL_PROTOCOL) as stream:
            await stream.send({"key": "one", "has": 0, "begun": False})
            await stream.receive(timeout_s=5)
            await stream.send({"n": 1, "a": 0, "m": {}}, m.encode(hello))
            while True:
                await stream.receive(timeout_s=5)
                data = await stream.receive_bytes(m.MAX_MESSAGE_BYTES)
                told = m.decode(data) if data else None
                if isinstance(told, m.Welcome):
                    place = next(one for one in told.places if one.open)
                    claim = m.Claim(cluster=place.cluster, begin=place.begin, end=place.end)
                    await stream.send({"n": 2, "a": 1, "m": {}}, m.encode(claim))
                    return

    async def names(self) -> None:
        """An advert whose every text is a program for somebody's terminal or browser."""
        protocol = (await self._node.session()).dht.protocol
        protocol.record_validator, rule = (
            OwnerValidator(self._node.identity, SystemClock(), KnownKeys()),
            protocol.record_validator,
        )
        texts = dict.fromkeys(("name", "role", "state", "device", "reach"), MARKUP)
        try:
            while True:
                key = self._roster._key(self._node.peer_id)
                with contextlib.suppress(RemoteError):
                    await self._node.dht.store(key, {"version": 1, **texts}, ttl_s=30.0)
                await asyncio.sleep(3.0)
        finally:
            protocol.record_validator = rule

    # ── the DHT ─────────────────────────────────────────────────────────────────────────────────────────────

    async def poison(self) -> None:
        """Records that are forged, for ever, in caches, without end, and as many as there is room for in
        each shard.
        """
        protocol = (await self._node.session()).dht.protocol
        rule, protocol.record_validator = protocol.record_validator, Anything()
        reliable = PeerID.from_base58(self._place.peer_id)
        crowd = identities(MAX_RECORDS)
        try:
            for number in itertools.count():
                key = f"{self._roster._prefix}/{number % SHARDS}"
                foreign = f"rubbish {number}"
                victim, now = self._place.peer_id, time.time()
                sent = [
                    (key, None, b"wiped", now + 100, False),
                    (key, victim, msgpack.packb({"name": "forged"}), now + 60, False),
                    (key, *_signed(self._node.identity, key, {"name": "pinned"}, now + 1e9), False),
                    (key, *_signed(self._node.identity, key, {"name": "cached"}, now + MAX_TTL_S), True),
                    (foreign, *_signed(self._node.identity, foreign, _full(), now + MAX_TTL_S - 1), False),
                ]
                for one in crowd[(number * 16) % len(crowd) :][:16]:
                    own = f"{self._roster._prefix}/{shard_of(one.peer_id)}"
                    sent.append((own, *_signed(one, own, _full(), now + MAX_TTL_S - 1), False))
                keys, subkeys, values, expirations, in_cache = zip(*sent, strict=True)
                places = [DHTID.generate(source=key) for key in keys]
                await protocol.call_store(
                    reliable, places, values, list(expirations), subkeys, list(in_cache)
                )
                await asyncio.sleep(PAUSE_S)
        finally:
            protocol.record_validator = rule

    async def eclipse(self) -> None:
        """Nodes right beside the keys of the roster, which say of each that there is nothing, and that
        this is the last word.
        """
        create, shards = hivemind_node.DHTNode.create, itertools.count()

        async def beside(*args: Any, **kwargs: Any) -> Any:
            key = f"{self._roster._prefix}/{next(shards) % SHARDS}"
            kwargs["node_id"] = DHTID(DHTID.generate(source=key) ^ 1)
            return await create(*args, **kwargs)

        liars: list[Node] = []
        hivemind_node.DHTNode.create = beside
        try:
            for _ in range(LIARS):
                identity = Identity.create(self._folder / f"liar-{next(self._numbers)}.key")
                liars.append(await Node.start(NodeConfig(host=self._host, peers=(self._place,)), identity))
                protocol = (await liars[-1].session()).dht.protocol
                protocol.record_validator, protocol.storage = Anything(), KnowsForEver()
            hivemind_node.DHTNode.create = create
            await asyncio.Event().wait()
        finally:
            hivemind_node.DHTNode.create = create
            for liar in liars:
                await liar.close()


def _tensor(peer: str, block: int, payload: bytes) -> tuple[dict[str, Any], bytes]:
    """An activation that claims to be of some step."""
    step = StepId(m.TermView(term=1, view=0), 1000, batch=1000)
    head = ActivationHead(
        line=step.line,
        step=step.number,
        incarnation=1,
        id=0,
        batch=step.batch,
        route=(Hop(peer, block, block + 1),),
        attempt=0,
    )
    return {"n": 1, "a": 0, "m": head.model_dump()}, payload


def _early(number: int) -> tuple[dict[str, Any], bytes]:
    """A shard of a block that may be there, in a plan of a reign that is none: every other one for a step
    of this reign that is far.
    """
    line = m.TermView(term=1 + (number % 2 << 20), view=0)
    head = ShardHead(
        kind="part",
        line=line,
        step=1 << 40,
        incarnation=1,
        plan=1,
        block=number % 8,
        index=0,
        begin=0,
        end=0,
    )
    return {"n": number, "a": 0, "m": head.model_dump()}, b""


def _full() -> dict[str, bytes]:
    return {"a": bytes(MAX_PAYLOAD - 32)}


def _signed(identity: Identity, key: str, value: Any, expires: float) -> tuple[str, bytes, float]:
    """Subkey, bytes and expiration of a record as `identity` would write it, whatever the rule says of
    that.
    """
    place = DHTID.generate(source=key).to_bytes()
    plain = DHTRecord(place, msgpack.packb(identity.peer_id), msgpack.packb(value), expires)
    signer = OwnerValidator(identity, SystemClock(), KnownKeys())
    return identity.peer_id, signer.sign_value(plain), expires


async def main(arguments: Sequence[str]) -> None:
    host, address, run, folder = arguments
    place = parse_address(address)
    identity = Identity.load_or_create(Path(folder) / "stranger.key")
    node = await Node.start(NodeConfig(host=host, peers=(place,)), identity)
    print("up", flush=True)
    try:
        await Stranger(node, host, place, run, Path(folder)).follow(UnderWay.told())
    finally:
        await node.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
