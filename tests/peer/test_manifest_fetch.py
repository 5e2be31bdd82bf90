"""Which peer's manifest is believed, with real nodes: that of the run that was meant, whoever serves what."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hetpeer.bootstrap.run.manifest import SignedManifest, sign
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.owner_signature import unpack
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.file_service import PROTOCOL, FileService, Served, ServedRunFiles
from hetpeer.dht.base.errors import ExitCode, LocalError, short_id
from hetpeer.dht.discovery import Advert, Roster
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.run_index import RunIndex
from hetpeer.dht.streams.stream import Stream
from hetpeer.peer.arrival import manifest_fetch
from hetpeer.peer.arrival.destinations import Destination, known_run, remember, remember_seen
from hetpeer.peer.arrival.find_run import FoundRun, arrived
from hetpeer.peer.arrival.manifest_fetch import fetch_manifest
from hetpeer.peer.daemon.presence import no_state
from hetpeer.peer.process.home import Home
from tests.bootstrap.engine import make_run
from tests.swarm.child import until
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
    await node.serve(
        PROTOCOL, FileService(ServedRunFiles(run, MembershipConfig(run.signed, home), no_state)).handle
    )


async def serve_damaged(node: Node, run: RunDirectory) -> None:
    """Hand out a manifest of which a byte is another one."""

    class Damaged(ServedRunFiles):
        @contextlib.asynccontextmanager
        async def find(self, name: str) -> AsyncIterator[Served | None]:
            data = bytearray(run.signed.data)
            data[-1] ^= 1
            yield Served.of(data)

    await node.serve(
        PROTOCOL, FileService(Damaged(run, MembershipConfig(run.signed, run.path), no_state)).handle
    )


async def keep_silent(node: Node) -> None:
    """Take every request and answer none."""

    async def never(_stream: Stream) -> None:
        await asyncio.Event().wait()

    await node.serve(PROTOCOL, never)


@pytest.fixture
def other(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """Another run of the same author."""
    shutil.copytree(run.path, tmp_path / "other-run")
    resigned = resign(RunDirectory.open(tmp_path / "other-run"), seed=run.manifest.seed + 1)
    return RunDirectory.open(resigned.path)


async def test_strangers_that_are_silent_or_lie_hold_nobody_up(
    run: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        rendezvous = await stack.enter_async_context(running(keys))
        strangers = [await stack.enter_async_context(running(keys, rendezvous)) for _ in range(4)]
        newcomer = await stack.enter_async_context(running(keys, rendezvous))
        *silent, liar, honest = strangers
        for node in silent:
            await keep_silent(node)
        await serve_damaged(liar, run)
        for node in strangers[:-1]:
            assert await Roster(node, run.run_id).publish(
                Advert(role="reliable", addresses=tuple(node.addresses()))
            )
        monkeypatch.setattr(manifest_fetch, "TRIES", 1)
        monkeypatch.setattr(manifest_fetch, "FILE_TIMEOUT_S", 15.0)  # the silent ones take all of it
        with pytest.raises(LocalError) as caught:
            await fetch_manifest(newcomer, [address(rendezvous)], run.run_id)
        assert caught.value.code == "HP-NET-006"
        assert f"peer {short_id(liar.peer_id)} gave no valid manifest: manifest damaged" in caplog.text

        monkeypatch.setattr(manifest_fetch, "FILE_TIMEOUT_S", 600.0)
        await serve(honest, run, tmp_path)
        assert await Roster(honest, run.run_id).publish(Advert(addresses=tuple(honest.addresses())))
        async with asyncio.timeout(100):
            found = await fetch_manifest(newcomer, [address(rendezvous)], run.run_id)
        assert found.peer == honest.peer_id


async def test_a_run_of_a_newer_version_is_not_searched_for_for_ever(
    run: RunDirectory, tmp_path: Path
) -> None:
    """A home that was in a run tries without end; but every copy of this manifest needs a newer version."""
    key = Ed25519PrivateKey.from_private_bytes((run.path / "owner.key").read_bytes())
    manifest = run.manifest.model_copy(update={"needs": ("privacy",)})
    data = sign(manifest, key)
    run_id = blake3(manifest.owner + unpack(data)["manifest"]).hexdigest()[:32]
    newer = RunDirectory(run.path, SignedManifest(manifest=manifest, run_id=run_id, data=data))
    keys = tmp_path / "keys"
    keys.mkdir()
    async with running(keys) as giver:
        await serve(giver, newer, tmp_path)
        home = Home(tmp_path / "home")
        home.identity()
        remember(home.path, newer.run_id, [address(giver)])
        async with asyncio.timeout(60):
            with pytest.raises(LocalError, match="too old for this run: it does not know privacy") as caught:
                async with arrived(NodeConfig(host="127.0.0.1"), home, newer.run_id):
                    pass
    assert caught.value.code == "HP-RUN-026"


async def test_who_comes_back_goes_on_to_the_next_peer_when_one_is_not_believed(
    run: RunDirectory, other: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Remembered addresses lead to the run that they are remembered of, or nowhere; named ones that lie
    are said, and passed over.
    """
    keys = tmp_path / "keys"
    keys.mkdir()
    async with running(keys) as liar, running(keys) as elsewhere, running(keys) as honest:
        await serve_damaged(liar, run)
        await serve(elsewhere, other, tmp_path)
        home = Home(tmp_path / "home")
        home.identity()
        remember(home.path, run.run_id, [address(elsewhere), address(liar)])
        remember_seen(home.path, run.run_id, [address(honest)])
        arriving = asyncio.create_task(arrive(NodeConfig(host="127.0.0.1"), home, run.run_id))
        await until(
            lambda: f"peer {short_id(elsewhere.peer_id)} gave no valid manifest" in caplog.text,
            "it is said",
            100.0,
        )
        assert not arriving.done()
        await serve(honest, run, tmp_path)
        named = NodeConfig(host="127.0.0.1", peers=(address(liar),))
        for arrival in (await asyncio.wait_for(arriving, 100), await arrive(named, home, "")):
            assert (arrival.signed.run_id, arrival.source) == (run.run_id, honest.peer_id)
        assert "manifest damaged" in caplog.text
        known = known_run(home.path, Destination((), run.run_id))
        assert known is not None
        assert known.named == (str(address(liar)),)


async def arrive(config: NodeConfig, home: Home, run: str) -> FoundRun:
    async with arrived(config, home, run) as arrival:
        return arrival


async def test_a_peer_that_hands_out_another_run_is_passed_over_for_one_that_the_dht_knows(
    run: RunDirectory, other: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

        monkeypatch.setattr(manifest_fetch, "TRIES", 1)
        with pytest.raises(LocalError) as caught:
            await fetch_manifest(newcomer, [address(newcomer)], "0" * 32)
        assert caught.value.code == "HP-NET-006"
        assert "0" * 32 in caught.value.what


async def advertise(node: Node, run_id: str, registered: bool = True) -> None:
    """Be found in the run, and register it if `registered`."""
    assert await Roster(node, run_id).publish(Advert(role="reliable", addresses=tuple(node.addresses())))
    if registered:
        assert await RunIndex(node).register(run_id)


async def test_without_a_name_the_only_run_of_the_dht_is_found_and_of_several_none(
    run: RunDirectory, other: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registered run counts only if somebody gives its manifest."""
    monkeypatch.setattr(manifest_fetch, "RETRY_S", 0.0)
    keys = tmp_path / "keys"
    keys.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        rendezvous = await stack.enter_async_context(running(keys))
        one, two, liar, newcomer = [
            await stack.enter_async_context(running(keys, rendezvous)) for _ in range(4)
        ]
        named = [address(rendezvous)]
        await serve_damaged(liar, run)
        await advertise(liar, "0" * 32)
        with pytest.raises(LocalError, match="HP-NET-006"):
            await fetch_manifest(newcomer, named)
        await serve(one, run, tmp_path)
        await advertise(one, run.run_id)
        found = await fetch_manifest(newcomer, named)
        assert (found.signed.run_id, found.peer) == (run.run_id, one.peer_id)
        with pytest.raises(LocalError, match="HP-NET-006"):
            await fetch_manifest(newcomer, named, any_of_dht=False)
        await serve(two, other, tmp_path)
        await advertise(two, other.run_id)
        with pytest.raises(LocalError, match="HP-ADDR-004: there are 2 runs") as caught:
            await fetch_manifest(newcomer, named)
        assert all(f"(--run {one.run_id})" in caught.value.why for one in (run, other))
        assert (await fetch_manifest(newcomer, named, other.run_id)).peer == two.peer_id


async def test_a_home_goes_back_to_its_run_and_to_no_other_of_the_same_dht(
    run: RunDirectory, other: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_fetch, "RETRY_S", 0.0)
    keys = tmp_path / "keys"
    keys.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        rendezvous = await stack.enter_async_context(running(keys))
        one, two = [await stack.enter_async_context(running(keys, rendezvous)) for _ in range(2)]
        await serve(one, run, tmp_path)
        await advertise(one, run.run_id, registered=False)
        await serve(two, other, tmp_path)
        await advertise(two, other.run_id)
        (tmp_path / "home").mkdir()
        home = Home(tmp_path / "home")
        remember(home.path, run.run_id, [address(rendezvous)])
        async with arrived(NodeConfig(peers=(address(rendezvous),)), home) as arrival:
            assert arrival.signed.run_id == run.run_id
