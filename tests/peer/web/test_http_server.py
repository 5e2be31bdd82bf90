"""The daemon's web server: real requests to a real one."""

import asyncio
import contextlib
import ipaddress
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.limits.web_address import Where
from hetpeer.peer.watching.metric_families import daemon_metrics
from hetpeer.peer.web import http_server
from hetpeer.peer.web.http_server import served
from hetpeer.peer.web.metric_sources import metrics_route
from hetpeer.peer.web.request_guard import application
from tests.peer.test_metric_families import DAEMON

TOKEN = "token-of-a-test"
HERE = Where("127.0.0.1", 0)


def app(*, private=False):
    return application([metrics_route(lambda: daemon_metrics(DAEMON))], TOKEN, private=private)


def request(url, method="GET", **headers):
    """Status, headers and text of the answer."""
    asked = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


async def test_metrics_are_read_by_prometheus():
    async with served(app(), HERE) as url:
        status, headers, text = await asyncio.to_thread(request, f"{url}/metrics")
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
        found = {family.name: family for family in text_string_to_metric_families(text)}
        assert found["hetpeer_relay_connections"].samples[0].value == 2
        assert "python_info" not in found  # nothing of the library's global registry
        status, _, _ = await asyncio.to_thread(request, f"{url}/other")
        assert status == 404
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(request, f"{url}/metrics")


async def test_the_address_of_a_server_that_listens_everywhere_is_one_that_others_can_use():
    async with served(app(), Where("0.0.0.0", 0)) as url:
        assert not ipaddress.ip_address(url.rpartition(":")[0].removeprefix("http://")).is_unspecified
        status, _, _ = await asyncio.to_thread(request, f"{url}/metrics")
        assert status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_metrics_cannot_be_changed(method):
    async with served(app(), HERE) as url:
        status, _, _ = await asyncio.to_thread(
            request, f"{url}/metrics", method, Authorization=f"Bearer {TOKEN}"
        )
        assert status == 405


async def test_beyond_this_machine_the_token_is_needed():
    async with served(app(private=True), Where("0.0.0.0", 0)) as url:
        metrics = f"http://127.0.0.1:{url.rpartition(':')[2]}/metrics"
        assert (await asyncio.to_thread(request, metrics))[0] == 401
        assert (await asyncio.to_thread(request, metrics, Authorization=f"Bearer {TOKEN}"))[0] == 200


async def test_the_server_wakes_the_daemon_once_a_second_and_answers_tell_the_time(monkeypatch):
    ticks = []
    tick = uvicorn.Server.on_tick

    async def counted(self, counter):
        ticks.append(counter)
        return await tick(self, counter)

    monkeypatch.setattr(uvicorn.Server, "on_tick", counted)
    async with served(app(), HERE) as url:
        _, first, _ = await asyncio.to_thread(request, f"{url}/metrics")
        began = asyncio.get_running_loop().time()
        before = len(ticks)
        later = first
        async with asyncio.timeout(60):
            while later["date"] == first["date"]:
                await asyncio.sleep(0.2)
                _, later, _ = await asyncio.to_thread(request, f"{url}/metrics")
        passed = asyncio.get_running_loop().time() - began
        assert len(ticks) - before <= passed / http_server.TICK_S + 1


async def test_a_port_that_is_taken_is_said_or_another_is_taken():
    async with served(app(), HERE) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(LocalError) as caught:
            async with served(app(), Where("127.0.0.1", port)):
                pass
        async with served(app(), Where("127.0.0.1", port, or_any=True)) as other:
            assert other != url
    assert (caught.value.code, caught.value.exit_code) == ("HP-WEB-001", ExitCode.NETWORK)


async def connected(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_who_connects_and_asks_nothing_locks_nobody_out():
    async with served(app(), HERE) as url, contextlib.AsyncExitStack() as stack:
        silent = []
        for number in range(2 * http_server.MAX_CONNECTIONS):
            reader, writer = await connected(url)
            stack.callback(writer.close)
            if number % 2:
                writer.write(b"GET /metrics HTTP/1.1\r\n")  # a part of a request
                await writer.drain()
            silent.append(reader)
        status, _, _ = await asyncio.to_thread(request, f"{url}/metrics")
        assert status == 200
        with contextlib.suppress(ConnectionResetError):  # the first one has given way
            assert await asyncio.wait_for(silent[0].read(), 60) == b""
        assert not silent[-1].at_eof()


async def test_an_idle_connection_ends_and_one_that_is_answered_does_not(monkeypatch):
    monkeypatch.setattr(http_server, "IDLE_S", 2.0)
    going_on = asyncio.Event()

    async def slowly(_request):
        await going_on.wait()
        return PlainTextResponse("at last")

    async def idle(url, began):
        reader, writer = await connected(url)
        writer.write(began)
        with contextlib.suppress(ConnectionResetError):
            said = await asyncio.wait_for(reader.read(), 60)
            assert said.startswith(b"HTTP/1.1 404" if began.endswith(b"\r\n\r\n") else b"")
        writer.close()

    async with served(application([Route("/slow", slowly)], TOKEN, private=False), HERE) as url:
        waiting = asyncio.ensure_future(asyncio.to_thread(request, f"{url}/slow"))
        await asyncio.gather(
            idle(url, b""),
            idle(url, b"GET /slow HTTP/1.1\r\nHost: local"),
            idle(url, b"GET /other HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        )
        assert not waiting.done()
        going_on.set()
        assert (await waiting)[::2] == (200, "at last")


async def test_the_daemon_keeps_its_signals():
    """uvicorn takes SIGINT and SIGTERM for itself, unless it is told not to."""
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, heard.set)
    try:
        async with served(app(), HERE) as url:
            await asyncio.to_thread(request, f"{url}/metrics")
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(heard.wait(), 10)
            status, _, _ = await asyncio.to_thread(request, f"{url}/metrics")
            assert status == 200
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def test_a_daemon_that_serves_nothing_loads_nothing_of_it():
    loaded = (
        "import sys, hetpeer.peer.daemon.join_run, hetpeer.peer.reliable.reliable_peer;"
        "print([m for m in ('starlette', 'uvicorn', 'prometheus_client', 'hetpeer.peer.web') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
