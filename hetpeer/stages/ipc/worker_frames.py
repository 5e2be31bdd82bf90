"""Commands and results as frames on the socket between daemon and worker: msgpack with length and number.

A result has the number of its command. The reader validates, so neither side trusts the other's memory. No
I/O here: bytes in, values out.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import unpack
from hetpeer.stages.ipc.block_commands import AnyCommand
from hetpeer.stages.ipc.command import Command
from hetpeer.stages.ipc.results import Result

MAX_FRAME_BYTES = 64 << 20
"""Room for the largest block's graph; tensors do not pass here."""

PREFIX = struct.Struct("<IQ")
"""Before each frame: its length in bytes, and its number."""

_COMMANDS: TypeAdapter[AnyCommand] = TypeAdapter(Annotated[AnyCommand, Field(discriminator="kind")])
_RESULTS: TypeAdapter[Result] = TypeAdapter(Annotated[Result, Field(discriminator="kind")])


def encode_command(number: int, command: Command[Any]) -> bytes:
    """The frame of a command."""
    return _frame(_COMMANDS, number, command)


def encode_result(number: int, result: Result) -> bytes:
    """The frame of a result."""
    return _frame(_RESULTS, number, result)


def decode_command(body: bytes) -> AnyCommand:
    """The command in a frame's body. Raises `ProtocolError` and nothing else."""
    command: AnyCommand = _parse(_COMMANDS, body)
    return command


def decode_result(body: bytes) -> Result:
    """The result in a frame's body. Raises `ProtocolError` and nothing else."""
    result: Result = _parse(_RESULTS, body)
    return result


class FrameReader:
    """Splits received bytes into frames of (number, body)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames completed by `data`. Raises `ProtocolError` if a frame claims more than
        `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= PREFIX.size:
            length, number = PREFIX.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes between daemon and worker")
            end = PREFIX.size + length
            if len(self._buffer) < end:
                break
            frames.append((number, bytes(self._buffer[PREFIX.size : end])))
            del self._buffer[:end]
        return frames


def _frame(adapter: TypeAdapter[Any], number: int, value: Any) -> bytes:
    body: bytes = msgpack.packb(adapter.dump_python(value))
    return PREFIX.pack(len(body), number) + body


def _parse(adapter: TypeAdapter[Any], body: bytes) -> Any:
    plain = unpack(body, "a frame between daemon and worker", use_list=False)
    try:
        return adapter.validate_python(plain)
    except ValidationError as error:
        raise ProtocolError("daemon and worker do not understand each other", why=str(error)) from error
