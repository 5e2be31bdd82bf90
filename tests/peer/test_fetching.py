"""What is said when a run's files, its manifest or its reliable peers cannot be had: real nodes on
loopback.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.consensus.reconfiguration import Reconfiguration
from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.record_log import Log
from hetpeer.bootstrap.run.amendment import MembershipChange
from hetpeer.bootstrap.run.durable_files import GrowingFile
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.state.effects import CollectCheckpoint
from hetpeer.bootstrap.storage import file_service, replication, state_cache
from hetpeer.bootstrap.storage.checkpoints import record_of
from hetpeer.bootstrap.storage.file_service import (
    MUCH,
    PROTOCOL,
    BusyError,
    FileService,
    Served,
    ServedRunFiles,
    fetch,
    fetch_file,
    fetch_into,
    fetch_patiently,
)
from hetpeer.bootstrap.storage.replication import KEEP, CheckpointReplication
from hetpeer.dht.base.errors import ExitCode, LocalError, RemoteError
from hetpeer.dht.base.file_pieces import FilePart, InMemory, read
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.arrival import manifest_fetch
from hetpeer.peer.arrival.destinations import Destination
from hetpeer.peer.arrival.manifest_fetch import fetch_manifest
from hetpeer.peer.process.home import Home
from hetpeer.peer.reliable.reliable_members import amended, deliver, mirror
from hetpeer.peer.reliable.reliable_peer import ReliablePeer
from hetpeer.peer.reliable.serve_run import BootstrapOptions, serve_run
from hetpeer.stages.block import block_state, state_file
from hetpeer.stages.block.block_state import BlockState
from tests.bootstrap.engine import make_run
from tests.swarm.swarm import resign

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("test_fetching"),  # its tests share a network
]


class States:
    """Which states of blocks `server` gives: of any version, but for the `withheld` ones."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._layouts = run.layouts()
        self.withheld: set[tuple[int, int]] = set()
        self.given: list[tuple[int, int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        """Set while one is asked for that is not given until `open`."""

    def record(self, version: int) -> Record:
        """The checkpoint of all blocks."""
        return record_of(version, [self._state(version, entry.index).digest() for entry in self._blocks])

    @property
    def _blocks(self) -> Sequence[Any]:
        return self._run.manifest.blocks

    def _state(self, version: int, block: int) -> BlockState:
        count = block_state.element_count(self._layouts[block])
        return BlockState(version=version, parameters=np.full(count, version, np.float32))

    @asynccontextmanager
    async def find(self, _cluster: int, version: int, block: int) -> AsyncIterator[Served | None]:
        yield await self._find(version, block)

    async def _find(self, version: int, block: int) -> Served | None:
        if version == 0:
            entry = self._blocks[block]
            return Served(FilePart.whole(self._run.state_path(entry)), {"digest": entry.state_digest})
        if not self.open.is_set():
            self.asked.set()
            await self.open.wait()
        if (version, block) in self.withheld:
            return None
        self.given.append((version, block))
        current = self._state(version, block)
        data = InMemory(state_file.dump(current, block, self._layouts[block]))
        return Served(data, {"digest": current.digest()})


@dataclass(frozen=True)
class Network:
    """A peer that serves `run` from its disk, one that serves nothing, and one that asks them."""

    run: RunDirectory
    server: Node
    empty: Node
    asker: Node
    states: States


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
            port = 0 if name == "server" else None
            config = NodeConfig(peers=known, direct_port=port)
            nodes.append(await Node.start(config, Identity.create(folder / name)))
        states = States(run)
        shelf = ServedRunFiles(run, MembershipConfig(run.signed, run.path), states.find)
        await nodes[0].serve(PROTOCOL, FileService(shelf).handle)
        yield Network(run, *nodes, states)
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


async def test_what_may_be_large_is_fetched_past_libp2p(network: Network, tmp_path: Path) -> None:
    asker, server, graph = network.asker, network.server.peer_id, network.run.manifest.blocks[0].graph
    with GrowingFile(tmp_path / "it") as file:
        await fetch_into(asker, server, f"file/{graph.blake3}", MUCH - 1, file)
        assert server not in asker.direct.leads
        await fetch_into(asker, server, f"file/{graph.blake3}", MUCH, file)
        assert server in asker.direct.leads
        whole = network.run.graph_path(network.run.manifest.blocks[0]).read_bytes()
        assert bytes(read(file.part, 0, graph.bytes)) == whole
    shelf = ServedRunFiles(
        network.run, MembershipConfig(network.run.signed, network.run.path), network.states.find
    )
    await asker.serve(PROTOCOL, FileService(shelf).handle)
    with GrowingFile(tmp_path / "it") as file:  # from a peer without a direct port
        await fetch_into(network.server, asker.peer_id, f"file/{graph.blake3}", MUCH, file)
        assert asker.peer_id not in network.server.direct.leads
        assert bytes(read(file.part, 0, graph.bytes)) == whole


async def test_a_busy_peer_is_no_peer_without_the_file_and_is_asked_again(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Somebody takes a file and does not end the stream; there is room for one."""
    monkeypatch.setattr(state_cache, "MOST_COPIED", 1)
    monkeypatch.setattr(state_cache, "OF_THE_LARGEST", 1)
    monkeypatch.setattr(state_cache, "UNSEEN", 1)
    monkeypatch.setattr(file_service, "BUSY_RETRY_S", 0.05)
    shelf = ServedRunFiles(
        network.run, MembershipConfig(network.run.signed, network.run.path), network.states.find
    )
    await network.server.serve(PROTOCOL, FileService(shelf).handle)
    first, second = (block.graph for block in network.run.manifest.blocks[:2])
    server = network.server.peer_id
    async with await network.asker.open(server, PROTOCOL) as slow:
        await slow.send({"want": f"file/{first.blake3}"})
        await slow.receive(payload_limit=first.bytes)
        with pytest.raises(BusyError) as caught:
            await fetch(network.asker, server, f"file/{second.blake3}", second.bytes)
        assert caught.value.code == "HP-SYNC-005"
        name = f"file/{second.blake3}"
        again = GrowingFile(tmp_path / "again")
        waiting = [
            asyncio.create_task(
                fetch_file(network.asker, [server], tmp_path / "whole", second.blake3, second.bytes)
            ),
            asyncio.create_task(fetch_patiently(network.asker, server, name, second.bytes, again)),
        ]
        done, _ = await asyncio.wait(waiting, timeout=0.3)
        assert not done
    async with asyncio.timeout(20):
        await asyncio.gather(*waiting)
    assert (tmp_path / "whole").read_bytes() == read(again.part, 0, second.bytes)
    with pytest.raises(RemoteError) as none:
        await fetch_patiently(network.asker, server, "file/" + "0" * 64, 100, again)
    assert none.value.code == "HP-SYNC-002"


async def test_a_file_that_is_damaged_where_it_comes_from(network: Network, tmp_path: Path) -> None:
    """The last peer's failure is named in what the user sees of all of them."""
    entry = network.run.manifest.blocks[0].graph
    path = network.run.graph_path(network.run.manifest.blocks[0])
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    try:
        with pytest.raises(RemoteError) as caught:
            await fetch_file(
                network.asker, [network.server.peer_id], tmp_path / "it", entry.blake3, entry.bytes
            )
    finally:
        path.write_bytes(whole)
    assert (caught.value.code, caught.value.exit_code) == ("HP-SYNC-001", ExitCode.NETWORK)
    assert caught.value.why == f"peer {network.server.peer_id} sent a damaged file"
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.code == "HP-SYNC-003"
    assert not any(tmp_path.iterdir()), "nothing is left of it"
    await fetch_file(network.asker, [network.server.peer_id], tmp_path / "it", entry.blake3, entry.bytes)
    assert (tmp_path / "it").read_bytes() == whole


async def test_a_peer_that_serves_no_run(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_fetch, "RETRY_S", 0.1)
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


async def test_a_reliable_peer_gets_one_copy_of_a_run(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second it could vote again.

    One that was not completed is none, and another identity gets its own.
    """
    monkeypatch.setattr(manifest_fetch, "RETRY_S", 0.1)
    home, first, second = Home(tmp_path / "home"), tmp_path / "first", tmp_path / "second"
    shutil.copytree(network.run.path, tmp_path / "run")
    membership = amended(tmp_path / "run", MembershipChange(coordinators=(home.reliable_identity().peer_id,)))
    node = await Node.start(NodeConfig(), Identity.create(tmp_path / "node.key"))
    try:
        goal = Destination((address_of(node),))
        with pytest.raises(LocalError, match="HP-NET-006"):
            await mirror(first, goal, home)
        await node.serve(
            PROTOCOL, FileService(ServedRunFiles(network.run, membership, network.states.find)).handle
        )
        await mirror(first, goal, home)
        assert RunDirectory.open(first).run_id == network.run.run_id
        shutil.rmtree(first)
        with pytest.raises(LocalError) as caught:
            await mirror(second, goal, home)
        assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-024", ExitCode.CONFIG)
        assert str(first) in caught.value.what
        assert "hetpeer id --reliable --home" in caught.value.fix
        assert not second.exists()
        home.reliable_key.unlink()
        membership.learn(
            amended(tmp_path / "run", MembershipChange(coordinators=(home.reliable_identity().peer_id,))).data
        )
        await mirror(second, goal, home)
    finally:
        await node.close()


async def test_an_address_to_listen_on_that_is_none(network: Network) -> None:
    options = BootstrapOptions(directory=network.run.path, host="home", port=0)
    with pytest.raises(LocalError) as caught:
        await serve_run(options, asyncio.Event(), print)
    assert caught.value.line().startswith("HP-NET-005: 'home' is not an IP address; why: ")
    assert caught.value.exit_code == ExitCode.USAGE


async def test_an_amendment_that_nobody_takes(network: Network, tmp_path: Path) -> None:
    shutil.copytree(network.run.path, tmp_path / "run")
    membership = amended(tmp_path / "run", MembershipChange(coordinators=(network.empty.peer_id,)))
    with pytest.raises(LocalError) as caught:
        await deliver(membership, [address_of(network.empty)])
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-018", ExitCode.NETWORK)
    assert caught.value.what.startswith("amendment 1 is signed")


async def test_an_amendment_whose_number_is_taken(network: Network, tmp_path: Path) -> None:
    """It was given in two copies of the run directory: the second owner is told, and has the first one's
    then.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        shutil.copytree(network.run.path, folder)
    run = RunDirectory.open(first)
    taken = amended(first, MembershipChange(ban=(network.asker.peer_id,)))
    with run_logs(run) as logs:
        replica = Replica(network.server, run, taken, logs, SystemClock())
        amending = asyncio.ensure_future(Reconfiguration(network.server, replica, lambda: 0).run())
        try:
            with pytest.raises(LocalError) as caught:
                await deliver(
                    amended(second, MembershipChange(ban=(network.empty.peer_id,))),
                    [address_of(network.server)],
                )
            assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-023", ExitCode.CONFIG)
            assert caught.value.what.startswith("amendment 1 changes nothing")
            assert MembershipConfig(run.signed, second).data == taken.data
            again = amended(second, MembershipChange(ban=(network.empty.peer_id,)))
            await deliver(again, [address_of(network.server)])
            assert (again.sequence, taken.data) == (2, again.data)
        finally:
            amending.cancel()
            await asyncio.gather(amending, return_exceptions=True)


@dataclass(frozen=True)
class Keeper:
    """The checkpoints of `network.asker`, one of three reliable peers of which it knows no other; and
    where they are.
    """

    checkpoints: CheckpointReplication
    network: Network
    run: RunDirectory
    others: Sequence[str]

    @property
    def versions(self) -> set[int]:
        """Of which something is on the disk."""
        return {int(path.name[1:9]) for path in self.run.checkpoints.iterdir()}

    async def collect(self, version: int, others: Sequence[str] = ()) -> None:
        savers = {entry.index: self.network.server.peer_id for entry in self.run.manifest.blocks}
        order = CollectCheckpoint(m.TermView(term=1, view=0), version, savers)
        await self.checkpoints.collect(order, [self.network.asker.peer_id, *(others or self.others)])

    async def copy(self, version: int) -> None:
        await self.checkpoints.copy(self.network.states.record(version), [self.network.server.peer_id])

    async def sealed(self, version: int) -> None:
        await self.checkpoints.sealed(self.network.states.record(version))


@pytest.fixture
def keeper(network: Network, tmp_path: Path) -> Keeper:
    shutil.copytree(network.run.path, tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    others = [Identity.create(tmp_path / name).peer_id for name in ("b", "c")]
    return Keeper(CheckpointReplication(network.asker, run, (), lambda: others), network, run, others)


async def test_a_checkpoint_that_too_few_reliable_peers_keep(keeper: Keeper) -> None:
    """The one that collects it has it; of two others neither runs.

    Its files make room for those of the next one.
    """
    for version in (0, 1, 2, 3):
        with pytest.raises(RemoteError) as caught:
            await keeper.collect(version)
        assert caught.value.code == "HP-SYNC-004"
        assert "is on 1 of 3 reliable peers" in caught.value.what
    assert keeper.versions == {3}
    await keeper.copy(4)
    assert keeper.versions == {4}


async def test_what_was_copied_for_a_leader_stays_until_it_is_sealed(keeper: Keeper) -> None:
    await keeper.copy(10)
    await keeper.copy(9)
    await keeper.sealed(9)
    assert keeper.versions == {9, 10}
    for version in (11, 12, 13):
        await keeper.copy(version)
    assert keeper.versions == {9, 11, 12, 13}, "the last two, and the one before as long as nothing is begun"
    await keeper.sealed(13)
    assert keeper.versions == {9, 13}


async def test_the_best_checkpoint_stays_on_the_disk(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when there is room for nothing else, and after a restart."""
    monkeypatch.setattr(replication, "FREE_BYTES", 1 << 60)
    shutil.copytree(network.run.path, tmp_path / "run")
    run, losses = RunDirectory.open(tmp_path / "run"), {10: 3.0, 20: 1.0, 30: 2.0}
    records: list[Record] = []
    others = [Identity.create(tmp_path / name).peer_id for name in ("b", "c")]

    def keeper() -> Keeper:
        checkpoints = CheckpointReplication(network.asker, run, records, lambda: others, lambda: losses)
        return Keeper(checkpoints, network, run, others)

    kept = keeper()
    assert kept.checkpoints.best is None
    for version in range(10, 60, 10):
        await kept.copy(version)
        await kept.sealed(version)
        records.append(network.states.record(version))
    assert (kept.versions, kept.checkpoints.best) == ({20, 40, 50}, 20)
    again = keeper()
    await again.copy(60)
    await again.sealed(60)
    assert (again.versions, again.checkpoints.best) == ({20, 50, 60}, 20)
    losses[60] = 0.5
    assert again.checkpoints.best == 60


async def test_a_copy_that_broke_off_goes_on(keeper: Keeper) -> None:
    states = keeper.network.states
    states.withheld = {(20, 1)}
    with pytest.raises(RemoteError):
        await keeper.copy(20)
    states.withheld, states.given = set(), []
    await keeper.copy(20)
    assert states.given == [(20, entry.index) for entry in keeper.run.manifest.blocks[1:]]
    await keeper.sealed(20)
    assert keeper.checkpoints.newest == 20


async def test_nothing_is_deleted_while_another_checkpoint_is_copied(keeper: Keeper) -> None:
    """What is being written has a name of its own until it is whole."""
    states = keeper.network.states
    await keeper.copy(30)
    states.open.clear()
    copying = asyncio.ensure_future(keeper.copy(31))
    await states.asked.wait()
    (written := keeper.run.checkpoints / ".v00000031.written").write_bytes(b"a part")
    await keeper.sealed(30)
    assert written.exists()
    states.open.set()
    await copying
    await keeper.sealed(31)
    assert not written.exists()
    assert keeper.versions == {30, 31}


async def test_who_copies_a_large_checkpoint_is_given_longer(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two others answers after half a second."""

    async def slowly(stream: Stream) -> None:
        await stream.receive()
        await asyncio.sleep(0.5)
        await stream.send({"kept": True})

    slow = keeper.network.empty
    await slow.serve(KEEP, slowly)
    others = [slow.peer_id, keeper.others[0]]
    monkeypatch.setattr(replication, "REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(replication, "SLOWEST", 1e9)
    with pytest.raises(RemoteError, match="is on 1 of 3"):
        await keeper.collect(40, others)
    monkeypatch.setattr(replication, "SLOWEST", 1e3)
    await keeper.collect(40, others)


async def test_a_checkpoint_of_the_log_whose_files_are_not_here(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reliable peer that was killed before it had copied the newest one, and starts again while nobody
    can give it.
    """
    shutil.copytree(network.run.path, tmp_path / "run")
    others = [Identity.create(tmp_path / name).peer_id for name in ("b", "c")]
    run = resign(RunDirectory.open(tmp_path / "run"), coordinators=(network.asker.peer_id, *others))
    older, newest = network.states.record(50), network.states.record(51)
    with closing(Log.open(run.log_path)) as log:
        log.append(older, newest)
    with run_logs(run) as logs:
        replica = Replica(network.asker, run, MembershipConfig(run.signed, run.path), logs, SystemClock())
        peer = ReliablePeer(network.asker, run, replica)
        assert peer.stored == 0
        for _ in range(3):
            await peer._catching_up.look()
        said = [one.getMessage() for one in caplog.records if "could not be copied yet" in one.getMessage()]
        assert len(said) == 1
        assert said[0].startswith("checkpoint 51 could not be copied yet: HP-")
        await peer._checkpoints.copy(newest, [network.server.peer_id])
        await peer._catching_up.look()
        assert peer.stored == 0, "it is not looked at again at once"
        peer._catching_up._not_before = 0.0
        await peer._catching_up.look()
        assert peer.stored == 51
