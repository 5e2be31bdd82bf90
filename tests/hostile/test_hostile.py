"""A stranger that talks nonsense to everybody while they train: it costs it its streams, and nobody else
anything.
"""

import asyncio
import math
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import StepId
from hetpeer.averaging.member.tensor_heads import ActivationHead
from hetpeer.averaging.messages import CONTROL_PROTOCOL
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.bootstrap.service.rate_limit import SESSIONS
from hetpeer.bootstrap.storage.file_service import PROTOCOL as FILES
from hetpeer.bootstrap.storage.file_service import fetch
from hetpeer.dht.base.errors import PeerLostError, RemoteError
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.frame import encode_head
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.transport.data_plane import TENSORS
from hetpeer.peer.transport.uplink import ACTIVATIONS
from hetpeer.stages.pipeline.routes import Hop
from tests.hostile.stranger import PAUSE_S, Stranger
from tests.swarm.child import Child
from tests.swarm.conftest import STEPS
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]
OPENING = {"key": "stranger", "has": 0, "begun": False}
SOON_S = 60.0
"""What takes a moment, on a machine that has other things to do."""


async def hung_up(node: Node, peer: str, protocol: str, *frames: tuple[dict[str, Any], bytes]) -> bool:
    """Send frames on a stream of its own. Whether the other side ended it soon."""
    try:
        async with asyncio.timeout(SOON_S), await node.open(peer, protocol) as stream:
            for header, payload in frames:
                await stream.send(header, payload)
            while True:
                await stream.receive()
                await stream.skip()
    except TimeoutError:
        return False
    except RemoteError:
        return True


def tensor(peer: str, *, block: int, payload: bytes, coded: Any = None) -> tuple[dict[str, Any], bytes]:
    """An activation that claims to be of the step after next."""
    step = StepId(m.TermView(term=1, view=0), 1000, batch=1000)
    head = ActivationHead(
        line=step.line,
        step=step.number,
        incarnation=1,
        id=0,
        batch=step.batch,
        route=(Hop(peer, block, 6),),
        attempt=0,
    )
    return {"n": 1, "a": 0, "m": head.model_dump() | {"coded": coded}}, payload


async def test_a_stranger_talks_nonsense(swarm: Swarm, tmp_path: Path) -> None:
    bootstrap = await swarm.bootstrap()
    config = NodeConfig(peers=(parse_address(swarm.address),))
    node = await Node.start(config, Identity.create(tmp_path / "stranger.key"))
    volunteers = [swarm.volunteer(name) for name in "ab"]  # last: twenty steps take three seconds
    coordinator = swarm.run.manifest.coordinators[0]
    try:
        await swarm.committed(1)
        worker = volunteers[0].helpers()["worker"]
        worker.suspend()  # the run does not end before all has been said once
        await disturb_coordinator(node, coordinator)
        async with asyncio.TaskGroup() as tasks:
            for volunteer in volunteers:
                tasks.create_task(disturb_volunteer(node, volunteer))
        for peer in (coordinator, *(v.peer_id for v in volunteers)):
            await disturb_files(node, peer)
        worker.resume()
        while swarm.version < STEPS:
            await hung_up(
                node, coordinator, CONTROL_PROTOCOL, (OPENING, b""), ({"n": 1, "a": 0, "m": {}}, b"\x01")
            )
            await asyncio.sleep(PAUSE_S)
        await swarm.finished(bootstrap, *volunteers)
    finally:
        await node.close()
    swarm.exact()


@pytest.mark.proof
async def test_a_stranger_that_is_early_and_begins_sessions_without_end(swarm: Swarm, tmp_path: Path) -> None:
    """While everybody trains; it takes part in nothing, and what it leaves in the log is little."""
    bootstrap = await swarm.bootstrap()
    place = parse_address(swarm.address)
    node = await Node.start(NodeConfig(peers=(place,)), Identity.create(tmp_path / "stranger.key"))
    stranger = Stranger(node, "127.0.0.1", place, swarm.run.run_id, tmp_path)
    try:
        volunteers = [swarm.volunteer(name) for name in "ab"]
        await swarm.committed(1)
        attacks = [asyncio.create_task(attack()) for attack in (stranger.early, stranger.sessions)]
        await swarm.finished(bootstrap, *volunteers)
        assert not any(attack.done() for attack in attacks)
        for attack in attacks:
            attack.cancel()
        await asyncio.wait(attacks)
    finally:
        await node.close()
    theirs = [record for record in swarm.records("gone") if record["peer"] == node.peer_id]
    assert len(theirs) <= SESSIONS[1] + 100 * SESSIONS[0]
    swarm.exact()


async def with_liar(swarm: Swarm, wrong: str) -> tuple[list[Child], Child]:
    """The bootstrap node and three honest volunteers for two places, and one that is `wrong`, which comes
    first.
    """
    bootstrap = await swarm.bootstrap()
    liar = swarm.volunteer("liar", before=wrong)
    await liar.blocks()  # or the run might be over before it has come
    return [bootstrap, *map(swarm.volunteer, "abc")], liar


@pytest.mark.proof
async def test_who_sends_rubbish_for_ever_is_gone_around(swarm: Swarm) -> None:
    """In the place of somebody honest: nothing halts, and the rest of the run is trained without it."""
    (bootstrap, *honest), liar = await with_liar(swarm, "sends_nan_for_ever")
    await swarm.finished(bootstrap, *honest, within_s=300.0)
    said = "".join(one.said for one in honest)
    assert "(not finite)" in said
    assert set(re.findall(r"(\w+) is refused for", said)) <= {liar.peer_id[-6:]}
    swarm.exact()


@pytest.mark.proof
async def test_whose_part_of_a_sum_is_none_is_named_and_others_add_up(swarm: Swarm) -> None:
    (bootstrap, *honest), liar = await with_liar(swarm, "sends_nan_parameters")
    await swarm.finished(bootstrap, *honest, liar, within_s=300.0)
    (named,) = swarm.records("quarrel")
    assert named["why"].startswith(f"what {liar.peer_id} sent of block ")
    assert named["why"].endswith("its gradients are not finite")
    swarm.exact()


@pytest.mark.proof
async def test_bundles_that_cannot_be_read(swarm: Swarm) -> None:
    """Noise instead of an encoded bundle: dropped and counted, and the coordinator hears of it at once: it
    need not get impatient.
    """
    links = LinkSettings(codec="topk-int8", ratio=12.0, adaptive=False)
    training = swarm.run.manifest.training.model_copy(update={"steps": 6})
    swarm.run = resign(swarm.run, links=links, training=training)
    bootstrap = await swarm.bootstrap(before="never_impatient")
    volunteers = [swarm.volunteer("a", before="sends_garbage"), swarm.volunteer("b")]
    await swarm.finished(bootstrap, *volunteers, within_s=300.0)
    assert "(unreadable)" in volunteers[1].said
    assert audit(swarm.run.path).ok


async def disturb_coordinator(node: Node, peer: str) -> None:
    """Five streams that carry what is no message."""
    unknown = m.encode(m.Heartbeat()).replace(b"heartbeat", b"heartbeet")
    for frame in (
        ({}, b""),
        ({"n": 1, "a": 0, "m": {}}, b"\x00" * 100),
        ({"n": 1, "a": 0, "m": {}}, unknown),
        ({"n": 1, "a": 0, "m": {}}, os.urandom(2 << 20)),
        ({"n": -1, "a": "x", "m": 7}, b""),
    ):
        assert await hung_up(node, peer, CONTROL_PROTOCOL, (OPENING, b""), frame)


async def disturb_volunteer(node: Node, volunteer: Child) -> None:
    """A tensor of every wrong kind for a block that is held there; a channel without a name; bytes in drops.

    Each is counted by its name; after that the stranger is not listened to, and all of it costs next to no
    memory.
    """
    peer, block = volunteer.peer_id, (await volunteer.blocks())[1]
    before = psutil.Process(volunteer.pid).memory_info().rss
    dripping = asyncio.create_task(drips(node, peer))
    short = tensor(peer, block=block, payload=b"\x7f" * 60)
    encoded = tensor(peer, block=block, payload=b"", coded={"codec": "topk-int8", "written": []})
    spendthrift = ({**short[0], "s": [[ACTIVATIONS, 1 << 40]]}, b"")
    for frame in (short, encoded, spendthrift):
        assert await hung_up(node, peer, TENSORS, (OPENING, b""), frame)
    assert await hung_up(node, peer, TENSORS, ({"key": 5}, b""))
    assert await dripping <= 2 * SOON_S
    for kind in ("length", "codec", "flood", "malformed", "drip"):
        await volunteer.says(f"({kind})", SOON_S)
    await volunteer.says("is refused for 60 s", SOON_S)
    for _ in range(50):
        assert await hung_up(
            node, peer, TENSORS, (OPENING, b""), tensor(peer, block=block, payload=b"x" * (1 << 20))
        )
    assert psutil.Process(volunteer.pid).memory_info().rss - before <= 64 << 20


async def drips(node: Node, peer: str) -> float:
    """Send a head byte by byte; seconds until the other side has had enough."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    stream = await node.open(peer, TENSORS)
    try:
        for byte in encode_head(OPENING | {"key": "stranger" * 40}, 0):  # it would take minutes
            await stream._wire.write([bytes([byte])])
            await asyncio.sleep(0.7)
    except PeerLostError:
        return loop.time() - began
    finally:
        stream.abort()
    return math.inf


async def disturb_files(node: Node, peer: str) -> None:
    """Names that nobody has, and bytes that are no frame."""
    assert await hung_up(node, peer, FILES, ({"want": 7}, b""))
    for name in ("../../identity.key", "file/" + "0" * 64, "state/99999/0"):
        with pytest.raises(RemoteError) as error:
            await fetch(node, peer, name, 1 << 20)
        assert error.value.code in ("HP-SYNC-002", "HP-NET-010")
    with pytest.raises(PeerLostError):
        await speak_http(await node.open(peer, FILES))


async def speak_http(stream: Stream) -> None:
    """Who refuses us may have closed it before the first byte."""
    await stream._wire.write([b"GET / HTTP/1.1\r\n\r\n" * 50])
    await stream.receive(timeout_s=10.0)
