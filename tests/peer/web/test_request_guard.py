"""Which requests a daemon's web server answers, and its token: a real server, asked over real connections."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hetpeer.peer.web.request_guard import TOKEN_FILE, RequestGuard, token_of

TOKEN = "0123456789abcdef"


async def answer(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("here")


APP = Starlette(
    routes=[
        Route(path, answer, methods=["GET", "POST"])
        for path in ("/", "/static/app.js", "/healthz", "/api/v1/status", "/api/v1/pause")
    ]
)


@contextmanager
def serving(*, private: bool) -> Iterator[int]:
    """The port of a server that runs until the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(RequestGuard(APP, TOKEN, names=["box.local"], private=private), log_level="error")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def local() -> Iterator[int]:
    with serving(private=False) as port:
        yield port


@pytest.fixture(scope="module")
def private() -> Iterator[int]:
    with serving(private=True) as port:
        yield port


def ask(port: int, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


def test_everybody_on_this_machine_may_look(local: int) -> None:
    assert ask(local, "GET", "/api/v1/status").status == 200


@pytest.mark.parametrize(
    "host", ["localhost:8787", "127.0.0.1", "[::1]:8787", "192.168.1.20:8787", "box.local", "BOX.local:1"]
)
def test_names_of_this_machine(local: int, host: str) -> None:
    assert ask(local, "GET", "/", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8787",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[evil]:1",
        "",
        "1.2.3",
    ],
)
def test_a_name_that_somebody_else_has_chosen(local: int, host: str) -> None:
    assert ask(local, "GET", "/", Host=host).status == 421


def test_orders_need_the_token(local: int) -> None:
    assert ask(local, "POST", "/api/v1/pause").status == 401
    assert ask(local, "POST", "/api/v1/pause", Authorization="Bearer wrong").status == 401
    assert ask(local, "POST", "/api/v1/pause", Authorization=TOKEN).status == 401
    assert ask(local, "POST", "/api/v1/pause", Authorization=f"Bearer {TOKEN}").status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_another_site_is_not_answered_even_with_the_token(local: int, origin: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Origin": origin}
    assert ask(local, "POST", "/api/v1/pause", **headers).status == 403
    assert ask(local, "GET", "/api/v1/status", **headers).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_page_loads_without_saying_where_from(local: int, site: str) -> None:
    """As `fetch` with no-cors or `<img>` do; a link to the page is one, too."""
    headers = {"Sec-Fetch-Site": site}
    for path in ("/api/v1/status", "/static/app.js", "/healthz"):
        assert ask(local, "GET", path, **headers).status == 403
    assert ask(local, "GET", "/", **headers).status == 200
    assert ask(local, "POST", "/", **headers).status == 401
    for own in ("same-origin", "none"):
        assert ask(local, "GET", "/api/v1/status", **{"Sec-Fetch-Site": own}).status == 200


def test_our_own_page_is_answered(local: int) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Origin": f"http://127.0.0.1:{local}"}
    assert ask(local, "POST", "/api/v1/pause", **headers).status == 200


def test_beyond_this_machine_reading_needs_the_token(private: int) -> None:
    assert ask(private, "GET", "/api/v1/status").status == 401
    assert ask(private, "GET", f"/api/v1/status?token={TOKEN}").status == 200
    assert ask(private, "GET", "/api/v1/status", Authorization=f"Bearer {TOKEN}").status == 200
    for path in ("/", "/static/app.js", "/healthz"):
        assert ask(private, "GET", path).status == 200


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/v1/pause"])
def test_no_page_may_load_anything_from_elsewhere(local: int, path: str) -> None:
    response = ask(local, "GET", path)
    assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_a_refusal_has_the_headers_too(local: int) -> None:
    assert "Content-Security-Policy" in ask(local, "GET", "/", Host="evil.example").headers


def test_it_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    assert len(token) >= 20
    assert token_of(tmp_path) == token
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert token_of(other) != token


@pytest.mark.parametrize("content", [b"", b"short", b"<b>" * 10, b"\xff" * 30, b"a" * 65])
def test_one_that_is_none_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TOKEN_FILE).write_bytes(content)
    (tmp_path / TOKEN_FILE).chmod(0o600)
    assert len(token_of(tmp_path)) == 24


def test_one_that_others_can_read_is_made_anew(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(0o644)
    assert token_of(tmp_path) != token
