"""Messages between reliable peers about the log, and its entries.

Lengths count entries from the beginning of the log: those "before `length`" have places 0 to length - 1.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from hetpeer.averaging.messages import Count, Schema
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack

MAX_MESSAGE_BYTES: Final = 65 << 20
"""A message carries at least one entry, and a record may have 64 MiB."""


class LogEntry(Schema):
    """One record of the replicated log. `record` is None for an entry that only begins a leader's term."""

    term: Count
    record: dict[str, Any] | None


class RequestVote(Schema):
    """A request for a vote, with the end of the candidate's log. `pre`: only whether it would be elected."""

    kind: Literal["request_vote"] = "request_vote"
    term: Count
    length: Count
    last_term: Count
    pre: bool = False
    transfer: bool = False
    """The leader itself hands over: that it is alive is no reason to refuse."""


class VoteReply(Schema):
    """The answer to RequestVote; `term` is the candidate's if it is granted."""

    kind: Literal["vote"] = "vote"
    term: Count
    granted: bool
    pre: bool = False


class Append(Schema):
    """The leader's entries after its first `begin` (the last of those of `last_term`); heartbeat if none."""

    kind: Literal["append"] = "append"
    term: Count
    begin: Count
    last_term: Count
    entries: tuple[LogEntry, ...] = ()
    committed: Count
    """Entries that are decided."""


class Appended(Schema):
    """Answer to Append. `length`: if it `fits`, entries durable here as the leader's; else where to retry."""

    kind: Literal["appended"] = "appended"
    term: Count
    fits: bool
    length: Count


class TakeOver(Schema):
    """The leader leaves and we have its whole log: run for election at once."""

    kind: Literal["take_over"] = "take_over"
    term: Count


Message = RequestVote | VoteReply | Append | Appended | TakeOver

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """Bytes (msgpack) of a message."""
    data: bytes = msgpack.packb(message.model_dump())
    return data


def decode(data: bytes | bytearray) -> Message:
    """A message from bytes. Raises `ProtocolError` if they are none."""
    plain = unpack(data, "a message about the log", strict_map_key=False)
    try:
        return _MESSAGE.validate_python(plain)
    except ValidationError as error:
        raise ProtocolError("not a message about the log", why=str(error).splitlines()[0]) from error
