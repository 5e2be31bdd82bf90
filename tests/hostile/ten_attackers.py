"""Ten attackers at once, each a libp2p host that takes a new identity when it is refused.

    python -m tests.hostile.ten_attackers ADDRESS RUN_DIRECTORY FOLDER

ADDRESS is that of the run's reliable peer. Of RUN_DIRECTORY only the manifest and the names of checkpoints
are read, which anybody can fetch. FOLDER takes keys, and counts.json: what the attackers have done so far.
The file that HOSTILE_ATTACK names says which ten attack (attacks.py): those of `WITHOUT_HELLO` are never let
in, those of `WITH_HELLO` have sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.log.volunteer_log import sign_event
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.state.core_config import message_bounds
from hetpeer.bootstrap.storage.file_service import PROTOCOL as FILES
from hetpeer.bootstrap.storage.file_service import state_name
from hetpeer.dht.base.errors import LocalError, RemoteError
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from tests.hostile.attacker_host import ANSWER_S, Host, Session
from tests.hostile.attacks import LOOK_S, WITH_HELLO, WITHOUT_HELLO, UnderWay

ENDED = 40
"""Streams that a host sees end before it takes a new identity: it is refused from the fifth on."""
SESSIONS = 10
"""Sessions of an identity that comes for these alone."""
SILENT, STREAMS = 300, 8
"""TCP connections that say nothing, and streams of each identity that say nothing or read slowly."""
PAUSE_S, READ_S = 0.02, 1.0
BITE = 4096
"""Bytes that a slow download takes each READ_S."""
CYCLE_S = 25.0
"""Seconds from one claim and farewell to the next."""
LIST = 500
"""Ids of a list in a message that is as long as the run allows."""


class Attacker:
    """One of ten: `number` from 0 on."""

    def __init__(self, number: int, place: Address, run: RunDirectory, folder: Path) -> None:
        self._number = number
        self._place = place
        assert place.socket is not None
        self._where = place.socket
        self._manifest = run.manifest
        self._run = run.run_id
        self._checkpoints = run.checkpoints
        self._folder = folder
        self._serial = itertools.count()
        hello = m.Hello(run="0" * 32, incarnation=1, held=_held(len(run.manifest.blocks)))
        self._first = [m.encode(message) for message in (_sealed(1, *[58_000] * 5), _sealed(1, 400), hello)]
        self._ended = 0
        """Streams of this identity that the other side ended."""
        self.node: Host | None = None
        self.counts = Counter[str]()

    async def appear(self) -> Host:
        """A node with an identity that nobody knows, instead of the one before."""
        await self.leave()
        identity = Identity.create(self._folder / f"attacker-{self._number}-{next(self._serial)}.key")
        self.node = await Host.start(self._place, self._where[0], identity)
        self._ended = 0
        self.counts["identities"] += 1
        return self.node

    async def leave(self) -> None:
        """No node from now on."""
        if self.node is not None:
            node, self.node = self.node, None
            await node.close()

    async def go_on(self, attack: Callable[[Host], Awaitable[None]]) -> None:
        """Attack for ever, with one identity after another. Never returns."""
        while True:
            if self.node is None or self._ended >= ENDED:
                with contextlib.suppress(LocalError, RemoteError):
                    await self.appear()
            if self.node is not None:
                try:
                    await attack(self.node)
                except (RemoteError, TimeoutError):
                    self._ended += 1
                    self.counts["ended"] += 1
            await asyncio.sleep(PAUSE_S)

    # ── before a Hello ──────────────────────────────────────────────────────────────────────────────────────

    async def _begins_with(self, node: Host, message: bytes) -> None:
        """A session whose first frame is `message`, and whatever follows."""
        key = f"{self._number} {next(self._serial)}"
        async with asyncio.timeout(ANSWER_S), await node.open(self._place.peer_id, CONTROL_PROTOCOL) as one:
            await one.send({"key": key, "has": 0, "begun": False})
            self._sent(len(message))
            await one.send({"n": 1, "a": 0, "m": {}}, message)
            while True:
                await one.receive()
                await one.skip()

    def _sent(self, nbytes: int) -> None:
        self.counts["frames"] += 1
        self.counts["bytes"] += nbytes

    async def expensive_first(self, node: Host) -> None:
        """A message of a MiB, one as long as a Hello, and a long Hello for a run that is none."""
        await self._begins_with(node, self._first[next(self._serial) % len(self._first)])

    async def evidence_first(self, node: Host) -> None:
        """A line of evidence before any Hello."""
        record = {"kind": "boast", "run": self._run, "peer": node.peer_id, "x": "x" * 3000}
        line = sign_event(record, node.identity)
        await self._begins_with(node, m.encode(m.EventLine(line=line)))

    async def silent_sessions(self, node: Host) -> None:
        """Sessions without a Hello, and a new identity after ten of them."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SESSIONS):
                tasks.create_task(self._opens(node))
        self._ended = ENDED

    async def _opens(self, node: Host) -> None:
        with contextlib.suppress(RemoteError, TimeoutError):
            async with await node.open(self._place.peer_id, CONTROL_PROTOCOL) as one:
                await one.send({"key": f"{next(self._serial)}", "has": 0, "begun": False})
                self.counts["sessions"] += 1
                await one.receive(timeout_s=2.0)

    # ── streams and connections ─────────────────────────────────────────────────────────────────────────────

    async def slow_downloads(self, node: Host) -> None:
        """Every state and file that there is, a few bytes at a time."""
        blocks = self._manifest.blocks
        versions = sorted({int(path.name[1:9]) for path in self._checkpoints.glob("v*")}, reverse=True)
        names = [state_name(0, version, block.index) for version in [*versions, 0] for block in blocks]
        waiting = itertools.cycle([*names, *(f"file/{block.graph.blake3}" for block in blocks)])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(self._take_slowly(node, waiting))

    async def _take_slowly(self, node: Host, names: Any) -> None:
        for name in names:
            with contextlib.suppress(RemoteError, TimeoutError):
                async with await node.open(self._place.peer_id, FILES) as stream:
                    await stream.send({"want": name})
                    head = await stream.receive(payload_limit=1 << 30, timeout_s=ANSWER_S)
                    left = head.payload_length
                    self.counts["downloads"] += bool(left)
                    while left:
                        taken = min(left, BITE)
                        await stream._wire.read_into(memoryview(bytearray(taken)))
                        left -= taken
                        await asyncio.sleep(READ_S)
            await asyncio.sleep(PAUSE_S)

    async def hoard_connections(self, node: Host) -> None:
        """TCP connections and streams that say nothing, opened again when they are closed."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SILENT):
                tasks.create_task(self._says_nothing())
            for protocol in (CONTROL_PROTOCOL, FILES):
                for _ in range(STREAMS):
                    tasks.create_task(self._opens_silently(node, protocol))

    async def _says_nothing(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError), socket.socket() as one:
                one.setblocking(False)
                await loop.sock_connect(one, self._where)
                self.counts["connections"] += 1
                while await loop.sock_recv(one, 4096):
                    pass
            await asyncio.sleep(READ_S)

    async def _opens_silently(self, node: Host, protocol: str) -> None:
        while True:
            with contextlib.suppress(RemoteError):
                async with await node.open(self._place.peer_id, protocol) as one:
                    self.counts["streams"] += 1
                    await one.receive()
            await asyncio.sleep(READ_S)

    # ── after a Hello ───────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def _session(self, node: Host) -> AsyncIterator[Session]:
        """A session that was let in. Raises `RemoteError` or TimeoutError if it was not."""
        number = next(self._serial)
        one = Session(node, self._place, f"{self._number} {number}")
        try:
            one.say(
                m.Hello(run=self._run, incarnation=number + 1, memory_bytes=1 << 40, flops_per_second=1e12)
            )
            await one.reached(one.welcomed.wait())
            self.counts["sessions"] += 1
            yield one
        finally:
            await one.close()

    async def expensive(self, node: Host) -> None:
        """The longest valid messages that the run allows, as fast as they are read."""
        longest = message_bounds(self._manifest).most(0)["sealed"]
        sealed = _sealed(1, *[LIST] * ((longest - 200) // (3 * LIST)))
        async with self._session(node) as one:
            assert one.welcome is not None
            of_run = sealed.model_copy(update={"line": one.welcome.line, "step": one.welcome.version + 1})
            for number in itertools.count():
                for _ in range(16):
                    self._sent(one.say(of_run.model_copy(update={"slot": number})))
                await one.reached(one.channel.drained())

    async def evidence(self, node: Host) -> None:
        """Signed lines of kinds that are none, and about steps that this peer was not in."""
        common = {"run": self._run, "peer": node.peer_id, "view": 0, "step": 1}
        boast = {"kind": "boast", **common, "x": "x" * 3000}
        leftover = {"kind": "leftover", **common, "border": 0, "sender": node.peer_id, "ids": [0]}
        lines = [
            sign_event(record | {"step": n}, node.identity) for record in (boast, leftover) for n in range(8)
        ]
        async with self._session(node) as one:
            while True:
                for line in lines:
                    self._sent(one.say(m.EventLine(line=line)))
                await one.reached(one.channel.drained())

    async def sessions(self, node: Host) -> None:
        """Sessions that claim a place and break off, and a new identity after ten of them."""
        for _ in range(SESSIONS):
            async with self._session(node) as one:
                await self._claims(one)
        self._ended = ENDED

    async def come_and_go(self, node: Host) -> None:
        """A claim and a farewell every CYCLE_S."""
        await asyncio.sleep((self._number % 2) * CYCLE_S / 2)
        while True:
            async with self._session(node) as one:
                await self._claims(one)
                await one.reached(one.granted.wait())
                self.counts["claims"] += 1
                one.say(m.Farewell())
                with contextlib.suppress(RemoteError):  # the coordinator ends the session
                    await one.reached(one.channel.drained())
            await asyncio.sleep(CYCLE_S)

    async def _claims(self, one: Session) -> None:
        assert one.welcome is not None
        place = next((place for place in one.welcome.places if place.open), None)
        if place is not None:
            one.say(m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))


def _held(blocks: int) -> tuple[m.Held, ...]:
    return tuple(m.Held(block=block, version=1, digest="0" * 64) for block in range(blocks))


def _sealed(version: int, *lists: int) -> m.Sealed:
    """A valid message with lists of so many ids, each of about three bytes."""
    contents = tuple(m.Contents(begin=0, end=1, ids=tuple(range(300, 300 + ids))) for ids in lists)
    return m.Sealed(line=m.TermView(term=1, view=0), step=version + 1, slot=0, contents=contents)


def attacks_of(name: str, ten: Sequence[Attacker]) -> list[Callable[[Host], Awaitable[None]]]:
    """What each of the ten does in the attack called `name`; none in any other."""
    a, b, c, d, e, f, g, h, i, j = ten
    if name == WITHOUT_HELLO.name:
        expensive = [a.expensive_first, b.expensive_first, c.expensive_first]
        evidence, sessions = [d.evidence_first, e.evidence_first], [i.silent_sessions, j.silent_sessions]
    elif name == WITH_HELLO.name:
        expensive, evidence = [a.expensive, b.expensive, c.sessions], [d.evidence, e.evidence]
        sessions = [i.come_and_go, j.come_and_go]
    else:
        return []
    return [*expensive, *evidence, f.slow_downloads, g.slow_downloads, h.hoard_connections, *sessions]


async def attack(ten: Sequence[Attacker], under_way: Callable[[], str], counts: Path) -> None:
    """Do what is under way, until that is something else. Never returns."""
    while True:
        name = under_way()
        doing = [
            asyncio.ensure_future(one.go_on(what))
            for one, what in zip(ten, attacks_of(name, ten), strict=False)
        ]
        while under_way() == name:
            await asyncio.sleep(LOOK_S)
            broken = [task for task in doing if task.done()]
            for task in broken:
                task.result()
            total = sum((one.counts for one in ten), Counter[str]())
            counts.write_text(json.dumps(dict(total)))
        for task in doing:
            task.cancel()
        if doing:
            await asyncio.wait(doing)
        await asyncio.gather(*(one.leave() for one in ten))


async def main(arguments: Sequence[str]) -> None:
    """Start ten nodes, say that they are up, and attack."""
    address, run, folder = arguments
    of = RunDirectory.open(Path(run))
    ten = [Attacker(number, parse_address(address), of, Path(folder)) for number in range(10)]
    print("up", flush=True)
    await attack(ten, UnderWay.told(), Path(folder) / "counts.json")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
