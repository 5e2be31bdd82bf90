"""Every message between a volunteer and the coordinator, and the heads of tensors between volunteers.

Messages are validated where they come in: `decode` gives a typed message or raises ProtocolError, nothing
else. Fields and kinds of a later version are ignored, so two consecutive versions work together. A peer with
any other version is refused by name at the handshake (`Hello`; docs/protocol.md, "Versions"). Numbers and
lists are bounded: no peer's claim about sizes is believed. The sender of a message comes from the transport,
not from the message.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import msgpack
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hetpeer.averaging.messages.bounds import SPARE
from hetpeer.averaging.messages.bounds import MessageBounds as MessageBounds
from hetpeer.averaging.messages.from_coordinator import *  # noqa: F403 - all of the protocol is known by one name
from hetpeer.averaging.messages.from_coordinator import FromCoordinator
from hetpeer.averaging.messages.from_volunteer import *  # noqa: F403
from hetpeer.averaging.messages.from_volunteer import FromVolunteer
from hetpeer.averaging.messages.message_fields import *  # noqa: F403
from hetpeer.averaging.messages.message_fields import MAX_KIND, Unknown
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import first_wrong, peek, unpack

Known = FromVolunteer | FromCoordinator
Message = Known | Unknown

_ADAPTER: TypeAdapter[Known] = TypeAdapter(Annotated[Known, Field(discriminator="kind")])
_KINDS = {kind.model_fields["kind"].default for kind in get_args(Known)}
_VOLUNTEERS_KINDS = {kind.model_fields["kind"].default for kind in get_args(FromVolunteer)}


def encode(message: BaseModel) -> bytes:
    """The message as msgpack."""
    packed: bytes = msgpack.packb(message.model_dump(mode="python"))
    return packed


def decode(data: bytes | bytearray) -> Message:
    """A message from its bytes; ProtocolError says which field is wrong."""
    return _message(unpack(data, "a message", strict_map_key=False, max_ext_len=0))


def decode_hello(data: bytes | bytearray, bounds: MessageBounds) -> Hello:  # noqa: F405
    """The Hello that begins a session. Raises `ProtocolError` for anything else, or one that is too long."""
    kind = peek(data, "kind", "a message") if len(data) <= bounds.hello else None
    if kind != "hello":
        raise ProtocolError(f"a session that begins with {len(data)} bytes that are no Hello")
    message = _message(_unpacked(data, bounds.entries(0)))
    assert isinstance(message, Hello)  # noqa: F405
    return message


def decode_from_volunteer(data: bytes | bytearray, bounds: MessageBounds, peers: int) -> Message:
    """A message of a volunteer in a run of `peers` volunteers.

    Raises `ProtocolError` as `decode` does, and for a kind that volunteers do not send or a message longer
    than the run can need; its length is checked before it is decoded.
    """
    kind = peek(data, "kind", "a message")
    if not isinstance(kind, str) or len(kind) > MAX_KIND or kind in _KINDS - _VOLUNTEERS_KINDS:
        raise ProtocolError("a message of a kind that no volunteer sends")
    if kind not in _KINDS:
        return Unknown(kind=kind)
    most = bounds.most(peers).get(kind, SPARE)
    if len(data) > most:
        raise ProtocolError(f"{kind!r} with {len(data)} bytes, and {most} are the most in this run")
    return _message(_unpacked(data, bounds.entries(peers)))


def _unpacked(data: bytes | bytearray, entries: int) -> Any:
    return unpack(
        data,
        "a message",
        strict_map_key=False,
        max_ext_len=0,
        max_array_len=entries,
        max_map_len=entries,
    )


def _message(plain: Any) -> Message:
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if isinstance(kind, str) and len(kind) <= MAX_KIND and kind not in _KINDS:
        return Unknown(kind=kind)
    try:
        return _ADAPTER.validate_python(plain)
    except ValidationError as error:
        where, what = first_wrong(error)
        raise ProtocolError("message does not fit its schema", why=f"{where}: {what}") from None
