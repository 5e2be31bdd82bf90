"""Real p2pd processes on loopback: joining, streams, signed records, restarts, and errors in plain words."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hivemind.proto.dht_pb2 import NodeInfo

from hetpeer.dht.base.errors import ExitCode, LocalError, PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import Clock, SystemClock
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.kademlia import first_contact, table
from hetpeer.dht.kademlia.first_contact import GREETINGS, MAX_CLOCK_OFFSET_S
from hetpeer.dht.kademlia.network_session import NetworkSession
from hetpeer.dht.node import session_upkeep
from hetpeer.dht.node.contacts import MAX_ASKED, Contacts
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd.p2pd_control import LATELY_S, P2pdControl
from hetpeer.dht.streams.stream import Stream
from tests.dht.peer_process import ECHO, RUN_ID, ChildPeer
from tests.dht.test_channel import until

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.xdist_group("dht-network"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def child(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChildPeer]:
    async with ChildPeer(tmp_path_factory.mktemp("child") / "identity") as peer:
        yield peer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(child: ChildPeer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    identity = Identity.create(tmp_path_factory.mktemp("node") / "identity")
    started = await Node.start(joining(child), identity)
    yield started
    await started.close()


def joining(*peers: ChildPeer | Node | str, port: int = 0) -> NodeConfig:
    texts = [
        peer
        if isinstance(peer, str)
        else peer.report["addresses"][0]
        if isinstance(peer, ChildPeer)
        else peer.addresses()[0]
        for peer in peers
    ]
    return NodeConfig(port=port, peers=tuple(map(parse_address, texts)))


async def failure(config: NodeConfig, identity: Identity, clock: Clock | None = None) -> LocalError:
    """The error with which a node refuses to start."""
    try:
        node = await Node.start(config, identity, clock=clock)
    except LocalError as error:
        return error
    await node.close()
    pytest.fail("the node started")


async def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


async def ask_echo(node: Node, peer_id: str, data: bytes) -> bytes:
    async with await node.open(peer_id, ECHO) as stream:
        await stream.send({"n": 1}, data)
        frame = await stream.receive(timeout_s=100)
        answer = await stream.receive_bytes(64 << 20, timeout_s=100)
        assert frame.header == {"sha256": hashlib.sha256(data).digest(), "asked": {"n": 1}}
    return bytes(answer)


async def test_four_mebibytes_over_a_stream_arrive_whole_both_ways(child: ChildPeer, node: Node) -> None:
    data = secrets.token_bytes(4 << 20)
    assert await ask_echo(node, child.report["peer_id"], data) == data


async def test_a_node_can_open_a_stream_to_itself(node: Node) -> None:
    async def name_the_caller(stream) -> None:
        await stream.receive(timeout_s=5)
        await stream.send({"caller": stream.peer_id})

    await node.serve("test/1/who", name_the_caller)
    async with await node.open(node.peer_id, "test/1/who") as stream:
        await stream.send({})
        assert (await stream.receive(timeout_s=5)).header == {"caller": node.peer_id}


@pytest.mark.parametrize("limited", ["up", "down"])
async def test_a_nodes_rate_holds_to_others_and_not_to_itself(
    child: ChildPeer, node: Node, limited: str
) -> None:
    """Ten seconds and more of a slow line: nobody is taken for one that drips."""
    data, rate = secrets.token_bytes(440_000), 40_000.0
    way = getattr(node.listener.throttle, limited)
    before = node.listener.throttle.up.nbytes, node.listener.throttle.down.nbytes
    way.limit(rate)
    try:
        began = time.monotonic()
        asking = asyncio.create_task(ask_echo(node, child.report["peer_id"], data))
        await test_a_node_can_open_a_stream_to_itself(node)
        assert not asking.done()
        assert await asking == data
        assert time.monotonic() - began > len(data) / rate - 0.5
    finally:
        way.limit(float("inf"))
    up, down = (
        now - then
        for now, then in zip(
            (node.listener.throttle.up.nbytes, node.listener.throttle.down.nbytes), before, strict=True
        )
    )
    assert len(data) <= up < 1.01 * len(data)
    assert len(data) <= down < 1.01 * len(data)


async def test_the_remote_id_of_a_stream_is_the_one_of_its_key(
    child: ChildPeer, node: Node, tmp_path: Path
) -> None:
    """Also shows that a third peer finds another one by id alone, through the peer both joined by."""
    callers: asyncio.Queue[str] = asyncio.Queue()

    async def note_the_caller(stream) -> None:
        callers.put_nowait(stream.peer_id)

    await node.serve("test/1/note", note_the_caller)
    third = await Node.start(joining(child), Identity.create(tmp_path / "third"))
    try:
        await third.open(node.peer_id, "test/1/note", timeout_s=20)
        assert await asyncio.wait_for(callers.get(), 30) == third.peer_id
    finally:
        await third.close()


async def test_a_record_signed_by_one_process_is_read_by_another(child: ChildPeer, node: Node) -> None:
    roster = Roster(node, RUN_ID)
    assert await roster.publish(Advert(name="node", step=7))
    adverts = await roster.read()
    assert adverts[child.report["peer_id"]].name == "child"
    assert adverts[node.peer_id] == Advert(name="node", step=7)


async def test_a_peer_without_our_rule_can_neither_wipe_nor_forge_nor_pin_records(
    child: ChildPeer, node: Node, tmp_path: Path
) -> None:
    roster = Roster(node, RUN_ID)
    assert await roster.publish(Advert(name="honest"))
    key = roster._key(node.peer_id)
    attacker = await Node.start(joining(child, node), Identity.create(tmp_path / "attacker"))
    try:
        dht = (await attacker.session()).dht
        now = time.time()
        dht.protocol.record_validator = None
        await dht.store(key, b"wiped", now + 100)
        await dht.store(key, {"name": "forged"}, now + 100, subkey=node.peer_id)
        await dht.store(key, {"name": "pinned"}, now + 1e9, subkey=attacker.peer_id)
    finally:
        await attacker.close()
    adverts = await roster.read()
    assert adverts[node.peer_id].name == "honest"
    assert attacker.peer_id not in adverts


async def test_opening_a_protocol_nobody_serves_fails_at_once(child: ChildPeer, node: Node) -> None:
    with pytest.raises(PeerLostError) as caught:
        await node.open(child.report["peer_id"], "test/1/nobody", timeout_s=20)
    assert "protocols not supported" in caught.value.why
    assert caught.value.line().startswith(f"HP-NET-010: lost peer {child.report['peer_id']}; why: ")


async def test_opening_a_stream_to_an_unknown_peer_ends_in_time(node: Node) -> None:
    before = time.monotonic()
    with pytest.raises(PeerLostError):
        await node.open("QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC", ECHO, timeout_s=2)
    assert time.monotonic() - before < 20


async def test_a_handler_that_gets_garbage_ends_alone(child: ChildPeer, node: Node) -> None:
    async with await node.open(child.report["peer_id"], ECHO) as stream:
        await stream._wire.write([b"GET / HTTP/1.1\r\n\r\n"])
        with pytest.raises(PeerLostError):
            await stream.receive(timeout_s=5)
    assert await ask_echo(node, child.report["peer_id"], b"still here") == b"still here"


async def test_a_payload_over_the_receivers_limit_is_refused_unread(node: Node) -> None:
    refusals: asyncio.Queue[ProtocolError] = asyncio.Queue()

    async def take_little(stream) -> None:
        try:
            await stream.receive(payload_limit=10, timeout_s=5)
        except ProtocolError as error:
            refusals.put_nowait(error)

    await node.serve("test/1/little", take_little)
    async with await node.open(node.peer_id, "test/1/little") as stream:
        await stream.send({}, bytes(11))
        assert (await asyncio.wait_for(refusals.get(), 30)).peer == node.peer_id


async def test_killing_the_process_leaves_no_p2pd(tmp_path: Path) -> None:
    async with ChildPeer(tmp_path / "identity") as peer:
        assert psutil.Process(peer.report["p2pd"]).name() == "p2pd"
        peer.process.kill()
        assert await gone(peer.report["p2pd"], within_s=30)


async def test_a_killed_p2pd_comes_back_with_its_id_port_handlers_and_records(
    child: ChildPeer, node: Node, tmp_path: Path
) -> None:
    await node.serve(ECHO, _answer_once)
    roster = Roster(node, RUN_ID)
    assert await roster.publish(Advert(name="survivor"))
    old_pid, old_addresses = node.p2pd_pid, node.addresses()
    assert old_pid is not None
    os.kill(old_pid, signal.SIGKILL)
    await until(lambda: not node.is_up, 20)
    await until(lambda: node.is_up, 50)
    assert node.p2pd_pid not in (old_pid, None)
    assert node.addresses() == old_addresses
    other = await Node.start(joining(child, node), Identity.create(tmp_path / "other"))
    try:
        async with await other.open(node.peer_id, ECHO) as stream:
            await stream.send({"n": 2})
            assert (await stream.receive(timeout_s=5)).header == {"ok": True}
        assert (await Roster(other, RUN_ID).read())[node.peer_id].name == "survivor"
    finally:
        await other.close()
    assert node.restarts >= 1


async def test_a_p2pd_killed_again_while_it_restarts_comes_back_too(node: Node) -> None:
    def own_p2pds() -> list[psutil.Process]:
        return [process for process in psutil.Process().children() if process.name() == "p2pd"]

    first = node.p2pd_pid
    assert [process.pid for process in own_p2pds()] == [first]
    os.kill(first, signal.SIGKILL)
    await until(lambda: not node.is_up, 20)
    async with asyncio.timeout(100):
        while not (second := [process for process in own_p2pds() if process.pid != first]):
            await asyncio.sleep(0.01)
        second[0].kill()
        while not node.is_up or node.p2pd_pid in (first, second[0].pid):
            await asyncio.sleep(0.01)
    assert [process.pid for process in own_p2pds()] == [node.p2pd_pid]


async def test_a_ping_fails_unheard(child: ChildPeer, tmp_path: Path) -> None:
    """Of a peer that answers with an id that is too long for one, and by a session that was closed
    meanwhile.
    """
    node = await Node.start(joining(child), Identity.create(tmp_path / "identity"))
    other = await Node.start(joining(child), Identity.create(tmp_path / "other"))
    try:
        await node.connect(parse_address(other.addresses()[0]))
        session, protocol = await node.session(), (await other.session()).dht.protocol
        protocol.node_info = NodeInfo(node_id=b"\xff" * 21)
        await session.ping(other.peer_id)
        await session.close()
        await session.ping(child.report["peer_id"])
    finally:
        await other.close()
        await node.close()


async def test_known_peers_are_tended_again_after_a_failure_that_nobody_foresaw(
    child: ChildPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_upkeep, "TEND_PERIOD_S", 0.02)
    node = await Node.start(joining(child), Identity.create(tmp_path / "identity"))
    tend, looks = node._sessions.tend, 0

    async def fails_first(session: NetworkSession) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise AssertionError("unforeseen")
        await tend(session)

    monkeypatch.setattr(node._sessions, "tend", fails_first)
    try:
        async with asyncio.timeout(60):
            while looks < 3:
                await asyncio.sleep(0.01)
    finally:
        await node.close()


async def test_who_has_hung_up_already_is_no_sign_that_p2pd_is_dead(
    child: ChildPeer, node: Node, tmp_path: Path
) -> None:
    """Nor are many such peers asked for at a time; those who are there are noted all the same."""
    visitors = [Identity.create(tmp_path / str(number)).peer_id for number in range(MAX_ASKED + 1)]
    asked: list[str] = []

    class WithVisitors(P2pdControl):
        async def connections(self) -> list[tuple[str, str]]:
            return [*((peer, "/ip4/192.0.2.1/tcp/1") for peer in visitors), *here]

        async def addresses_of(self, peer_id: str) -> list[Address]:
            asked.append(peer_id)
            return await super().addresses_of(peer_id)

    session, contacts = copy.copy(await node.session()), Contacts([], node.identity)
    here = await session.control.connections()
    session.control = WithVisitors(session.control.path)
    await contacts.tend(session)
    assert len(asked) == MAX_ASKED
    await contacts.tend(session)
    assert len(asked) == len(set(asked))
    assert set(asked) == {*visitors, *(peer for peer, _ in here)}
    assert contacts._met.keys() == {peer for peer, _ in here} >= {child.report["peer_id"]}


async def test_peers_are_asked_for_once_in_a_burst_and_those_not_seen_again(
    child: ChildPeer, node: Node
) -> None:
    asked = 0

    class Counting(P2pdControl):
        async def _ask(self, request: Any, timeout_s: float) -> Any:
            nonlocal asked
            asked += 1
            return await super()._ask(request, timeout_s)

    control = Counting((await node.session()).control.path)
    for _ in range(5):
        assert await control.connected_lately(child.report["peer_id"])
    assert asked == 1
    for times in (2, 3):
        assert not await control.connected_lately(node.peer_id)
        assert asked == times, "it may have come meanwhile"
    control._connected_at -= LATELY_S
    assert await control.connected_lately(child.report["peer_id"])
    assert asked == 4


async def _answer_once(stream) -> None:
    await stream.receive(timeout_s=5)
    await stream.send({"ok": True})


async def test_closing_a_node_takes_little_time_and_leaves_nothing(child: ChildPeer, tmp_path: Path) -> None:
    node = await Node.start(joining(child), Identity.create(tmp_path / "identity"))
    folders = [Path(node.listener.path).parent, Path((await node.session()).control.path).parent]
    pid = node.p2pd_pid
    async with await node.open(child.report["peer_id"], ECHO):
        before = time.monotonic()
        await node.close()
        assert time.monotonic() - before < 30
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not any(folder.exists() for folder in folders)
    assert not node._tasks._tasks
    await node.close()


async def test_a_taken_port_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        error = await failure(NodeConfig(port=port), Identity.create(tmp_path / "identity"))
    assert (error.code, error.exit_code) == ("HP-NET-001", ExitCode.NETWORK)
    assert f"port {port}" in error.what
    assert f"process {os.getpid()}" in error.why


async def test_a_place_that_is_not_this_machines_is_no_taken_port(tmp_path: Path) -> None:
    error = await failure(NodeConfig(host="192.0.2.7", port=4001), Identity.create(tmp_path / "identity"))
    assert (error.code, error.exit_code) == ("HP-NET-001", ExitCode.NETWORK)
    assert "--host" in error.fix


async def test_without_a_folder_for_its_socket_p2pd_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))  # what TMPDIR said when Python looked
    error = await failure(NodeConfig(), Identity.create(tmp_path / "identity"))
    assert (error.code, error.exit_code) == ("HP-NET-003", ExitCode.NETWORK)
    assert "Not a directory" in error.why


async def test_a_p2pd_that_is_not_there_refuses_every_request(tmp_path: Path) -> None:
    with pytest.raises(RemoteError) as caught:
        await P2pdControl(str(tmp_path / "p2pd.sock")).own_addresses()
    assert caught.value.code == "HP-NET-011"
    assert "it does not answer: No such file or directory" in caught.value.line()


async def test_a_dht_that_does_not_answer_is_not_waited_for(
    child: ChildPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await Node.start(joining(child), Identity.create(tmp_path / "identity"))
    assert node.p2pd_pid is not None
    os.kill(node.p2pd_pid, signal.SIGSTOP)
    await until(lambda: psutil.Process(node.p2pd_pid).status() == psutil.STATUS_STOPPED)
    monkeypatch.setattr(table, "DEADLINE_S", 0.5)
    try:
        with pytest.raises(RemoteError) as caught:
            await Roster(node, RUN_ID).read()
    finally:
        os.kill(node.p2pd_pid, signal.SIGCONT)
        await node.close()
    assert caught.value.line().startswith("HP-NET-012: the DHT did not answer within")


async def test_a_dead_bootstrap_is_named_and_said_to_refuse(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    error = await failure(joining(address), Identity.create(tmp_path / "identity"))
    assert (error.code, error.exit_code) == ("HP-NET-002", ExitCode.NETWORK)
    assert address in error.why
    assert "refused" in error.why


async def test_a_stream_that_breaks_at_the_first_word_is_no_reason_to_give_up(
    node: Node, tmp_path: Path
) -> None:
    handlers, broken = node.listener.handlers, []
    answer = handlers[first_contact.PROTOCOL]

    async def breaks(stream: Stream) -> None:
        if len(broken) < GREETINGS - 1:
            broken.append(stream.peer_id)
            return
        await answer(stream)

    handlers[first_contact.PROTOCOL] = breaks
    try:
        other = await Node.start(joining(node), Identity.create(tmp_path / "identity"))
        await other.close()
    finally:
        handlers[first_contact.PROTOCOL] = answer
    assert broken == [other.peer_id] * (GREETINGS - 1)


async def test_an_address_with_anothers_id_is_said_to_be_anothers(child: ChildPeer, tmp_path: Path) -> None:
    right = parse_address(child.report["addresses"][0])
    wrong = f"{right.transport}/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    error = await failure(joining(wrong), Identity.create(tmp_path / "identity"))
    assert error.code == "HP-NET-002"
    assert "another peer listens there" in error.why


async def test_one_live_peer_among_dead_ones_is_enough(child: ChildPeer, tmp_path: Path) -> None:
    dead = "/ip4/127.0.0.1/tcp/9/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
    node = await Node.start(joining(dead, child), Identity.create(tmp_path / "identity"))
    try:
        assert await ask_echo(node, child.report["peer_id"], b"x") == b"x"
    finally:
        await node.close()


class ClockTenMinutesSlow(SystemClock):
    def wall(self) -> float:
        return super().wall() - 600


async def test_a_clock_ten_minutes_off_is_refused_in_plain_words(child: ChildPeer, tmp_path: Path) -> None:
    error = await failure(joining(child), Identity.create(tmp_path / "identity"), ClockTenMinutesSlow())
    assert (error.code, error.exit_code) == ("HP-NET-004", ExitCode.NETWORK)
    other = child.report["peer_id"]
    said = re.fullmatch(rf"this machine's clock is (\d+) s behind that of {other}", error.what)
    assert said is not None
    assert abs(int(said[1]) - 600) <= MAX_CLOCK_OFFSET_S
    assert "timedatectl set-ntp true" in error.fix


async def test_the_first_of_several_may_start_alone(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "identity")
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.create(tmp_path / 'other').peer_id}"
    node = await Node.start(dataclasses.replace(joining(dead), alone_ok=True), identity)
    assert node.is_up
    await node.close()


async def test_one_identity_file_serves_one_process(child: ChildPeer, node: Node) -> None:
    error = await failure(joining(child), Identity.load(node.identity.path))
    assert (error.code, error.exit_code) == ("HP-ID-002", ExitCode.IDENTITY)
    assert f"(pid {os.getpid()})" in error.what


async def test_a_copied_identity_is_found_out_by_the_peer_it_joins_by(
    child: ChildPeer, node: Node, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copy(node.identity.path, copy)
    error = await failure(joining(child), Identity.load(copy))
    assert (error.code, error.exit_code) == ("HP-ID-002", ExitCode.IDENTITY)
    assert child.report["peer_id"] in error.why
