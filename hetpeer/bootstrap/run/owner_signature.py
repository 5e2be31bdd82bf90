"""What the owner of a run signs, as a file that stands alone: canonical bytes of some fields, and the signature over them.

The kind of file goes before the signed bytes, so that the owner's key never signs anything that could be read as another kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hetpeer.bootstrap.run.canonical_bytes import pack, unpack


@dataclass(frozen=True, slots=True)
class SignedKind:
    """A kind of file, at most `max_bytes` long."""

    name: str
    max_bytes: int

    def seal(self, fields: Mapping[str, Any], owner_key: Ed25519PrivateKey) -> bytes:
        """The file: canonical bytes of the fields and the owner's signature over them."""
        canonical = pack(fields)
        return pack({self.name: canonical, "signature": owner_key.sign(self._signed(canonical))})

    def open(self, data: bytes) -> SignedFile:
        """What is in a file. Exactly one spelling of it is accepted: raises ValueError, TypeError or KeyError for any other."""
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
    """The content of a signed file; nobody has looked at the signature yet."""

    canonical: bytes
    _signed: bytes
    _signature: bytes

    def fields(self) -> Any:
        """Raises ValueError."""
        return unpack(self.canonical)

    def check(self, owner: bytes) -> None:
        """Raises InvalidSignature, ValueError or TypeError unless the owner (a public key) has signed it."""
        Ed25519PublicKey.from_public_bytes(owner).verify(self._signature, self._signed)


MANIFEST: Final = SignedKind("manifest", 16 * 2**20)
AMENDMENT: Final = SignedKind("amendment", 2**16)
