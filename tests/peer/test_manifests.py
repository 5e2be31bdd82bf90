"""Which peer's manifest is believed, with real nodes: that of the run that was meant, whoever serves what."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hetpeer.bootstrap.council import Council
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.bootstrap.serving import PROTOCOL, FileService
from hetpeer.bootstrap.shelf import RunShelf
from hetpeer.dht.addresses import Address, parse_address
from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.dht.identity import Identity
from hetpeer.dht.node import Node, NodeConfig
from hetpeer.dht.records import Advert
from hetpeer.dht.roster import Roster
from hetpeer.peer.arrival import manifests
from hetpeer.peer.arrival.manifests import fetch_manifest
from tests.bootstrap.engine import make_run
from tests.swarm.swarm import resign

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("run"))


@contextlib.asynccontextmanager
async def running(folder: Path, *peers: Node) -> AsyncIterator[Node]:
    config = NodeConfig(peers=tuple(map(address, peers)))
    node = await Node.start(config, Identity.create(folder / f"{len(list(folder.iterdir()))}.key"))
    try:
        yield node
    finally:
        await node.close()


def address(node: Node) -> Address:
    return parse_address(node.addresses()[0])


async def serve(node: Node, run: RunDirectory, home: Path) -> None:
    async def nothing(*_: int) -> None:
        return None

    await node.serve(PROTOCOL, FileService(RunShelf(run, Council(run.signed, home), nothing)).handle)


async def test_a_peer_that_hands_out_another_run_is_passed_over_for_one_that_the_dht_knows(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run.path, tmp_path / "other-run")
    other = resign(RunDirectory.open(tmp_path / "other-run"), seed=run.manifest.seed + 1)
    other = RunDirectory.open(other.path)
    assert other.run_id != run.run_id
    keys = tmp_path / "keys"
    keys.mkdir()
    async with running(keys) as liar, running(keys, liar) as honest, running(keys, liar) as newcomer:
        await serve(liar, other, tmp_path)
        await serve(honest, run, tmp_path)
        assert (await fetch_manifest(newcomer, [address(liar)])).signed.run_id == other.run_id

        with pytest.raises(LocalError) as caught:
            await fetch_manifest(newcomer, [address(liar)], run.run_id)
        assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-016", ExitCode.VERSION)
        assert liar.peer_id in caught.value.what

        lie = Advert(role="reliable", addresses=(str(address(honest)), "/nonsense"))
        assert await Roster(liar, run.run_id).publish(lie)
        truth = Advert(role="reliable", addresses=tuple(honest.addresses()))
        assert await Roster(honest, run.run_id).publish(truth)
        found = await fetch_manifest(newcomer, [address(liar)], run.run_id)
        assert (found.signed.run_id, found.peer) == (run.run_id, honest.peer_id)

        both = [address(liar), address(honest)]
        assert (await fetch_manifest(newcomer, both, run.run_id)).peer == honest.peer_id

        monkeypatch.setattr(manifests, "TRIES", 1)
        with pytest.raises(LocalError) as caught:
            await fetch_manifest(newcomer, [address(newcomer)], "0" * 32)
        assert caught.value.code == "HP-NET-006"
        assert "0" * 32 in caught.value.what
