"""TCP connections to p2pd that speak another protocol or say nothing: others are served, all files closed."""

from __future__ import annotations

import asyncio
import random
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.dht.p2pd import silent_connections
from hetpeer.dht.p2pd.silent_connections import MAX_UNKNOWN, _end_of
from hetpeer.dht.streams.frame import encode_head
from hetpeer.dht.streams.stream import Stream
from tests.dht.test_channel import until

ECHO = "test/echo"
SILENT, FEW_FILES = 1000, 600
FOREIGN = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: hetpeer\r\n\r\n" * 100,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(4096),
    "random bytes": random.Random(0).randbytes(1 << 16),
    "our frames without libp2p": encode_head({"key": "x", "has": 0, "begun": False}, 0) * 100,
    "another libp2p protocol": b"\x13/multistream/1.0.0\n\x09/ipfs/x/1\n" * 200,
}


async def echo(stream: Stream) -> None:
    while True:
        await stream.send((await stream.receive(payload_limit=0)).header)


async def answers(stream: Stream) -> bool:
    await stream.send({"n": 1})
    return (await stream.receive(timeout_s=60.0)).header == {"n": 1}


@asynccontextmanager
async def a_node_and_its_peer(folder: Path) -> AsyncIterator[tuple[Node, Node]]:
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for name in ("node", "peer"):
            known = (parse_address(nodes[0].addresses()[0]),) if nodes else ()
            nodes.append(await Node.start(NodeConfig(peers=known), Identity.create(folder / name)))
            stack.push_async_callback(nodes[-1].close)
        await nodes[0].serve(ECHO, echo)
        yield nodes[0], nodes[1]


@contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * SILENT), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def connected(where: tuple[str, int]) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, where)
    return one


async def test_connections_in_another_protocol_are_closed(tmp_path: Path) -> None:
    async with a_node_and_its_peer(tmp_path) as (node, peer):
        where = parse_address(node.addresses()[0]).socket
        p2pd, loop = psutil.Process(node.p2pd_pid), asyncio.get_running_loop()
        async with await peer.open(node.peer_id, ECHO) as stream:
            assert await answers(stream)
            files, own = p2pd.num_fds(), psutil.Process().num_fds()
            assert where is not None

            async def says(what: bytes) -> None:
                with await connected(where) as one, suppress(ConnectionError):
                    await loop.sock_sendall(one, what)
                    async with asyncio.timeout(60):
                        while await loop.sock_recv(one, 4096):
                            pass

            await asyncio.gather(*map(says, FOREIGN.values()))
            assert await answers(stream)
            await until(lambda: p2pd.num_fds() <= files, 60.0)
            assert psutil.Process().num_fds() <= own
        assert not node.listener.strikes.counts(), "nobody has said who it is"


async def test_a_thousand_connections_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stream that is there goes on, a new one is opened, a newcomer joins; what they took is given back.

    p2pd may have fewer files than that: some of the connections are ended within seconds, in one line.
    """
    with many_files():
        async with a_node_and_its_peer(tmp_path) as (node, peer):
            address = parse_address(node.addresses()[0])
            p2pd = psutil.Process(node.p2pd_pid)
            async with await peer.open(node.peer_id, ECHO) as stream:
                assert await answers(stream)
                files, own = p2pd.num_fds(), psutil.Process().num_fds()
                resource.prlimit(p2pd.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
                assert address.socket is not None
                silent = [await connected(address.socket) for _ in range(SILENT)]
                try:
                    assert await answers(stream)
                    await until(lambda: p2pd.num_fds() <= files + MAX_UNKNOWN, 60.0)
                    async with await peer.open(node.peer_id, ECHO) as another:
                        assert await answers(another)
                    newcomer = await Node.start(
                        NodeConfig(peers=(address,)), Identity.create(tmp_path / "new")
                    )
                    async with await newcomer.open(node.peer_id, ECHO) as another:
                        assert await answers(another)
                    await newcomer.close()
                finally:
                    for one in silent:
                        one.close()
                await until(lambda: p2pd.num_fds() <= files + 2, 60.0)
                await until(lambda: psutil.Process().num_fds() <= own + 4, 60.0)
                assert await answers(stream)
            assert node.restarts == 0
            assert caplog.text.count("connections to our port say nothing: most of them are closed") == 1


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("0000000000000000FFFF00000100007F:0016", ("127.0.0.1", 22)),
        ("B80D01200000000067452301EFCDAB89:01BB", ("2001:db8::123:4567:89ab:cdef", 443)),
    ],
)
@pytest.mark.skipif(sys.byteorder == "big", reason="these are the words of a little-endian machine")
def test_ends_of_connections_as_the_kernel_writes_them(text: str, end: tuple[str, int]) -> None:
    assert _end_of(text) == end


async def test_what_the_system_does_not_let_us_close_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_connections, "MAX_UNKNOWN", 4)
    monkeypatch.setattr(silent_connections, "_PIDFD_GETFD", -1)  # no system call: ENOSYS
    async with a_node_and_its_peer(tmp_path) as (node, _):
        where = parse_address(node.addresses()[0]).socket
        assert where is not None
        silent = [await connected(where) for _ in range(20)]
        await until(lambda: "does not let us close them" in caplog.text)
        for one in silent:
            assert one.send(b"\x13") == 1, "it is there"
            one.close()
    assert caplog.text.count("does not let us close them") == 1
