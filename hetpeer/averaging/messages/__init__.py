"""Every message between a volunteer and the coordinator, and the heads of tensors between volunteers.

Messages are validated where they come in: `decode` gives a typed message or raises ProtocolError, nothing
else. Fields and kinds of a later version are ignored, so two consecutive versions work together. A peer with
any other version is refused by name at the handshake (`Hello`; docs/protocol.md, "Versions"). Numbers and
lists are bounded: no peer's claim about sizes is believed. The sender of a message comes from the transport,
not from the message.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgpack
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hetpeer.averaging.messages.from_coordinator import *  # noqa: F403 - all of the protocol is known by one name
from hetpeer.averaging.messages.from_coordinator import FromCoordinator
from hetpeer.averaging.messages.from_volunteer import *  # noqa: F403
from hetpeer.averaging.messages.from_volunteer import FromVolunteer
from hetpeer.averaging.messages.message_fields import *  # noqa: F403
from hetpeer.averaging.messages.message_fields import MAX_KIND, Unknown
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import first_wrong, unpack

Known = FromVolunteer | FromCoordinator
Message = Known | Unknown

_ADAPTER: TypeAdapter[Known] = TypeAdapter(Annotated[Known, Field(discriminator="kind")])
_KINDS = {kind.model_fields["kind"].default for kind in get_args(Known)}


def encode(message: BaseModel) -> bytes:
    """The message as msgpack."""
    packed: bytes = msgpack.packb(message.model_dump(mode="python"))
    return packed


def decode(data: bytes | bytearray) -> Message:
    """A message from its bytes; ProtocolError says which field is wrong."""
    plain = unpack(data, "a message", strict_map_key=False, max_ext_len=0)
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if isinstance(kind, str) and len(kind) <= MAX_KIND and kind not in _KINDS:
        return Unknown(kind=kind)
    try:
        return _ADAPTER.validate_python(plain)
    except ValidationError as error:
        where, what = first_wrong(error)
        raise ProtocolError("message does not fit its schema", why=f"{where}: {what}") from None
