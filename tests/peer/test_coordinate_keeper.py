"""The network coordinate of a peer while it takes part: whom it pings, what that costs, and what is kept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from hetpeer.dht.discovery import LEFT, Advert
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.probing import coordinate_keeper, line_probe
from hetpeer.peer.probing.coordinate_keeper import (
    MANY,
    OFTEN_S,
    PING_BYTES,
    SELDOM_S,
    SHARE,
    UNKNOWN_RATE,
    coordinates_in,
    keep_coordinate,
    keep_moving,
    kept_coordinate,
    partner,
    pause_s,
)
from hetpeer.peer.probing.kept_line import FILE, KeptLine
from hetpeer.peer.probing.probe_service import BUDGET, PROTOCOL, RELIABLE_BYTES, ProbeService
from hetpeer.stages.planning.network_coordinates import Coordinate, OwnCoordinate

HERE = Coordinate((0.01, 0.0, 0.0), 2e-3, 0.1)


@pytest.mark.parametrize("sent", [0, MANY - 1, MANY, 10_000])
@pytest.mark.parametrize("uplink", [0.0, 1e3, 125e3, 2.5e6, 125e6])
def test_pings_take_no_more_than_their_share_of_the_uplink(sent: int, uplink: float) -> None:
    wait_s = pause_s(sent, uplink)
    assert PING_BYTES / wait_s <= SHARE * (uplink or UNKNOWN_RATE) * (1 + 1e-9)
    assert wait_s >= (OFTEN_S if sent < MANY else SELDOM_S)
    assert pause_s(sent, uplink, metered=True) >= SELDOM_S


def test_those_that_were_not_met_come_first_every_other_time() -> None:
    adverts = {name: Advert(role="volunteer") for name in "abcdef"} | {"gone": Advert(state=LEFT)}
    met: list[str] = []
    for turn in range(5):
        peer = partner("a", 2 * turn, met, adverts)
        assert peer is not None
        met.append(peer)
    assert sorted(met) == list("bcdef")
    assert {partner("a", turn, met, adverts) for turn in range(40)} == set("bcdef")
    assert {partner("a", turn, set("cdef"), adverts) for turn in range(0, 40, 2)} == {"b"}
    assert {partner("a", turn, set("cdef"), adverts) for turn in range(1, 80, 2)} == set("bcdef")
    assert partner("a", 0, (), {"a": Advert(), "gone": Advert(state=LEFT)}) is None


def test_coordinates_that_are_none_are_left_out() -> None:
    adverts = {
        "good": Advert(coordinate=HERE.numbers()),
        "none": Advert(),
        "short": Advert(coordinate=(1, 2)),
        "far": Advert(coordinate=(2**30,) * 5),
    }
    assert coordinates_in(adverts).keys() == {"good"}


def test_a_coordinate_is_restored_in_the_same_network(tmp_path: Path) -> None:
    keep_coordinate(OwnCoordinate("QmOwn"), tmp_path)
    assert not (tmp_path / FILE).exists(), "nothing is known, and nothing kept"
    KeptLine(uplink=2e6).save(tmp_path)
    keep_coordinate(OwnCoordinate("QmOwn", HERE), tmp_path)
    assert KeptLine.load(tmp_path).uplink == 2e6
    again = kept_coordinate("QmOwn", tmp_path)
    assert again.is_known
    assert again.coordinate.at == pytest.approx(HERE.at)
    assert again.coordinate.error > HERE.error, "the others may have moved"
    elsewhere = KeptLine.load(tmp_path).model_copy(update={"coordinate_network": "another"})
    elsewhere.save(tmp_path)
    assert not kept_coordinate("QmOwn", tmp_path).is_known
    (tmp_path / FILE).write_text('{"coordinate": [1, 2, "x"]}')
    assert not kept_coordinate("QmOwn", tmp_path).is_known


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    """Two nodes that know each other."""
    folder, found = tmp_path_factory.mktemp("coordinates"), []
    async with AsyncExitStack() as stack:
        for number in range(2):
            known = {"peers": (parse_address(found[0].addresses()[0]),)} if found else {"alone_ok": True}
            config = NodeConfig(direct_port=0, **known)
            found.append(await Node.start(config, Identity.create(folder / str(number))))
            stack.push_async_callback(found[-1].close)
        yield found


@pytest.mark.swarm
@pytest.mark.asyncio(loop_scope="module")
async def test_two_peers_find_out_how_far_they_are_from_each_other(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answers pings with its coordinate; a third never answers, and is done without."""
    monkeypatch.setattr(coordinate_keeper, "pause_s", lambda *_args, **_more: 0.05)
    owns = [OwnCoordinate(node.peer_id) for node in nodes]
    adverts = {peer: Advert() for peer in (*(node.peer_id for node in nodes), "Qm" + "x" * 44)}
    for node, own in zip(nodes, owns, strict=True):
        await node.serve(PROTOCOL, ProbeService(RELIABLE_BYTES, lambda own=own: own.numbers).handle, BUDGET)
    keeping = [
        asyncio.ensure_future(keep_moving(node, own, tmp_path / node.peer_id, lambda: adverts))
        for node, own in zip(nodes, owns, strict=True)
    ]
    by_peer = [(node.peer_id, own) for node, own in zip(nodes, owns, strict=True)]
    for node in nodes:
        (tmp_path / node.peer_id).mkdir()
    async with asyncio.timeout(60.0):
        begun: dict[str, Coordinate] = {}
        while not all(own.coordinate.at != begun.get(peer, own.coordinate).at for peer, own in by_peer):
            begun |= {peer: own.coordinate for peer, own in by_peer if own.is_known and peer not in begun}
            await asyncio.sleep(0.05)
    for task in keeping:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    one, other = (own.coordinate for own in owns)
    assert 0.0 < one.trip_s(other) < 0.5
    assert KeptLine.load(tmp_path / nodes[0].peer_id).coordinate == owns[0].numbers


@pytest.mark.swarm
@pytest.mark.asyncio(loop_scope="module")
async def test_a_probe_brings_the_coordinates_of_those_that_it_meets(nodes: list[Node]) -> None:
    there, own = nodes
    await there.serve(PROTOCOL, ProbeService(RELIABLE_BYTES, HERE.numbers).handle, BUDGET)
    found = await line_probe.probe_line(own, [there.peer_id], 100_000)
    assert found.coordinates == {there.peer_id: Coordinate.of(HERE.numbers())}
    for nonsense in ((1, 2), (2**40,) * 5):
        await there.serve(PROTOCOL, ProbeService(RELIABLE_BYTES, lambda at=nonsense: at).handle, BUDGET)
        assert (await line_probe.probe_line(own, [there.peer_id], 100_000)).coordinates == {
            there.peer_id: None
        }
