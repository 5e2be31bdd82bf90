"""The direct port: TCP with TLS for peers that libp2p has introduced. Docs: links.md, "Direct lanes".

A peer that asks over libp2p, which proves its id, is told the port, the certificate that answers there and a
ticket of its own. There the ticket proves its id and the certificate ours; both live as long as this process.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import logging
import secrets
import socket
import ssl
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hetpeer.dht.base.errors import ProtocolError, RemoteError
from hetpeer.dht.base.runtime import TaskSet, process_folder
from hetpeer.dht.identity.addresses import network_in
from hetpeer.dht.p2pd.listener import Listener
from hetpeer.dht.streams.byte_transport import ByteTransport
from hetpeer.dht.streams.stream import Stream

PROTOCOL: Final = "hetpeer/1/direct"
TICKET_BYTES = 32
MAX_PROTOCOL = 255
MAX_TICKETS = 4096
"""Peers that may connect. The one that has neither asked nor connected for longest has to ask again."""
MAX_UNKNOWN = 128
"""Connections without a ticket so far, from the first packet on: each costs a TLS handshake and a file."""
MAX_UNKNOWN_THERE = 32
"""The same from one IPv4 address or customer's IPv6 network (/48), which get in within a few round trips."""
FULL_S = 1.0
"""Seconds to wait when no more files can be opened."""
INTRODUCTION_S = 5.0
UNSENT = 256 * 1024
"""Bytes that may wait in the kernel, so that urgent frames do not queue behind more."""
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_YEARS = 100

_log = logging.getLogger(__name__)


class TlsListener:
    """Takes direct streams and hands them to `listener`, as p2pd does."""

    def __init__(self, host: str, port: int, listener: Listener) -> None:
        self._host = host
        self._port = port
        self._listener = listener
        self._listening: socket.socket | None = None
        self._context: ssl.SSLContext | None = None
        self._tickets: dict[str, bytes] = {}
        """Peer → its ticket; the most recently used last."""
        self._peers: dict[bytes, str] = {}
        self._print = b""
        self._unknown: Counter[str] = Counter()
        """Network → connections from there without a ticket."""
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        certificate, key = _certificate()
        self._print = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()
        self._context = _context(certificate, key)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listening = socket.create_server((self._host, self._port), family=family)
        self._listening.setblocking(False)
        self._tasks.spawn(self._accept(self._listening), name="direct port")

    @property
    def port(self) -> int:
        """The TCP port that we listen on."""
        assert self._listening is not None
        return int(self._listening.getsockname()[1])

    async def handle(self, stream: Stream) -> None:
        """Answer a peer that asks for the port and a ticket; passed to `Listener.serve`."""
        await stream.receive(payload_limit=0, timeout_s=INTRODUCTION_S)
        ticket = self._tickets.pop(stream.peer_id, None)
        if ticket is None:
            while len(self._tickets) >= MAX_TICKETS:
                del self._peers[self._tickets.pop(next(iter(self._tickets)))]
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._peers[ticket] = stream.peer_id
        self._tickets[stream.peer_id] = ticket  # the newest now
        answer = {"port": self.port, "certificate": self._print, "ticket": ticket}
        await stream.send(answer, timeout_s=INTRODUCTION_S)

    async def close(self) -> None:
        """Accept no more. Idempotent."""
        await self._tasks.close()
        if self._listening is not None:
            self._listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections for ever; few without a ticket are let in at a time, in all and per network."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, (ip, *_) = await loop.sock_accept(listening)
            except OSError as error:
                _log.warning("the direct port is closed for %.0f s: %s", FULL_S, error)
                await asyncio.sleep(FULL_S)
                continue
            network = network_in(f"/ip6/{ip}") if ":" in ip else ip
            if self._unknown.total() >= MAX_UNKNOWN or self._unknown[network] >= MAX_UNKNOWN_THERE:
                _log.debug("too many have not shown a ticket: %s is not let in", ip)
                connected.close()
                continue
            self._unknown[network] += 1
            self._tasks.spawn(self._serve(connected, network), name="direct stream")

    async def _serve(self, connected: socket.socket, network: str) -> None:
        """Hand a connection over to the listener if it shows a ticket within INTRODUCTION_S."""
        wire = ByteTransport()
        try:
            async with asyncio.timeout(INTRODUCTION_S):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: wire, connected, ssl=self._context, ssl_handshake_timeout=INTRODUCTION_S
                )
                head = await wire.read(TICKET_BYTES + 1)
                protocol = (await wire.read(head[-1])).decode()
        except (OSError, RemoteError, UnicodeDecodeError) as error:
            _log.debug("a direct stream without introduction: %s", error)
            wire.abort()
            return
        except asyncio.CancelledError:
            wire.abort()
            raise
        finally:
            self._unknown -= Counter([network])
        peer = self._peers.get(head[:TICKET_BYTES])
        if peer is None:
            _log.debug("a direct stream with a ticket that is none")
            wire.abort()
            return
        self._tickets[peer] = self._tickets.pop(peer)  # the newest now
        prepare(wire)
        await self._listener.carry(wire, peer, wire.remote, protocol)


def prepare(wire: ByteTransport) -> None:
    """Limit the unsent bytes that wait in the kernel to UNSENT."""
    sock = wire.socket
    if sock is not None:
        with suppress(OSError):  # not every system has it
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT)


def invitation(header: Any, peer: str) -> tuple[int, bytes, bytes]:
    """(port, SHA-256 of the certificate, ticket) in a peer's answer. Raises `ProtocolError`."""
    port, certificate, ticket = (header.get(name) for name in ("port", "certificate", "ticket"))
    if type(port) is not int or not 0 < port < 2**16:  # True is an int, too
        raise ProtocolError("a direct port without a port", peer=peer)
    if not isinstance(certificate, bytes) or len(certificate) != hashlib.sha256().digest_size:
        raise ProtocolError("a direct port without a certificate", peer=peer)
    if not isinstance(ticket, bytes) or len(ticket) != TICKET_BYTES:
        raise ProtocolError("a direct port without a ticket", peer=peer)
    return port, certificate, ticket


def _certificate() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A self-signed certificate without content, known by its bytes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hetpeer")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=365 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    return made, key


def _context(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> ssl.SSLContext:
    """Python reads keys only from files: a private one that is deleted at once."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    with process_folder("tls") as folder:
        path = Path(folder) / "certificate.pem"
        secret = key.private_bytes(encoding, pem, serialization.NoEncryption())
        path.write_bytes(secret + certificate.public_bytes(encoding))
        context.load_cert_chain(path)
    return context
