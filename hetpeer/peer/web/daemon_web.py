"""Web server of a daemon: dashboard and metrics of a volunteer or a reliable peer, or of a watcher alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from starlette.routing import BaseRoute

from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.discovery import Roster, TaskBoard
from hetpeer.peer.arrival.destinations import Destination
from hetpeer.peer.control.control_messages import ControlRequest
from hetpeer.peer.control.owned_daemon import is_service
from hetpeer.peer.daemon.owner_wishes import DaemonState
from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.process.console import say
from hetpeer.peer.process.lifecycle import unless
from hetpeer.peer.watching.log_questions import FromLog
from hetpeer.peer.watching.status_reader import Onlooker, observing
from hetpeer.peer.web.dashboard_page import Orders, ViewFeed, page_routes
from hetpeer.peer.web.http_server import served
from hetpeer.peer.web.machine_load import LoadMeter
from hetpeer.peer.web.machine_warnings import MachineWarnings
from hetpeer.peer.web.metric_sources import (
    RELIABLE_STATES,
    DaemonSource,
    ReliableSource,
    VolunteerSource,
    metrics_route,
)
from hetpeer.peer.web.page_view import PageView, you_of
from hetpeer.peer.web.request_guard import TOKEN_FILE, application, token_of

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.run_directory import RunDirectory
    from hetpeer.dht.node.node import Node
    from hetpeer.peer.control.owned_daemon import AttendedDaemon, OwnedDaemon
    from hetpeer.peer.daemon.limits_in_force import LimitsInForce
    from hetpeer.peer.daemon.owner_wishes import VolunteerDaemon
    from hetpeer.peer.daemon.presence import Presence
    from hetpeer.peer.reliable.reliable_peer import ReliablePeer


@contextlib.asynccontextmanager
async def volunteer_served(
    where: Where, presence: Presence, daemon: VolunteerDaemon, governing: LimitsInForce
) -> AsyncIterator[None]:
    """Serve a volunteer's dashboard and metrics while the context is open. Raises `LocalError` HP-WEB-001."""
    node, run, home = presence.node, presence.files.run, presence.home.path
    onlooker = _onlooker(node, run, FromLog(node))
    warnings = MachineWarnings(home, lambda: node.reach_estimate, lambda: governing.warnings)
    view = PageView(onlooker, LoadMeter(home), lambda: you_of(presence, daemon, governing), warnings.look)
    source = DaemonSource(node, "volunteer", run.manifest.name, home, tuple(DaemonState), warnings)
    metrics = VolunteerSource(
        source,
        lambda: daemon.standing.state,
        lambda: presence.life.volunteer,
        view.own_credit,
        governing,
    ).metrics
    orders = {do: lambda do=do: daemon.answer(ControlRequest(do=do)) for do in ("pause", "resume", "finish")}
    async with (
        _served(where, home, view, orders, metrics, _printed_by(home)) as (link, changed),
        _shown(daemon, link, changed),
    ):
        yield


@contextlib.asynccontextmanager
async def reliable_served(
    where: Where, node: Node, run: RunDirectory, peer: ReliablePeer, attended: AttendedDaemon
) -> AsyncIterator[None]:
    """Serve a reliable peer's dashboard (without buttons) and metrics. Raises `LocalError` HP-WEB-001."""
    manifest = run.manifest
    warnings = MachineWarnings(run.path, lambda: node.reach_estimate, lambda: filter(None, [peer.unsaved]))
    onlooker = _onlooker(node, run, FromLog(node, peer.answers))
    view = PageView(onlooker, LoadMeter(run.path), lambda: None, warnings.look)
    daemon = DaemonSource(node, "reliable", manifest.name, run.path, RELIABLE_STATES, warnings)
    source = ReliableSource(daemon, peer, manifest.training, grouped=manifest.averaging is not None)
    async with (
        _served(where, run.path, view, {}, source.metrics, _printed_by(run.path)) as (link, changed),
        _shown(attended, link, changed),
    ):
        yield


@contextlib.asynccontextmanager
async def watcher_served(where: Where, onlooker: Onlooker, folder: Path) -> AsyncIterator[None]:
    """Serve a watcher's dashboard without metrics; token in `folder`. Raises `LocalError` HP-WEB-001."""
    view = PageView(onlooker, LoadMeter(folder), lambda: None)
    async with _served(where, folder, view, {}, None, f"its token is in {folder / TOKEN_FILE}"):
        yield


@contextlib.asynccontextmanager
async def _shown(daemon: OwnedDaemon, link: str, changed: Callable[[], None]) -> AsyncIterator[None]:
    """Show the owner the link, and the page the daemon's changes, while the context is open."""
    daemon.shown_at(link, changed)
    try:
        yield
    finally:
        daemon.shown_at("")


def _printed_by(home: Path) -> str:
    return f"hetpeer dashboard --home {home} prints its link"


@contextlib.asynccontextmanager
async def _served(
    where: Where,
    folder: Path,
    view: PageView,
    orders: Orders,
    metrics: Callable[[], Iterable[Metric]] | None,
    way: str,
) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Serve `view`; the context's value is the link with the token, and a function to call at each change of
    the daemon.

    In a service the link is not printed, because others read the journal: `way` says how to get it.
    """
    feed, token = ViewFeed(view.look), token_of(folder)

    def changed() -> None:
        view.hurry()
        feed.look_now()

    routes: list[BaseRoute] = page_routes(feed, orders, view.picture)
    if metrics is not None:
        routes.append(metrics_route(metrics))
    tasks = TaskSet()
    try:
        async with served(application(routes, token, private=not where.is_loopback), where) as url:
            tasks.spawn(feed.run(), name="dashboard")
            link = f"{url}/#token={token}"
            say(f"dashboard at {url}/; {way}" if is_service() else f"dashboard at {link}")
            try:
                yield link, changed
            finally:
                await feed.close()
    finally:
        await tasks.close()
        await view.close()


def _onlooker(node: Node, run: RunDirectory, log: FromLog) -> Onlooker:
    roster, board = Roster(node, run.run_id), TaskBoard(node, run.run_id)
    return Onlooker(run.signed, node, roster, board, log, node.peer_id)


async def watch(goal: Destination, where: Where, leaving: asyncio.Event) -> None:
    """Serve the dashboard until `leaving` is set. Raises `LocalError` as `observing`, and HP-WEB-001."""
    await unless(leaving.wait(), _watch(goal, where))


async def _watch(goal: Destination, where: Where) -> None:
    with temporary_folder("watcher") as folder:
        async with observing(goal) as onlooker, watcher_served(where, onlooker, folder):
            await asyncio.Event().wait()  # until we are cancelled
