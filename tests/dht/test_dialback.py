"""Dial-back between real p2pds on loopback: what is dialled, for whom, what p2pd is told, and what a liar
achieves.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from hetpeer.dht.base.errors import PeerLostError, ProtocolError, RemoteError
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.addresses import Address, at_socket, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd import p2pd_process as p2pd_config
from hetpeer.dht.p2pd.tcp_probe import is_peer, owner_of
from hetpeer.dht.reach.dialback import MAX_HINTS, PROTOCOL, DialBackHint, ReachProbe, ask
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.dht.streams.abuse import DIALS_PER_PEER, Strikes
from hetpeer.dht.streams.stream import Stream

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.xdist_group("dht-network"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def helper(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    node = await Node.start(NodeConfig(), Identity.create(tmp_path_factory.mktemp("helper") / "key"))
    yield node
    await node.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asker(helper: Node, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """It may ask DIALS_PER_PEER times that the helper answers."""
    config = NodeConfig(peers=(parse_address(helper.addresses()[0]),))
    node = await Node.start(config, Identity.create(tmp_path_factory.mktemp("asker") / "key"))
    yield node
    await node.close()


@pytest.fixture(autouse=True)
def pardoned(asker: Node, helper: Node) -> None:
    """What was done to a node in one test is not held against the other in the next."""
    for node in (asker, helper):
        node.listener.strikes = Strikes()


def port_of(node: Node) -> int:
    place = parse_address(node.addresses()[0]).socket
    assert place is not None
    return place[1]


async def questions(asker: Node, helper: Node, header: dict[str, Any]) -> dict[str, Any]:
    """The first answer to a question as it stands."""
    async with await asker.open(helper.peer_id, PROTOCOL) as stream:
        await stream.send(header)
        return (await stream.receive(timeout_s=5)).header


async def test_only_the_asker_itself_counts_as_reached(asker: Node, helper: Node) -> None:
    """Somebody else's listener at that address is no proof: several peers may share one address."""
    control = (await asker.session()).control
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for port, reached in (
            (port_of(asker), True),
            (port_of(helper), False),
            (mute.getsockname()[1], False),
        ):
            found = await ask(control, helper.peer_id, [port], lambda _: None)
            assert (found.ip, found.port) == ("127.0.0.1", port if reached else 0)


async def test_the_address_dialled_is_the_one_it_is_seen_at(asker: Node, helper: Node) -> None:
    """A question that names somebody else's address has them dialled no more than any other."""
    with socket.create_server(("127.0.0.2", 0)) as victim:
        victim.settimeout(0.0)
        port = victim.getsockname()[1]
        header = {"ports": [port], "ip": "127.0.0.2", "addresses": [f"/ip4/127.0.0.2/tcp/{port}"]}
        async with await asker.open(helper.peer_id, PROTOCOL) as stream:
            await stream.send(header)
            assert (await stream.receive(timeout_s=5)).header["ip"] == "127.0.0.1"
            assert (await stream.receive(timeout_s=5)).header == {"port": 0}
        with pytest.raises(BlockingIOError):
            victim.accept()


@pytest.mark.parametrize(
    "header",
    [
        {},
        *(
            {"ports": ports}
            for ports in ("4001", [], [1, 2, 3], [0], [70000], [True], [-1], ["4001"], [[4001]])
        ),
        {"ports": {"a": 1}},
    ],
)
async def test_garbage_gets_no_answer(asker: Node, helper: Node, header: dict[str, Any]) -> None:
    with pytest.raises(PeerLostError):
        await questions(asker, helper, header)
    assert helper.listener.strikes.counts() == {asker.peer_id: {"malformed": 1}}


async def test_a_flood_is_refused(asker: Node, helper: Node) -> None:
    answers = [await questions(asker, helper, {"ports": [port_of(asker)]}) for _ in range(DIALS_PER_PEER + 3)]
    refusals = [answer.get("refused") for answer in answers]
    assert refusals[-3:] == ["asked too often"] * 3
    with pytest.raises(RemoteError) as caught:
        await ask((await asker.session()).control, helper.peer_id, [port_of(asker)], lambda _: None)
    assert (caught.value.code, caught.value.why) == ("HP-NET-014", "asked too often")
    assert await questions(helper, asker, {"ports": [port_of(helper)]}) == {
        "ip": "127.0.0.1",
        "relays": [],
        "others": [],
    }


ADDRESS = "/ip4/51.51.51.1/tcp/4001/p2p/QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([{"refused": "x" * 9999}], RemoteError),
        ([{"ip": "nowhere"}], ProtocolError),
        ([{"ip": 7}], ProtocolError),
        ([{"ip": "2001:4860::1%a zone"}], ProtocolError),
        ([{"ip": "51.51.51.1"}, {"port": 1}], ProtocolError),
        ([{"ip": "51.51.51.1"}, {"port": "4001"}], ProtocolError),
        ([{"ip": "51.51.51.1"}, {}], ProtocolError),
        ([{"ip": "51.51.51.1"}], PeerLostError),
        ([], PeerLostError),
    ],
)
async def test_a_helper_that_lies_is_left_out(
    asker: Node, helper: Node, answers: list[dict[str, Any]], kind: type[RemoteError]
) -> None:
    async def lie(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        for answer in answers:
            await stream.send(answer)

    honest = helper.listener.handlers[PROTOCOL]
    await helper.serve(PROTOCOL, lie)
    try:
        with pytest.raises(kind) as caught:
            await ask((await asker.session()).control, helper.peer_id, [4001], lambda _: None)
    finally:
        await helper.serve(PROTOCOL, honest)
    assert len(caught.value.line()) < 300


async def test_hints_are_a_few_direct_addresses(asker: Node, helper: Node) -> None:
    hints: list[DialBackHint] = []
    junk: list[Any] = [
        7,
        None,
        "",
        "/ip4/51.51.51.1",
        "/ip4/51.51.51.1/tcp/0",
        f"{ADDRESS}/p2p-circuit{ADDRESS[30:]}",
    ]

    async def talk(stream: Stream) -> None:
        await stream.receive(timeout_s=5)
        await stream.send({"ip": "51.51.51.1", "relays": [*junk[:3], ADDRESS], "others": [ADDRESS] * 50})
        await stream.send({"port": 0})

    honest = helper.listener.handlers[PROTOCOL]
    await helper.serve(PROTOCOL, talk)
    try:
        await ask((await asker.session()).control, helper.peer_id, [4001], hints.append)
    finally:
        await helper.serve(PROTOCOL, honest)
    assert [str(relay) for relay in hints[0].relays] == [ADDRESS]
    assert len(hints[0].others) == MAX_HINTS


async def test_a_node_that_asks_knows_at_once(asker: Node, helper: Node, tmp_path: Path) -> None:
    """By two: the one that it joins by names another."""
    assert asker.is_up
    config = NodeConfig(peers=(parse_address(helper.addresses()[0]),), reachability="ask")
    node = await Node.start(config, Identity.create(tmp_path / "key"))
    try:
        assert (node.reach_estimate.reach, node.reach_estimate.peers, node.reach_estimate.outside) == (
            ReachKind.PUBLIC,
            2,
            False,
        )
        assert (node.reach_estimate.port, node.restarts) == (port_of(node), 0)
    finally:
        await node.close()


async def test_what_answers_at_a_port_need_not_be_a_peer() -> None:
    """Talkers of other protocols, and those that say nothing, are nobody, in time."""

    async def serve(answer: bytes) -> asyncio.Server:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            await reader.read()
            writer.close()

        return await asyncio.start_server(talk, "127.0.0.1", 0)

    for answer in (b"", b"SSH-2.0-OpenSSH\r\n" * 9, b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n" + bytes(99)):
        async with await serve(answer) as server:
            assert not await is_peer("127.0.0.1", server.sockets[0].getsockname()[1], "Qm", 0.5)
    for certificate in (b"", b"\x30\x82", bytes(1 << 20)):
        assert owner_of(certificate) == ""


US = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
HOME = at_socket("192.168.1.7", 4001, US)
RELAYS = tuple(
    at_socket(f"51.51.51.{i}", 4001, peer)
    for i, peer in enumerate(
        (
            "QmYG4YGDaDq3ihz6Bckyrvjog93qU9PcjBxC3AM3UtPLSK",
            "QmeNvnSXr2Jat1GCWdm8eQHDxBmNgxnUaHeduw8t9wXuKQ",
            "Qma5XXqWbUfpEjPYcACsyQzvJXdfq1xYQRBHWhpiKEmFRA",
        )
    )
)


def told(
    estimate: ReachEstimate, config: NodeConfig, own: tuple[Address, ...] = (HOME,), **how: Any
) -> NodeConfig:
    """What p2pd is told after `config`, where it listens at `own` and others find `estimate`."""
    reaching = ReachProbe(NodeConfig(reachability="ask", relays=RELAYS), US, SystemClock())
    reaching.core.estimate = estimate
    return reaching.adapted(config, SimpleNamespace(addresses=list(own)), **{"served": True, **how})


async def test_a_closed_peer_is_announced_at_its_relays_and_at_home() -> None:
    asked = NodeConfig(reachability="ask", relays=RELAYS)
    private = told(ReachEstimate(reach=ReachKind.PRIVATE, peers=2, ip="51.51.51.9", outside=True), asked)
    assert (private.reachability, private.relays, private.announce) == ("private", RELAYS, (HOME,))
    closed = ReachEstimate(reach=ReachKind.PRIVATE, peers=1, ip="51.51.51.9", outside=True)
    assert told(closed, private) == private
    assert told(closed, private, served=False) == private  # no relay that it did not know
    opened = ReachEstimate(reach=ReachKind.PUBLIC, peers=2, ip="192.168.1.7", port=4001)
    assert told(opened, private) == asked
    assert told(ReachEstimate(), private) == private


async def test_a_port_that_a_router_forwards_is_announced() -> None:
    asked = NodeConfig(reachability="ask", relays=RELAYS)
    there = at_socket("51.51.51.9", 4002, US)
    estimate = ReachEstimate(
        reach=ReachKind.PUBLIC, peers=2, ip="51.51.51.9", port=4002, outside=True, alike=2
    )
    forwarded = told(estimate, asked)
    assert (forwarded.reachability, forwarded.announce) == ("ask", (there, HOME))
    assert told(estimate, forwarded, (there, HOME)) == forwarded
    assert told(estimate, asked, (there,)) == asked


async def test_relays_of_our_user_come_first_and_strangers_are_few() -> None:
    reaching = ReachProbe(NodeConfig(reachability="ask", peers=RELAYS[2:]), US, SystemClock())
    for number in range(9):
        stranger = f"Qm{'abcdefghi'[number] * 44}"
        reaching._note_relay(Address(text=f"/ip4/51.51.52.{number}/tcp/1/p2p/{stranger}", peer_id=stranger))
    reaching._note_relay(at_socket("6.6.6.6", 6, RELAYS[2].peer_id))
    reaching._note_relay(HOME)
    reaching.core.estimate = ReachEstimate(reach=ReachKind.PRIVATE, peers=1, ip="51.51.51.9", outside=True)
    session: Any = SimpleNamespace(addresses=[HOME])
    relays = reaching.adapted(NodeConfig(reachability="ask"), session, served=True).relays
    assert relays[0] == RELAYS[2]
    assert len(relays) == 5


@pytest.mark.proof
@pytest.mark.swarm
@pytest.mark.xdist_group("dht-network")
async def test_a_reliable_peer_that_cannot_relay_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(p2pd_config, "_RELAY_SERVICE", ("-relayDataLimit=131072",))
    node = await Node.start(NodeConfig(reachability="public"), Identity.create(tmp_path / "key"))
    await node.close()
    assert "this peer relays too little for peers that accept no connections" in caplog.text
