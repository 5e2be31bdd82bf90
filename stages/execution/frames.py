"""Commands and results as frames on the socket between daemon and worker: msgpack, preceded by its length.

Who reads validates, so neither trusts the other's memory. No I/O here: bytes in, values out.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from hetpeer.dht.errors import ProtocolError
from hetpeer.stages.execution.commands import AnyCommand, Command
from hetpeer.stages.execution.results import Result

MAX_FRAME_BYTES = 64 << 20
"""Room for the largest block's graph; tensors do not pass here."""

LENGTH = struct.Struct("<I")
"""The prefix of a frame: bytes that follow."""

_COMMANDS: TypeAdapter[AnyCommand] = TypeAdapter(Annotated[AnyCommand, Field(discriminator="kind")])
_RESULTS: TypeAdapter[Result] = TypeAdapter(Annotated[Result, Field(discriminator="kind")])


def encode_command(command: Command[Any]) -> bytes:
    """One frame."""
    return _frame(_COMMANDS, command)


def encode_result(result: Result) -> bytes:
    """One frame."""
    return _frame(_RESULTS, result)


def decode_command(body: bytes) -> AnyCommand:
    """A frame's body. Raises ProtocolError and nothing else."""
    command: AnyCommand = _parse(_COMMANDS, body)
    return command


def decode_result(body: bytes) -> Result:
    """A frame's body. Raises ProtocolError and nothing else."""
    result: Result = _parse(_RESULTS, body)
    return result


class FrameReader:
    """Bytes in, whole frame bodies out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies completed by `data`. Raises ProtocolError when a frame claims more than `MAX_FRAME_BYTES`."""
        self._buffer += data
        bodies = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes between daemon and worker")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return bodies


def _frame(adapter: TypeAdapter[Any], value: Any) -> bytes:
    body: bytes = msgpack.packb(adapter.dump_python(value))
    return LENGTH.pack(len(body)) + body


def _parse(adapter: TypeAdapter[Any], body: bytes) -> Any:
    try:
        return adapter.validate_python(msgpack.unpackb(body, use_list=False))
    except (ValidationError, ValueError, msgpack.UnpackException) as error:
        raise ProtocolError("daemon and worker do not understand each other", why=str(error)[:500]) from error
