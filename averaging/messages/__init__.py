"""Every message between a volunteer and the coordinator, and the headers of tensors between volunteers.

One schema, validated at the border: `decode` gives a typed message or ProtocolError, never anything else. Unknown
fields are ignored so that a newer minor version can add some; an unknown wire version is refused by name at the
handshake (`Hello`). Numbers are bounded, lists too: a peer's claim about itself is never trusted for its size.
Who sent a message comes from the transport, not from the message.
"""

from __future__ import annotations

from typing import Annotated

import msgpack
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from hetpeer.averaging.messages.coordinator import *  # noqa: F403 - all of the protocol is known by one name
from hetpeer.averaging.messages.coordinator import FromCoordinator
from hetpeer.averaging.messages.fields import *  # noqa: F403
from hetpeer.averaging.messages.volunteer import *  # noqa: F403
from hetpeer.averaging.messages.volunteer import FromVolunteer
from hetpeer.dht.errors import ProtocolError
from hetpeer.dht.plain import unpack

Message = FromVolunteer | FromCoordinator

_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: BaseModel) -> bytes:
    """The message as msgpack."""
    packed: bytes = msgpack.packb(message.model_dump(mode="python"))
    return packed


def decode(data: bytes | bytearray) -> Message:
    """A message from its bytes; ProtocolError says which field is wrong."""
    plain = unpack(data, "a message", strict_map_key=False, max_ext_len=0)
    try:
        return _ADAPTER.validate_python(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError("message does not fit its schema", why=f"{where}: {first['msg']}") from None
