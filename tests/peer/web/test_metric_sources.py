"""Where a daemon's figures come from, with a real node, a real log and real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import uvloop
from prometheus_client.metrics_core import Metric

from hetpeer.bootstrap.consensus.replica import Replica, run_logs
from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.discovery import Roster, TaskBoard
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind
from hetpeer.peer.reliable.reliable_peer import ReliablePeer
from hetpeer.peer.watching.log_questions import FromLog
from hetpeer.peer.watching.status_reader import Onlooker
from hetpeer.peer.web import page_view
from hetpeer.peer.web.machine_load import LoadMeter
from hetpeer.peer.web.machine_warnings import MachineWarnings
from hetpeer.peer.web.metric_sources import FOLLOWING, RELIABLE_STATES, DaemonSource, ReliableSource
from hetpeer.peer.web.page_view import PageView
from tests.bootstrap.engine import TRAINING, Engine, make_run

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("test_metric_sources"),  # its tests share a network
]

Samples = dict[tuple[str, ...], float]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four steps, of which the third was done twice."""
    folder = tmp_path_factory.mktemp("trained")
    run = make_run(folder)
    Engine(run, [Identity.create(folder / f"volunteer-{number}.key") for number in range(2)]).train()
    return run


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(trained: RunDirectory) -> AsyncIterator[Node]:
    """That of the run's reliable peer, with nobody else there."""
    config = NodeConfig(host="127.0.0.1", alone_ok=True)
    started = await Node.start(config, Identity.load(trained.identity_path))
    try:
        yield started
    finally:
        await started.close()


def reliable_peer(node: Node, run: RunDirectory) -> Iterator[ReliablePeer]:
    with run_logs(run) as logs:
        yield ReliablePeer(
            node, run, Replica(node, run, MembershipConfig(run.signed, run.path), logs, SystemClock())
        )


@pytest.fixture
def peer(node: Node, trained: RunDirectory) -> Iterator[ReliablePeer]:
    """It has the log of the trained run."""
    yield from reliable_peer(node, trained)


def samples(families: Iterable[Metric]) -> Samples:
    """(name, labels…) → value."""
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def source_of(node: Node, peer: ReliablePeer, run: RunDirectory, *, grouped: bool = False) -> ReliableSource:
    daemon = DaemonSource(
        node,
        "reliable",
        run.manifest.name,
        run.path,
        RELIABLE_STATES,
        MachineWarnings(run.path, lambda: node.reach_estimate),
    )
    return ReliableSource(daemon, peer, run.manifest.training, grouped=grouped)


@pytest.fixture
def alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has no children but those of the test: servers of other tests live as long as it does."""
    children = psutil.Process.children
    others = {child.pid for child in psutil.Process().children(recursive=True)} - {node.p2pd_pid}

    def own(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in children(process, recursive=recursive) if child.pid not in others]

    monkeypatch.setattr(psutil.Process, "children", own)


@pytest.mark.usefixtures("alone")
async def test_a_daemon_its_processes_and_its_place_in_the_network(node: Node, tmp_path: Path) -> None:
    source = DaemonSource(
        node,
        "volunteer",
        "tiny",
        tmp_path,
        ("starting", "training"),
        MachineWarnings(tmp_path, lambda: ReachEstimate(reach=ReachKind.PRIVATE, peers=2)),
    )
    node.dht.declare("nobody's", lambda _peer_id: False)
    assert not await node.dht.store("nobody's", {}, ttl_s=30.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        seen = source.look("training")
        child.kill()
    assert seen.resident.keys() == seen.cpu.keys() == {"daemon", "p2pd", "worker"}
    assert min(seen.resident.values()) > 0
    assert seen.cpu["daemon"] > 0
    assert (seen.role, seen.run, seen.state) == ("volunteer", "tiny", "training")
    assert 0 < time.time() - seen.started < 3600
    assert (seen.reach, seen.relays, seen.p2pd_restarts, seen.dht_refused) == ("unknown", 0, 0, 1)
    assert "HP-NET-015" in seen.warnings
    assert seen.transmitted >= 0
    assert source.look("starting").resident.keys() == {"daemon", "p2pd"}


async def test_the_log_of_a_reliable_peer_that_follows(
    node: Node, peer: ReliablePeer, trained: RunDirectory
) -> None:
    source = source_of(node, peer, trained)
    found = samples(source.metrics())
    assert found["hetpeer_state", FOLLOWING] == 1
    assert sum(found["hetpeer_state", state] for state in RELIABLE_STATES) == 1
    assert found["hetpeer_leading",] == 0
    assert found["hetpeer_step",] == TRAINING.steps
    assert found["hetpeer_log_records_total", "commit"] == TRAINING.steps + 1
    assert found["hetpeer_log_records_total", "rollback"] == 1
    assert found["hetpeer_contributors",] == 2
    manifest = trained.manifest
    work = TRAINING.steps * TRAINING.batch_size * len(manifest.blocks)
    assert found["hetpeer_credit",] == work * manifest.data.tokens_per_sample
    assert "hetpeer_swarm_peers" not in {name for name, *_ in found}
    assert samples(source.metrics())["hetpeer_log_records_total", "commit"] == TRAINING.steps + 1
    grouped = samples(source_of(node, peer, trained, grouped=True).metrics())
    assert "hetpeer_step" not in {name for name, *_ in grouped}


async def test_a_reliable_peer_that_leads_says_how_the_swarm_is(node: Node, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for peer in reliable_peer(node, run):
        work = asyncio.create_task(peer.run(asyncio.Event()))
        await asyncio.wait_for(peer.ready.wait(), 150)
        found = samples(source_of(node, peer, run).metrics())
        work.cancel()
        await asyncio.wait([work])
    assert (found["hetpeer_leading",], found["hetpeer_state", "waiting"]) == (1, 1)
    assert found["hetpeer_swarm_peers", "working"] == 0
    assert all(found["hetpeer_swarm_block_replicas", str(b.index)] == 0 for b in run.manifest.blocks)


async def test_the_log_is_asked_only_while_somebody_watches(
    node: Node, peer: ReliablePeer, trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counted(kind: str) -> Callable[[str], bytes]:
        def answer(about: str) -> bytes:
            asked.append(kind)
            return peer.answers[kind](about)

        return answer

    volunteer = next(iter(peer.replica.credit.of))
    log = FromLog(node, {kind: counted(kind) for kind in peer.answers})
    roster, board = Roster(node, trained.run_id), TaskBoard(node, trained.run_id)
    monkeypatch.setattr(page_view, "ANSWER_S", 150.0)  # what is asked for is seen in the view that asks
    seen = PageView(
        Onlooker(trained.signed, node, roster, board, log, volunteer), LoadMeter(tmp_path), lambda: None
    )
    assert (await seen.look(False))["status"]["credit"] is None
    assert asked == []
    shown = await seen.look(True)
    assert asked == ["credit", "moves", "departures", "plan", "curves"]
    assert len(shown["curves"]["training"]) == TRAINING.steps
    later = await seen.look(False)
    assert asked == ["credit", "moves", "departures", "plan", "curves"]
    assert later["curves"] == shown["curves"] | {"speed": later["curves"]["speed"]}
    assert later["status"]["credit"] == shown["status"]["credit"]

    assert seen.own_credit() == peer.replica.credit.of[volunteer]  # for the metrics
    await seen.look(False)
    figures = ["credit", "moves", "departures", "plan"]
    assert asked == [*figures, "curves", *figures]
    monkeypatch.setattr(page_view, "CREDIT_S", -1.0)
    seen.own_credit()
    await seen.look(False)
    figures = ["credit", "moves", "departures", "plan"]
    assert asked == [*figures, "curves", *figures]
