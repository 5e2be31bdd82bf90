"""A coordinator has volunteers measure a line: real nodes on loopback, and those that do not play along."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from hetpeer.dht.base.errors import RemoteError
from hetpeer.dht.node.node import Node
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.probing import probe_service
from hetpeer.peer.probing.measurement_service import BUDGET, PER_HOUR, PROTOCOL, MeasurementService
from hetpeer.peer.probing.probe_service import VOLUNTEER_BYTES, ProbeService
from hetpeer.peer.reliable.line_questions import measure_lines
from tests.peer.known_nodes import known_nodes

pytestmark = [pytest.mark.swarm, pytest.mark.asyncio(loop_scope="module")]
UP, DOWN = 2.0e6, 4.0e6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    """A coordinator and two volunteers, of which the first has limits of 16 Mbit/s up and 32 down."""
    async with AsyncExitStack() as stack:
        found = await known_nodes(stack, tmp_path_factory.mktemp("lines"), 3)
        found[1].listener.throttle.up.limit(UP)
        found[1].listener.throttle.down.limit(DOWN)
        yield found


async def serving(nodes: list[Node], *, allowed: bool = True, reliable: bool = True) -> None:
    """Both volunteers answer, if they may, the coordinator, or nobody."""
    for node in nodes[1:]:
        reliables = (nodes[0].peer_id,) if reliable else ()
        service = MeasurementService(node, lambda some=reliables: some, lambda: allowed)
        await node.serve(PROTOCOL, service.handle, BUDGET)
        await node.serve(probe_service.PROTOCOL, ProbeService(VOLUNTEER_BYTES).handle, probe_service.BUDGET)


@pytest.mark.alone
async def test_both_directions_are_known_then(nodes: list[Node]) -> None:
    await serving(nodes)
    coordinator, one, other = nodes
    found = await measure_lines(coordinator, [(one.peer_id, other.peer_id)])
    there, back = found[one.peer_id, other.peer_id], found[other.peer_id, one.peer_id]
    # a limit lets a tenth of a second through at once after each pause, of which a busy machine has many
    assert there.rate == pytest.approx(UP, rel=0.4)
    assert back.rate == pytest.approx(DOWN, rel=0.4)
    assert 0.0 < there.trip_s < 0.5
    assert (there.to, back.to) == (other.peer_id[-8:], one.peer_id[-8:])


@pytest.mark.parametrize(("allowed", "reliable"), [(False, True), (True, False)])
async def test_a_metered_line_is_not_measured_and_none_for_a_stranger(
    nodes: list[Node], allowed: bool, reliable: bool
) -> None:
    await serving(nodes, allowed=allowed, reliable=reliable)
    before = nodes[1].listener.throttle.up.nbytes
    assert await measure_lines(nodes[0], [(nodes[1].peer_id, nodes[2].peer_id)]) == {}
    assert nodes[1].listener.throttle.up.nbytes - before < 10_000


async def test_no_more_lines_are_measured_than_an_hour_has(nodes: list[Node]) -> None:
    """Far ends that are nobody count as well: looking for them takes time."""
    await serving(nodes)
    coordinator, one, other = nodes
    for number in range(PER_HOUR):
        assert await measure_lines(coordinator, [(one.peer_id, f"Qm{number}")]) == {}
    before = one.listener.throttle.up.nbytes
    assert await measure_lines(coordinator, [(one.peer_id, other.peer_id)]) == {}
    assert one.listener.throttle.up.nbytes - before < 10_000


NONSENSE: list[dict[str, object]] = [
    {},
    {"up": "fast"},
    {"up": -1.0, "down": 1.0},
    {"up": float("nan"), "down": 1.0},
    {"up": 1e300},
]


@pytest.mark.parametrize("answer", NONSENSE)
async def test_nonsense_is_no_measurement(nodes: list[Node], answer: dict[str, object]) -> None:
    async def talk(stream: Stream) -> None:
        await stream.receive()
        await stream.send(answer)

    await nodes[1].serve(PROTOCOL, talk, BUDGET)
    assert await measure_lines(nodes[0], [(nodes[1].peer_id, nodes[2].peer_id)]) == {}


@pytest.mark.parametrize("question", [{}, {"to": 3}, {"to": "Q" * 1000}])
async def test_nonsense_is_no_question(nodes: list[Node], question: dict[str, object]) -> None:
    await serving(nodes)
    stream = await nodes[0].open(nodes[1].peer_id, PROTOCOL)
    await stream.send(question)
    with pytest.raises(RemoteError):
        await stream.receive()
    stream.abort()
