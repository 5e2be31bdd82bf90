"""Files that a run's owner signs: the base of their parts, their canonical bytes and the signature over them.

Canonical bytes are msgpack with sorted keys, so equal values have equal bytes. The kind of file is part of
the signed bytes, so a signature for one kind is never valid for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

Count = Annotated[int, Field(ge=0, lt=2**60)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


class ManifestPart(BaseModel):
    """A part of a signed file. Building one ignores unknown fields; `unknown_field` finds them."""

    LATER: ClassVar[frozenset[str]] = frozenset()
    """Fields that an earlier version does not know. A file has them only if they differ from the default,
    so that earlier versions read every file that does without them (docs/protocol.md, "Versions")."""
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _without_unused_later_fields(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        for name in self.LATER & fields.keys():
            if getattr(self, name) == type(self).model_fields[name].get_default(call_default_factory=True):
                del fields[name]
        return fields


def unknown_field(part: BaseModel, fields: Mapping[str, Any], path: str = "") -> str | None:
    """Path of the first field that the model of `part` does not have; `part` was read from `fields`."""
    for key, value in fields.items():
        here = f"{path}.{key}" if path else key
        if key not in type(part).model_fields:
            return here
        if found := _unknown_in(getattr(part, key), value, here):
            return found
    return None


def _unknown_in(value: Any, raw: Any, path: str) -> str | None:
    if isinstance(value, BaseModel):
        return unknown_field(value, raw, path)
    if isinstance(value, Mapping):
        pairs = [(key, value[key], raw[key]) for key in value]
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        pairs = [(str(number), *pair) for number, pair in enumerate(zip(value, raw, strict=True))]
    else:
        return None
    return next((found for key, one, of in pairs if (found := _unknown_in(one, of, f"{path}.{key}"))), None)


def _peer_id(text: str) -> str:
    if not re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{10,100}", text):
        raise ValueError(f"{text[:100]!r} is not the id of a peer, as hetpeer id prints it")
    return text


PeerId = Annotated[str, AfterValidator(_peer_id)]


def _odd_and_different(peers: tuple[str, ...]) -> tuple[str, ...]:
    if len(peers) % 2 == 0 or len(set(peers)) < len(peers):
        raise ValueError(f"1, 3 or 5 different reliable peers, not {len(peers)}")
    return peers


Coordinators = Annotated[
    tuple[PeerId, ...], Field(min_length=1, max_length=5), AfterValidator(_odd_and_different)
]
"""Ids of the reliable peers. Their number is odd: an even one tolerates no more failures than one less."""


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
