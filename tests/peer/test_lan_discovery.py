"""Announcing and finding with the real library over this machine's loopback, also among those who say what
no peer says.
"""

import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from zeroconf import DNSOutgoing, DNSPointer, ServiceInfo, const
from zeroconf.asyncio import AsyncZeroconf

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival import lan_discovery
from hetpeer.peer.arrival.lan_discovery import MAX_HEARD, announce_forever, heard
from hetpeer.peer.arrival.lan_notices import SERVICE, Notice, chosen
from hetpeer.peer.cli.options import joined_by, need_lan

HOST = "127.0.0.1"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = await Node.start(NodeConfig(alone_ok=True), Identity.load_or_create(tmp_path / "identity.key"))
    yield node
    await node.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who answers is missed for being slow."""
    monkeypatch.setattr(lan_discovery, "HEAR_S", 60.0)
    monkeypatch.setattr(lan_discovery, "ASK_S", 60.0)


@contextlib.asynccontextmanager
async def announced(node: Node, run: str, name: str) -> AsyncIterator[None]:
    task = asyncio.create_task(announce_forever(node, HOST, run, name))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def fresh() -> str:
    """A run that no other test of this machine is in."""
    return secrets.token_hex(16)


async def of(run: str) -> list[Notice]:
    return [one for one in await heard(HOST, run) if one.run == run]


async def test_who_is_announced_is_found_and_not_when_it_has_left(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, began = fresh(), asyncio.get_running_loop().time()
    async with announced(node, run, "tiny\x1b[0m"):
        (found,) = await of(run)
    assert asyncio.get_running_loop().time() - began < 60.0, "it need not be waited for"
    (address,) = (place for place in node.addresses() if "/127.0.0.1/" in place)
    assert found == Notice(run, "tiny[0m", (parse_address(address),))
    assert chosen([found]).run == run
    monkeypatch.setattr(lan_discovery, "HEAR_S", 1.0)
    assert await of(run) == []
    with pytest.raises(LocalError, match="HP-NET-016"):
        chosen(await of(run), run)


def cry(name: str) -> None:
    """What the library itself would not send: a pointer to a service of any name, and a datagram that is
    none.
    """
    out = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
    out.add_answer_at_time(DNSPointer(SERVICE, const._TYPE_PTR, const._CLASS_IN, 120, name), 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(HOST))
        for datagram in (*out.packets(), b"\x00\x00\x84\x00\xff\xff\xff\xff" + bytes(range(256))):
            there.sendto(datagram, (const._MDNS_ADDR, const._MDNS_PORT))


async def test_among_strangers_who_say_anything(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty of them, for whom nobody waits: the run is found, and of the others nothing is left but what a
    peer may say.
    """
    run, other = fresh(), fresh()
    here = f"/ip4/127.0.0.1/tcp/9/p2p/{node.peer_id}"
    wrong = [
        {"v": "1", "run": run, "address": f"/dns4/tracker.example/tcp/1/p2p/{node.peer_id}"},
        {"v": "1", "run": run, "address": "/ip4/127.0.0.1/tcp/9"},
        {"v": "1", "run": f"{run[:-1]}\n", "address": here},
        {"v": b"\xff\x00", "run": run, "address": here},
        {},
        {"v": "1", "run": other, "name": "\x1b]0;owned\x07", "address": here},
    ]
    strangers = [
        ServiceInfo(
            SERVICE,
            f"{number} <b>.{SERVICE}",
            port=9,
            addresses=[socket.inet_aton(HOST)],
            properties=wrong[number % len(wrong)],
            server=f"stranger-{number}.local.",
        )
        for number in range(40)
    ]
    liar = AsyncZeroconf(interfaces=[HOST])
    try:
        async with announced(node, run, "tiny"):
            assert len(await of(run)) == 1, "and it is known to be there"
            saying = [
                await liar.async_register_service(one, cooperating_responders=True) for one in strangers[:6]
            ]
            usual_s = lan_discovery.OTHERS_S
            monkeypatch.setattr(lan_discovery, "OTHERS_S", 10.0)
            hearing = asyncio.create_task(heard(HOST))
            for number in range(20):
                cry(f"\x1b[{number}m{'x' * 40}.{SERVICE}")
                await asyncio.sleep(0.02)  # before, while and after it asks
            found = [one for one in await hearing if one.run in (run, other)]
            monkeypatch.setattr(lan_discovery, "OTHERS_S", usual_s)
            assert {one.run for one in found} == {run, other}
            assert all("\x1b" not in one.name for one in found)
            assert {one.name for one in found if one.run == other} == {"]0;owned"}
            with pytest.raises(LocalError, match="HP-ADDR-004"):
                chosen(found)
            assert [str(place) for place in chosen(found, run).addresses] == [
                place for place in node.addresses() if "/127.0.0.1/" in place
            ]
            saying += [
                await liar.async_register_service(one, cooperating_responders=True) for one in strangers[6:]
            ]
            assert len(await heard(HOST)) <= MAX_HEARD
            await asyncio.gather(*saying)
            assert "what somebody in the local network says" not in caplog.text, "nothing fails for it"
    finally:
        await liar.async_close()


async def test_an_address_that_is_not_of_this_machine_is_said(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LocalError, match="HP-NET-016") as caught:
        await heard("203.0.113.9")
    assert caught.value.why.startswith("no question can be sent there: ")
    await announce_forever(node, "203.0.113.9", fresh(), "tiny")
    assert "this peer cannot be found in the local network: " in caplog.text


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    need_lan()
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(LocalError, match="HP-SYS-006") as caught:
        need_lan()
    assert caught.value.exit_code == ExitCode.CONFIG


def test_the_local_network_is_asked_where_nothing_is_remembered(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="HP-ADDR-002"):
        joined_by([], tmp_path)
    goal = joined_by([], tmp_path, near=True)
    assert (goal.addresses, goal.run) == ((), "")
    assert joined_by([], tmp_path, fresh_run := fresh(), near=True).run == fresh_run
