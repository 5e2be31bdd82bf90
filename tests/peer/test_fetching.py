"""What is said when a run's files, its manifest or its reliable peers cannot be had: real nodes on loopback."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.amendment import Change
from hetpeer.bootstrap.council import Council
from hetpeer.bootstrap.decisions import CollectCheckpoint
from hetpeer.bootstrap.keeping import Checkpoints
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.serving import PROTOCOL, FileService, Served, fetch, fetch_file
from hetpeer.bootstrap.shelf import RunShelf
from hetpeer.dht.addresses import Address, parse_address
from hetpeer.dht.errors import ExitCode, LocalError, RemoteError
from hetpeer.dht.identity import Identity
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.peer.arrival import manifests
from hetpeer.peer.arrival.invites import Destination
from hetpeer.peer.arrival.manifests import fetch_manifest
from hetpeer.peer.home import Home
from hetpeer.peer.reliable.amend import amended, deliver
from hetpeer.peer.reliable.mirroring import mirror
from hetpeer.peer.reliable.peer import BootstrapOptions, serve_run
from tests.bootstrap.engine import make_run

pytestmark = [pytest.mark.swarm, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Network:
    """A peer that serves `run` from its disk, one that serves nothing, and one that asks them."""

    run: RunDirectory
    server: Node
    empty: Node
    asker: Node


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    folder = tmp_path_factory.mktemp("network")
    run = make_run(folder / "author")
    nodes: list[Node] = []
    try:
        for name in ("server", "empty", "asker"):
            known = tuple(address_of(node) for node in nodes)
            nodes.append(await Node.start(NodeConfig(peers=known), Identity.create(folder / name)))

        async def initial(cluster: int, version: int, block: int) -> Served | None:
            entry = run.manifest.blocks[block]
            return Served(run.state_path(entry).read_bytes(), {"digest": entry.state_digest})

        shelf = RunShelf(run, Council(run.signed, run.path), initial)
        await nodes[0].serve(PROTOCOL, FileService(shelf).handle)
        yield Network(run, *nodes)
    finally:
        for node in nodes:
            await node.close()


def address_of(node: Node) -> Address:
    return parse_address(node.addresses()[0])


async def test_a_name_that_a_peer_does_not_have(network: Network) -> None:
    with pytest.raises(RemoteError) as caught:
        await fetch(network.asker, network.server.peer_id, "file/" + "0" * 64, 100)
    assert caught.value.code == "HP-SYNC-002"
    assert network.server.peer_id in caught.value.line()


async def test_a_file_that_is_damaged_where_it_comes_from(network: Network) -> None:
    """The last peer's failure is named in what the user sees of all of them."""
    entry = network.run.manifest.blocks[0].graph
    path = network.run.graph_path(network.run.manifest.blocks[0])
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    try:
        with pytest.raises(RemoteError) as caught:
            await fetch_file(network.asker, [network.server.peer_id], entry.blake3, entry.bytes)
    finally:
        path.write_bytes(whole)
    assert (caught.value.code, caught.value.exit_code) == ("HP-SYNC-001", ExitCode.NETWORK)
    assert caught.value.why == f"peer {network.server.peer_id} sent a damaged file"
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.code == "HP-SYNC-003"
    assert await fetch_file(network.asker, [network.server.peer_id], entry.blake3, entry.bytes) == whole


async def test_a_peer_that_serves_no_run(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "RETRY_S", 0.1)
    with pytest.raises(LocalError) as caught:
        await fetch_manifest(network.asker, [address_of(network.empty)])
    assert (caught.value.code, caught.value.exit_code) == ("HP-NET-006", ExitCode.NETWORK)


async def test_a_machine_that_the_manifest_does_not_name_gets_no_copy(
    network: Network, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    with pytest.raises(LocalError) as caught:
        await mirror(tmp_path / "copy", Destination((address_of(network.server),)), home)
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-012", ExitCode.CONFIG)
    assert home.reliable_identity().peer_id in caught.value.fix
    assert not (tmp_path / "copy").exists()


async def test_an_address_to_listen_on_that_is_none(network: Network) -> None:
    options = BootstrapOptions(directory=network.run.path, host="home", port=0)
    with pytest.raises(LocalError) as caught:
        await serve_run(options, asyncio.Event(), print)
    assert caught.value.line().startswith("HP-NET-005: 'home' is not an IP address; why: ")
    assert caught.value.exit_code == ExitCode.USAGE


async def test_an_amendment_that_nobody_takes(network: Network, tmp_path: Path) -> None:
    shutil.copytree(network.run.path, tmp_path / "run")
    council = amended(tmp_path / "run", Change(coordinators=(network.empty.peer_id,)))
    with pytest.raises(LocalError) as caught:
        await deliver(council, [address_of(network.empty)])
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-018", ExitCode.NETWORK)
    assert caught.value.what.startswith("amendment 1 is signed")


async def test_a_checkpoint_that_too_few_reliable_peers_keep(network: Network, tmp_path: Path) -> None:
    """The one that collects it has it; of two others neither runs."""
    shutil.copytree(network.run.path, tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    others = [Identity.create(tmp_path / name).peer_id for name in ("b", "c")]
    checkpoints = Checkpoints(network.asker, run, (), lambda: others)
    savers = {entry.index: network.server.peer_id for entry in run.manifest.blocks}
    with pytest.raises(RemoteError) as caught:
        await checkpoints.collect(
            CollectCheckpoint(m.Line(term=1, view=0), 0, savers), [network.asker.peer_id, *others]
        )
    assert caught.value.code == "HP-SYNC-004"
    assert "is on 1 of 3 reliable peers" in caught.value.what
