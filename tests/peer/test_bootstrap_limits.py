"""Limits of a reliable peer's line, with real nodes: options and `config.toml` as for a volunteer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.file_service import fetch
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival.rendezvous import RendezvousOptions, serve_rendezvous
from hetpeer.peer.cli.main import app
from hetpeer.peer.control.control_client import ask
from hetpeer.peer.control.control_messages import ControlRequest
from hetpeer.peer.limits.config_file import effective
from hetpeer.peer.limits.setting_layers import MergedSettings
from hetpeer.peer.reliable.serve_run import BootstrapOptions, serve_run
from tests.bootstrap.engine import make_run

pytestmark = pytest.mark.swarm

SLOW = "256kbit"
RATE = 32_000
"""Bytes a second of SLOW."""


@contextlib.asynccontextmanager
async def serving(run: RunDirectory, limits: MergedSettings) -> AsyncIterator[str]:
    """A reliable peer of `run` in this process, and its address."""
    leaving, found = asyncio.Event(), asyncio.get_running_loop().create_future()
    options = BootstrapOptions(directory=run.path, host="127.0.0.1", port=0, limits=limits)
    work = asyncio.ensure_future(serve_run(options, leaving, lambda address, _: found.set_result(address)))
    try:
        await asyncio.wait({work, found}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        yield found.result()
    finally:
        leaving.set()
        await work


def typed(*words: str) -> str:
    done = CliRunner().invoke(app, ["config", "set", *words])
    if isinstance(done.exception, LocalError):
        raise done.exception
    return done.output


async def test_a_reliable_peer_sends_no_faster_than_its_owner_allows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    home = run.path
    nbytes = (run.path / "manifest.hetpeer").stat().st_size
    times = 2 + RATE // nbytes
    async with serving(run, effective(home, {"limits.up": SLOW})) as address:
        giver = parse_address(address)
        client = await Node.start(NodeConfig(peers=(giver,)), Identity.create(tmp_path / "client.key"))
        try:

            async def fetch_often() -> float:
                begun = time.monotonic()
                for _ in range(times):
                    await fetch(client, giver.peer_id, "manifest", 1 << 20, 60.0)
                return time.monotonic() - begun

            assert await fetch_often() > 0.8 * (times * nbytes - RATE / 10) / RATE
            settings = (await asyncio.to_thread(ask, home, ControlRequest(do="status"))).settings
            assert (settings["limits.up"].value, settings["limits.up"].source) == (SLOW, "the command line")
            assert (home / "config.toml").read_text() == f'[limits]\nup = "{SLOW}"\n'
            said = await asyncio.to_thread(typed, "limits.up", "none", "--home", str(home))
            assert said == f"{home}/config.toml: limits.up is none from now on\n"
            settings = (await asyncio.to_thread(ask, home, ControlRequest(do="status"))).settings
            assert settings["limits.up"].value == "none"
            with pytest.raises(LocalError, match=r"has no limits\.ram") as caught:
                await asyncio.to_thread(typed, "limits.ram", "1GiB", "--home", str(home))
            assert (caught.value.code, caught.value.exit_code) == ("HP-CTL-005", ExitCode.USAGE)
            await fetch_often()
        finally:
            await client.close()


async def test_a_rendezvous_has_them_too(tmp_path: Path) -> None:
    leaving, ready = asyncio.Event(), asyncio.Event()
    place = tmp_path / "rendezvous"
    limits = effective(place, {"limits.down": SLOW})
    options = RendezvousOptions(home=tmp_path, host="127.0.0.1", port=0, limits=limits)
    work = asyncio.ensure_future(serve_rendezvous(options, leaving, lambda _: ready.set()))
    async with asyncio.timeout(60):
        await ready.wait()
    settings = (await asyncio.to_thread(ask, place, ControlRequest(do="status"))).settings
    leaving.set()
    await work
    assert settings["limits.down"].value == SLOW
    assert effective(place, {}).settings.limits.down == SLOW


def test_a_rate_that_is_none_starts_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    done = CliRunner().invoke(app, ["bootstrap", str(run.path), "--up-limit", "fast"])
    assert isinstance(done.exception, LocalError)
    assert (done.exception.code, done.exception.exit_code) == ("HP-CONF-003", ExitCode.CONFIG)
    assert not (run.path / "config.toml").exists()
