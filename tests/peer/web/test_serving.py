"""The daemon's web server: real requests to a real one."""

import asyncio
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.peer.metrics import daemon_metrics
from hetpeer.peer.web.app import application
from hetpeer.peer.web.metrics import metrics_route
from hetpeer.peer.web.serving import served
from tests.peer.test_metrics import DAEMON


def application_at(host):
    return application([metrics_route(lambda: daemon_metrics(DAEMON))], host)


def request(url, method="GET", **headers):
    """Status, headers and text of the answer."""
    asked = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


async def test_metrics_are_read_by_prometheus():
    async with served(application_at("127.0.0.1"), "127.0.0.1", 0) as url:
        status, headers, text = await asyncio.to_thread(request, f"{url}/metrics")
        assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
        found = {family.name: family for family in text_string_to_metric_families(text)}
        assert found["hetpeer_relay_connections"].samples[0].value == 2
        assert "python_info" not in found  # nothing of the library's global registry
        status, _, _ = await asyncio.to_thread(request, f"{url}/other")
        assert status == 404
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(request, f"{url}/metrics")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_nothing_can_be_changed(method):
    async with served(application_at("127.0.0.1"), "127.0.0.1", 0) as url:
        status, _, _ = await asyncio.to_thread(request, f"{url}/metrics", method)
        assert status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("[::1]:9464", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("127.0.0.1.evil.example:80", 400),
        ("", 400),
    ],
)
async def test_other_names_than_ours_are_not_answered(host, status):
    async with served(application_at("127.0.0.1"), "127.0.0.1", 0) as url:
        answered, _, text = await asyncio.to_thread(request, f"{url}/metrics", Host=host)
        assert answered == status
        assert ("hetpeer" in text) is (status == 200)


async def test_beyond_this_machine_its_addresses_are_its_names():
    async with served(application_at("0.0.0.0"), "0.0.0.0", 0) as url:
        port = url.rpartition(":")[2]
        status, _, _ = await asyncio.to_thread(request, f"http://127.0.0.1:{port}/metrics")
        assert status == 200


async def test_a_port_that_is_taken_is_said():
    async with served(application_at("127.0.0.1"), "127.0.0.1", 0) as url:
        with pytest.raises(LocalError) as caught:
            async with served(application_at("127.0.0.1"), "127.0.0.1", int(url.rpartition(":")[2])):
                pass
    assert (caught.value.code, caught.value.exit_code) == ("HP-WEB-001", ExitCode.NETWORK)


async def test_the_daemon_keeps_its_signals():
    """uvicorn takes SIGINT and SIGTERM for itself, unless it is told not to."""
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, heard.set)
    try:
        async with served(application_at("127.0.0.1"), "127.0.0.1", 0) as url:
            await asyncio.to_thread(request, f"{url}/metrics")
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(heard.wait(), 10)
            status, _, _ = await asyncio.to_thread(request, f"{url}/metrics")
            assert status == 200
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def test_a_daemon_that_serves_nothing_loads_nothing_of_it():
    loaded = (
        "import sys, hetpeer.peer.joining, hetpeer.peer.reliable;"
        "print([m for m in ('starlette', 'uvicorn', 'prometheus_client', 'hetpeer.peer.web') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
