"""A probe between real nodes on loopback, the allowance that bounds it, and peers that do not play along."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.probing import line_probe
from hetpeer.peer.probing.line_probe import BYTES, LONGEST_S, ProbedLine, probe_line
from hetpeer.peer.probing.probe_partners import METERED
from hetpeer.peer.probing.probe_service import BUDGET, PROTOCOL, RELIABLE_BYTES, ProbeService
from tests.peer.known_nodes import known_nodes

pytestmark = [pytest.mark.swarm, pytest.mark.asyncio(loop_scope="module")]
UP, DOWN = 2.0e6, 4.0e6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    """Three nodes that know each other; the last has limits of 16 Mbit/s up and 32 down."""
    async with AsyncExitStack() as stack:
        found = await known_nodes(stack, tmp_path_factory.mktemp("probe"), 3)
        found[-1].listener.throttle.up.limit(UP)
        found[-1].listener.throttle.down.limit(DOWN)
        yield found


async def served(node: Node, total: int = RELIABLE_BYTES) -> ProbeService:
    service = ProbeService(total)
    await node.serve(PROTOCOL, service.handle, BUDGET)
    return service


@pytest.mark.alone
async def test_a_probe_finds_the_limits_of_its_own_line(nodes: list[Node]) -> None:
    """Never faster than the owner allows, in no more bytes and time than it may take."""
    *others, own = nodes
    for node in others:
        await served(node)
    throttle = own.listener.throttle
    before = throttle.up.nbytes, throttle.down.nbytes
    found = await probe_line(own, [node.peer_id for node in others])
    sent, received = throttle.up.nbytes - before[0], throttle.down.nbytes - before[1]
    assert found.seconds <= LONGEST_S + 0.2
    # a limit lets a tenth of a second through at once after each pause, of which a busy machine has many
    assert found.uplink.rate == pytest.approx(UP, rel=0.4)
    assert found.downlink.rate == pytest.approx(DOWN, rel=0.4)
    assert found.trips.keys() == {node.peer_id for node in others}
    assert 0.0 < max(found.trips.values()) < 0.5
    assert 0 < found.nbytes <= BYTES
    assert sent <= UP * LONGEST_S
    assert sent + received < 1.1 * BYTES, "all of it counts for the month's cap"
    assert {node.peer_id for node in others} <= own.direct.leads.keys(), "past libp2p, as tensors go"


async def test_less_is_taken_on_a_metered_line(nodes: list[Node]) -> None:
    own = nodes[-1]
    await served(nodes[0])
    before = own.listener.throttle.up.nbytes + own.listener.throttle.down.nbytes
    found = await probe_line(own, [nodes[0].peer_id], BYTES // METERED)
    assert (
        own.listener.throttle.up.nbytes + own.listener.throttle.down.nbytes - before < 1.2 * BYTES / METERED
    )
    assert UP / 2 < found.uplink.rate < 2 * UP


async def test_peers_that_do_not_answer_are_done_without(nodes: list[Node]) -> None:
    """One is of an older version, one silent, one unknown, one tells nonsense."""
    older, silent, own = nodes

    async def say_nothing(stream: Stream) -> None:
        await asyncio.Event().wait()

    older.listener.handlers.pop(PROTOCOL, None)
    await silent.serve(PROTOCOL, say_nothing, BUDGET)
    began = asyncio.get_running_loop().time()
    found = await probe_line(own, [older.peer_id, silent.peer_id, "Qm" + "x" * 44])
    assert asyncio.get_running_loop().time() - began < LONGEST_S + 0.5
    assert (found.uplink.rate, found.downlink.rate) == (0.0, 0.0)

    async def tell_nonsense(stream: Stream) -> None:
        for _ in range(line_probe.PINGS):
            await stream.receive()
            await stream.send({"ping": 0})
        await stream.receive()
        await stream.send({"grant": BYTES})
        await stream.send({"bytes": "many"})

    await silent.serve(PROTOCOL, tell_nonsense, BUDGET)
    found = await probe_line(own, [silent.peer_id])
    assert (found.uplink.rate, found.downlink.rate) == (0.0, 0.0)
    assert (await probe_line(own, [])).nbytes == 0


async def test_one_probe_at_a_time_and_no_more_than_the_allowance(nodes: list[Node]) -> None:
    one, other, own = nodes
    await served(one, total=BYTES)
    results: list[ProbedLine] = await asyncio.gather(
        probe_line(own, [one.peer_id]), probe_line(other, [one.peer_id])
    )
    assert sorted(found.nbytes > 0 for found in results) == [False, True]
    assert (await probe_line(own, [one.peer_id])).nbytes == 0, "the hour's bytes are used"


@pytest.mark.parametrize(
    "greedy",
    [
        [{"down": 1}],
        [{"ask": -1}],
        [{"ask": 1 << 16}, {"down": 1 << 17}],
        [{"ask": 1 << 16}, *[{"down": 1 << 15}] * 3],
        [{"ask": 1 << 16}, {"more": 1}],
        [{"ping": 0}] * 65,
    ],
)
async def test_who_takes_more_than_it_was_granted_is_cut(
    nodes: list[Node], greedy: list[dict[str, int]]
) -> None:
    one, other, _ = nodes
    service = await served(one)
    offended = one.listener.strikes
    received = 0
    async with asyncio.timeout(10):
        with pytest.raises(Exception, match="lost peer"):  # noqa: PT012 - the stream may end at any of them
            stream = await other.open(one.peer_id, PROTOCOL)
            for message in greedy:
                await stream.send(message)
            while True:
                await stream.receive()
                received += len(await stream.receive_bytes(1 << 16))
    assert received <= 1 << 16
    assert service is not None
    offended.__init__()  # the next case is not refused for this one
