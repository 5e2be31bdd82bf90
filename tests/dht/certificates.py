"""A libp2p certificate as a peer's p2pd shows it (github.com/libp2p/specs, tls)."""

from __future__ import annotations

import datetime as dt

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hetpeer.dht.base.untrusted import varint
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.tcp_probe import _EXTENSION, _SIGNED


def certificate(identity: Identity) -> bytes:
    """Of `identity`, in DER; the same each time."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    spki = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    message = b"\x08\x00\x12" + varint(len(identity.public_bytes)) + identity.public_bytes
    strings = _long(0x04, message) + _long(0x04, identity.sign(_SIGNED + spki))
    name = x509.Name([x509.NameAttribute(x509.NameOID.SERIAL_NUMBER, "1")])
    day = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    proof = x509.UnrecognizedExtension(x509.ObjectIdentifier(_EXTENSION), _long(0x30, strings))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, day, day + dt.timedelta(days=36500))
        .add_extension(proof, critical=True)
        .sign(key, None)
    )
    return made.public_bytes(serialization.Encoding.DER)


def _long(tag: int, content: bytes) -> bytes:
    """A DER element of 256 bytes or more."""
    return bytes([tag, 0x82]) + len(content).to_bytes(2, "big") + content
