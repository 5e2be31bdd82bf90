"""Fresh TCP connections past libp2p. They tell whether the right peer listens at an address.

p2pd would use a connection that it has already, and does not dial for seconds after a failed dial. We speak
the first words of a libp2p connection ourselves: multistream-select, then TLS 1.3, in which the listener's
certificate proves its peer id (github.com/libp2p/specs, tls). Nothing is sent after the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

from hetpeer.dht.base.untrusted import read_fields
from hetpeer.dht.identity.peer_identity import peer_id_of, verify

_HEADER, _TLS = b"\x13/multistream/1.0.0\n", b"\x0b/tls/1.0.0\n"
_EXTENSION = "1.3.6.1.4.1.53594.1.1"
_SIGNED = b"libp2p-tls-handshake:"
_MAX_CERTIFICATE = 16 * 1024


async def listens(ip: str, port: int, timeout_s: float) -> bool:
    """Whether a TCP connection to (`ip`, `port`) succeeds within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(ip, port)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


async def is_peer(ip: str, port: int, peer_id: str, timeout_s: float) -> bool:
    """Whether `peer_id` itself answers there within `timeout_s`, proved by its key."""
    try:
        async with asyncio.timeout(timeout_s):
            certificate = await _certificate_at(ip, port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ssl.SSLError):
        return False
    return certificate is not None and owner_of(certificate) == peer_id


def owner_of(certificate: bytes) -> str:
    """The peer id that a libp2p certificate (DER) proves; empty if none. Any bytes may be passed in."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if len(certificate) > _MAX_CERTIFICATE:
        return ""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        extension = parsed.extensions.get_extension_for_oid(x509.ObjectIdentifier(_EXTENSION))
        assert isinstance(extension.value, x509.UnrecognizedExtension)
        key_message, signature = _two_strings(extension.value.value)
        key = read_fields(key_message).get(2)
        spki = parsed.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return ""
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ):
        return ""
    if not isinstance(key, bytes) or not verify(key, _SIGNED + spki, signature):
        return ""
    return peer_id_of(key)


def unverified_tls() -> ssl.SSLContext:
    """A client's context for TLS 1.3, which proves only that the listener has its certificate's key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _certificate_at(ip: str, port: int) -> bytes | None:
    """Certificate of the libp2p host that listens there; None if no libp2p host does. Raises OSError."""
    reader, writer = await asyncio.open_connection(ip, port)
    try:
        writer.write(_HEADER + _TLS)
        if await reader.readexactly(len(_HEADER) + len(_TLS)) != _HEADER + _TLS:
            return None
        context = unverified_tls()  # `owner_of` checks its own signature
        context.set_alpn_protocols(["libp2p"])
        await writer.start_tls(context)
        secured = writer.get_extra_info("ssl_object")
        certificate: bytes | None = secured.getpeercert(binary_form=True)
        return certificate
    finally:
        with contextlib.suppress(RuntimeError):
            writer.transport.abort()


def _two_strings(der: bytes) -> tuple[bytes, bytes]:
    """The octet strings of `SEQUENCE { OCTET STRING, OCTET STRING }`. Raises ValueError."""
    body, rest = _element(der, 0x30)
    first, tail = _element(body, 0x04)
    second, end = _element(tail, 0x04)
    if rest or end:
        raise ValueError("more than two strings")
    return first, second


def _element(der: bytes, tag: int) -> tuple[bytes, bytes]:
    """(content of the first element, bytes after it). Raises ValueError."""
    if len(der) < 2 or der[0] != tag:
        raise ValueError("another element")
    length, at = der[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(der[2:at], "big")
    if len(der) < at + length:
        raise ValueError("an element that does not end")
    return der[at : at + length], der[at + length :]
