"""Messages between the daemon and its compute worker: how they are declared and framed, and all answers.

A command or an answer is one class: its fields, checked by the reader, so that neither side trusts the
other's memory; its `kind` on the socket; and for a command the class of its answer, which its base names.
Commands are in block_commands.py and vector_commands.py. A frame is msgpack with length and number; an answer
has the number of its command. `CommandFailed` may answer any command. No I/O here: bytes in, values out.

    class Unload(Command[Done], kind="unload"):
        block: Count
"""

from __future__ import annotations

import argparse
import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast, dataclass_transform, get_args

import msgpack
from pydantic import Field, TypeAdapter

from hetpeer.dht.base.errors import ExitCode, HetpeerError, LocalError, ProtocolError
from hetpeer.stages.block.fingerprint import NBYTES
from hetpeer.stages.block.rounding import UNMEASURED, Rounding
from hetpeer.stages.links.codec import EncodedTensor

Count = Annotated[int, Field(ge=0, lt=1 << 48, strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Name = Annotated[str, Field(max_length=256, strict=True)]
Marks = Annotated[bytes, Field(min_length=NBYTES, max_length=NBYTES, strict=True)]
DIGEST_BYTES = 16
Short = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES, strict=True)]
NO_MEMORY = "HP-MEM-002"
"""Code of the answer when the device lacks memory for a command."""
MAX_TEXT = 1000
Text = Annotated[str, Field(max_length=MAX_TEXT, strict=True)]
"""Text for people, bounded: the worker runs graphs from the net, and its texts go into the daemon's log."""
Setting = bool | int | Number | Name | tuple[Number, ...] | tuple[tuple[Number, Number], ...]
"""One setting of the update rule."""
MAX_FRAME_BYTES = 64 << 20
"""Room for the largest block's graph; tensors do not pass here."""
PREFIX = struct.Struct("<IQ")
"""Prefix of each frame: length in bytes, and number."""
R = TypeVar("R")

# ── commands and answers ────────────────────────────────────────────────────────────────────────────────────


class WorkerLane(enum.Enum):
    """Lanes of the worker: receiving, computing, sending overlap (DT-FM, arXiv 2206.01288, section 3.5)."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"


_COMMANDS: dict[str, type[Command[Any]]] = {}
"""Kind → command, of the modules that this process has imported: the worker's engine imports all."""
_RESULTS: dict[str, type[Result]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Command(Generic[R]):
    """Base of all commands, each a frozen dataclass; `R` is the answer on success."""

    kind: ClassVar[str]
    """Tag on the socket, and name in failpoints; each command's own."""
    lane: ClassVar[WorkerLane]
    answer: ClassVar[type[Any]]
    """`R` at run time."""

    def __init_subclass__(cls, kind: str, lane: WorkerLane = WorkerLane.COMPUTE) -> None:
        (cls.answer,) = get_args(vars(cls)["__orig_bases__"][0])
        cls.kind, cls.lane = kind, lane
        _declare(cls, _COMMANDS)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Result:
    """Base of all answers, each a frozen dataclass."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        _declare(cls, _RESULTS)


def _declare(message: type[Any], kinds: dict[str, type[Any]]) -> None:
    if message.kind in kinds:
        raise TypeError(f"{message.__name__} and {kinds[message.kind].__name__} are both {message.kind!r}")
    kinds[message.kind] = dataclass(frozen=True, kw_only=True)(message)


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────────────


def encode_message(number: int, message: Command[Any] | Result) -> bytes:
    """The frame of a command or an answer."""
    adapter = _adapter(cast("Any", type(message)))
    body: bytes = msgpack.packb({"kind": message.kind, **adapter.dump_python(message)})
    return PREFIX.pack(len(body), number) + body


def decode_command(body: bytes) -> Command[Any]:
    """The command in a frame's body. Raises `ProtocolError` and nothing else."""
    command: Command[Any] = _decode(body, _COMMANDS)
    return command


def decode_result(body: bytes) -> Result:
    """The answer in a frame's body. Raises `ProtocolError` and nothing else."""
    result: Result = _decode(body, _RESULTS)
    return result


def _decode(body: bytes, kinds: dict[str, Any]) -> Any:
    try:
        plain = msgpack.unpackb(body, use_list=False)
        kind = plain.pop("kind", "") if isinstance(plain, dict) else ""
        return _adapter(kinds[kind]).validate_python(plain)
    # ValueError: pydantic's and msgpack's; TypeError: a container as a key or as the kind
    except (KeyError, TypeError, ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError("daemon and worker do not understand each other", why=str(error)) from error


@cache
def _adapter(message: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(message)


class FrameReader:
    """Splits received bytes into frames of (number, body)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames completed by `data`. Raises `ProtocolError` above `MAX_FRAME_BYTES`."""
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


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────


class Done(Result, kind="done"):
    """The command was carried out; there is nothing to report."""


class CommandFailed(Result, kind="failed"):
    """The command was not carried out and changed nothing; code, what, why and fix as in `HetpeerError`."""

    code: Name
    what: Text
    why: Text
    fix: Text


class BlockPrepared(Result, kind="prepared"):
    """The block's graph is checked and kept. `dump_bytes`: most bytes that `DumpState` needs."""

    dump_bytes: Count


class Loaded(Result, kind="loaded"):
    """The block's state is loaded: its version, and the digest of its bits (`BlockState.digest`)."""

    version: Count
    digest: Name


class Forwarded(Result, kind="forwarded"):
    """The outputs are in their extents; `loss` if the range ends in it. `seconds` of wall time.

    `hits` of an evaluation: targets that are predicted right, and that count (block/target_hits.py).
    """

    loss: Number | None
    seconds: Number
    hits: tuple[Count, Count] | None = None


class Backpropagated(Result, kind="backpropagated"):
    """The gradients are folded, the input gradients in their extents. `seconds` of wall time.

    `rounding` is measured if the command says so.
    """

    seconds: Number
    rounding: Rounding = UNMEASURED


class VectorExported(Result, kind="exported"):
    """The elements are in the extent, as their codec writes them if `rounded`, else float32."""

    rounded: bool


class Summed(Result, kind="summed"):
    """The sum is in the extent, as its codec writes it if `rounded`.

    If it is not all finite, `unsound` are the indices of the parts that are not.
    """

    unsound: tuple[Count, ...]
    rounded: bool = False
    marks: tuple[Marks, ...] = ()
    """Fingerprints of the parts, if asked for."""
    looks: tuple[tuple[Name, bool], ...] = ()
    """Digest of each part, and whether it is finite, if asked for."""


class Marked(Result, kind="marked"):
    """The fingerprint (fingerprint.py)."""

    marks: Marks


class BundleMarked(Result, kind="bundle_marked"):
    """Fingerprint of all rounded numbers, digest of all others, and digest of the whole."""

    marks: Marks
    exact: Short
    digest: Short


class Inspected(Result, kind="inspected"):
    """Blake3 (hex) of the bytes, sum of squares in float64 (exact_numerics.py), and whether all values are
    finite.

    `pieces`: (digest, finite) of each piece. `group_squares`: the squared norm of each group. `seconds` of
    wall time.
    """

    digest: Name
    squared_norm: float
    finite: bool
    seconds: Number
    pieces: tuple[tuple[Name, bool], ...] = ()
    group_squares: tuple[float, ...] = ()


class UpdateApplied(Result, kind="applied"):
    """The block's new version and the digest of its new state. `seconds` of wall time."""

    version: Count
    digest: Name
    seconds: Number


class Dumped(Result, kind="dumped"):
    """Bytes written: the state as a safetensors file (state_file.py)."""

    nbytes: Count


class Encoded(Result, kind="encoded"):
    """Bytes written, and the head's entry for each tensor."""

    nbytes: Count
    written: tuple[EncodedTensor, ...]


class WarmedUp(Result, kind="warmed_up"):
    """Measured float32 matrix multiplication speed."""

    flops_per_second: Number


class Rehearsed(Result, kind="rehearsed"):
    """Seconds of forward and backward of one full microbatch."""

    seconds: Number


class WorkerInfo(Result, kind="worker_info"):
    """The worker's present condition.

    `device_uuid`: the GPU's by NVML; empty on a CPU. `arithmetic`: what decides the last bits of its numbers
    (block/arithmetic.py). `device_bytes`: memory that torch holds on the GPU (0 on
    a CPU), not counted in `device_free_bytes`. `gpus`: those that torch sees on this machine.
    """

    device: Name
    device_name: Name
    device_uuid: Name
    arithmetic: Name
    threads: Count
    rss_bytes: Count
    device_bytes: Count
    device_free_bytes: Count
    device_total_bytes: Count
    blocks: tuple[Count, ...]
    tasks: Count
    gpus: Count


class CommandFailedError(LocalError):
    """The worker answered `CommandFailed`: it lives on, and the command changed nothing."""

    def __init__(self, failed: CommandFailed) -> None:
        status = ExitCode.TOO_SMALL if failed.code == NO_MEMORY else ExitCode.UNEXPECTED
        super().__init__(failed.code, failed.what, why=failed.why, fix=failed.fix, exit_code=status)


def failed(error: HetpeerError) -> CommandFailed:
    """The answer for an error, its texts cut to MAX_TEXT."""
    what, why, fix = (text[:MAX_TEXT] for text in (error.what, error.why, error.fix))
    return CommandFailed(code=error.code, what=what, why=why, fix=fix)


# ── the worker's command line ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options from the daemon to the worker: inherited descriptors, and limits.

    `socket`, `arena`, `exchange` and `scratch` are the descriptors.
    """

    socket: int
    arena: int
    exchange: int
    scratch: int
    scratch_bytes: int
    parent: int
    device: str
    threads: int
    nice: int
    gpu_memory: float

    def arguments(self) -> list[str]:
        """Command-line arguments that `parse` reads back."""
        return [f"--{name}={getattr(self, name)}" for name in self.__slots__]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> WorkerOptions:
        """The options in `arguments`. Exits with status 2 if they do not fit, as argparse does."""
        parser = argparse.ArgumentParser(description="hetpeer's compute worker; started by its daemon")
        for name in ("socket", "arena", "exchange", "scratch", "scratch_bytes", "parent", "threads", "nice"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--device", required=True)
        parser.add_argument("--gpu_memory", type=float, required=True)
        return cls(**vars(parser.parse_args(arguments)))
