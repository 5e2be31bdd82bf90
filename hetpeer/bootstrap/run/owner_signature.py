"""Files that a run's owner signs: canonical bytes of some fields, and the signature over them.

Canonical bytes are msgpack with sorted keys, so equal values have equal bytes. The kind of file is part of
the signed bytes, so a signature for one kind is never valid for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


def pack(value: Any) -> bytes:
    """The value as msgpack, map keys sorted at every level. Map keys must be strings."""
    data: bytes = msgpack.packb(_sorted(value))
    return data


def unpack(data: bytes) -> Any:
    """The value of one msgpack message. Raises ValueError, and nothing else, on anything malformed."""
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (msgpack.UnpackException, ValueError) as error:
        raise ValueError(f"not msgpack: {error}") from error


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class SignedKind:
    """A kind of signed file, at most `max_bytes` bytes long."""

    name: str
    max_bytes: int

    def seal(self, fields: Mapping[str, Any], owner_key: Ed25519PrivateKey) -> bytes:
        """Bytes of the file: the fields in canonical form and the owner's signature over them."""
        canonical = pack(fields)
        return pack({self.name: canonical, "signature": owner_key.sign(self._signed(canonical))})

    def open(self, data: bytes) -> SignedFile:
        """Parse a file; only the canonical encoding is accepted. Raises ValueError, TypeError or KeyError."""
        if len(data) > self.max_bytes:
            raise ValueError(f"it has {len(data)} bytes")
        envelope = unpack(data)
        canonical, signature = envelope[self.name], envelope["signature"]
        flat = len(envelope) == 2 and isinstance(canonical, bytes) and isinstance(signature, bytes)
        if not flat or pack(envelope) != data:  # nothing in it is deep when it is packed
            raise ValueError(f"no {self.name}")
        return SignedFile(canonical, self._signed(canonical), signature)

    def _signed(self, canonical: bytes) -> bytes:
        return f"hetpeer {self.name}\0".encode() + canonical


@dataclass(frozen=True, slots=True)
class SignedFile:
    """The content of a signed file; the signature is not checked yet."""

    canonical: bytes
    _signed: bytes
    _signature: bytes

    def fields(self) -> Any:
        """The signed fields. Raises ValueError."""
        return unpack(self.canonical)

    def check(self, owner: bytes) -> None:
        """Raise InvalidSignature, ValueError or TypeError unless `owner` (a public key) signed the file."""
        Ed25519PublicKey.from_public_bytes(owner).verify(self._signature, self._signed)


MANIFEST: Final = SignedKind("manifest", 16 * 2**20)
AMENDMENT: Final = SignedKind("amendment", 2**16)
