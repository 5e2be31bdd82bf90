"""Byte-level token shards: text files in, safetensors files with one uint8 tensor `tokens` out, and batches back.

A shard's name is its content's hash, it holds at most 8 MiB, and the text runs on over shard borders: a sequence may
begin in one and end in the next. The held-out text, the tail of what was given, is a set of shards of its own.
Which sequences make a microbatch is decided in order.py, not here.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3
from safetensors.numpy import save

from hetpeer.dht.errors import ExitCode, LocalError

SHARD_TOKENS = 8 * 2**20 - 1024
"""Tokens in a full shard: with its header the file stays below 8 MiB."""
VOCABULARY = 256
READ_BYTES = 2**20
DEMO_BYTES = 3_000_000
"""Size of the default data: enough that a demo does not learn it by heart, little enough to hash and send at once."""
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Batch = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class ShardRef(Protocol):
    """What is known of a shard from outside: the manifest's entries and `Shard` both are one."""

    @property
    def name(self) -> str: ...
    @property
    def blake3(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A shard file: its name in its folder, content hash (64 hex digits), file size and number of tokens."""

    name: str
    blake3: str
    bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenShards:
    """Shards of one set, mapped into memory and read as one long text."""

    parts: tuple[Bytes, ...]
    ends: tuple[int, ...]
    """Token offset behind the last token of each part."""

    @classmethod
    def open(cls, directory: Path, shards: Sequence[ShardRef]) -> TokenShards:
        """Map the shards of one set, in the manifest's order, after checking size, hash and shape of each.

        Raises `LocalError` HP-DATA-002 that names the first damaged, cut short or missing file.
        """
        parts = tuple(_map(directory / shard.name, shard) for shard in shards)
        return cls(parts, tuple(accumulate(len(part) for part in parts)))

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def population(self, length: int) -> int:
        """How many sequences of `length` tokens and their next tokens there are: offsets run from 0 up to this number.

        Raises `LocalError` HP-DATA-003 if there is none.
        """
        require_population(self.tokens, length, "this set of shards")
        return self.tokens - length

    def batch(self, offsets: Iterable[int], length: int) -> tuple[Batch, Batch]:
        """Tokens and targets (the same, one later), each [count, length] int64."""
        windows = np.stack([self._window(int(offset), length + 1) for offset in offsets]).astype(np.int64)
        return windows[:, :-1].copy(), windows[:, 1:].copy()

    def _window(self, offset: int, length: int) -> Bytes:
        if not 0 <= offset <= self.tokens - length:
            raise ValueError(f"offset {offset} is outside of a text of {self.tokens} tokens")
        first = bisect_right(self.ends, offset)
        begin = offset - (self.ends[first - 1] if first else 0)
        pieces = [self.parts[first][begin : begin + length]]
        while (missing := length - sum(map(len, pieces))) > 0:
            first += 1
            pieces.append(self.parts[first][:missing])
        return np.concatenate(pieces)


def require_population(tokens: int, length: int, what: str) -> None:
    """Raise `LocalError` HP-DATA-003 unless `tokens` are enough for one sequence of `length` and its last target."""
    if tokens <= length:
        raise LocalError(
            "HP-DATA-003",
            f"{what} has {tokens} bytes of text, one sequence needs {length + 1}",
            fix="give more text with --data, or a smaller --sequence-length",
            exit_code=ExitCode.CONFIG,
        )


def write_shards(
    paths: Iterable[Path], directory: Path, heldout_fraction: float
) -> tuple[list[Shard], list[Shard]]:
    """Cut the text under `paths` (files, or folders searched recursively) into training and held-out shards.

    The texts are joined by newlines in the order given, folders in sorted order; what is not UTF-8 text is skipped.
    Raises `LocalError` HP-DATA-001 if there is no text, and OSError if `directory` cannot be written.
    """
    paths = list(paths)
    texts = [path for path in _files(paths) if _is_text(path)]
    total = sum(path.stat().st_size + 1 for path in texts)
    if not any(path.stat().st_size for path in texts):
        raise _no_text(", ".join(map(str, paths)) or "the data paths", "no UTF-8 text file was found there")
    heldout_tokens = int(total * heldout_fraction)
    train, heldout = _shard_sizes(total - heldout_tokens), _shard_sizes(heldout_tokens)
    shards = [_write_shard(directory, tokens) for tokens in _cut(_text(texts), [*train, *heldout])]
    return shards[: len(train)], shards[len(train) :]


def python_standard_library_paths() -> list[Path]:
    """The default data: modules of this Python's standard library, the same ones each time, `DEMO_BYTES` in all."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen: list[Path] = []
    size = 0
    for path in _files([root]):
        if path.suffix != ".py" or SKIPPED.intersection(path.relative_to(root).parts):
            continue
        size += path.stat().st_size
        if size > DEMO_BYTES:
            break
        chosen.append(path)
    return chosen


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """Regular files under the paths, folders sorted, hidden entries of folders left out."""
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            visible = _visible(path)
            yield from _files(entry for entry in visible if entry.is_file() or not entry.is_symlink())
        elif not path.exists():
            raise _no_text(str(path), "there is no such file or folder")


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise _no_text(str(folder), f"it cannot be read: {error.strerror}") from error


def _is_text(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _read(path):
            if b"\0" in chunk:
                return False
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _read(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                yield chunk
    except OSError as error:
        raise _no_text(str(path), f"it cannot be read: {error.strerror}") from error


def _text(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        yield from _read(path)
        yield b"\n"


def _shard_sizes(tokens: int) -> list[int]:
    full, rest = divmod(tokens, SHARD_TOKENS)
    return [SHARD_TOKENS] * full + [rest] * (rest > 0)


def _cut(text: Iterator[bytes], sizes: Iterable[int]) -> Iterator[bytes]:
    """Pieces of the stream, of these sizes."""
    pending = bytearray()
    for size in sizes:
        while len(pending) < size:
            pending += next(text)
        yield bytes(pending[:size])
        del pending[:size]


def _write_shard(directory: Path, tokens: bytes) -> Shard:
    data: bytes = save({"tokens": np.frombuffer(tokens, dtype=np.uint8)})
    digest = blake3(data).hexdigest()
    shard = Shard(name=f"{digest[:32]}.safetensors", blake3=digest, bytes=len(data), tokens=len(tokens))
    with (directory / shard.name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return shard


def _map(path: Path, shard: ShardRef) -> Bytes:
    """The tokens of a verified shard file, mapped read-only. Nothing in it is looked at before its hash is right."""
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            raise _damaged(path, f"it has {size} bytes, the manifest says {shard.bytes}")
        if blake3().update_mmap(path).hexdigest() != shard.blake3:
            raise _damaged(path, "its content does not have the hash the manifest says")
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    if begin != size - shard.tokens:
        raise _damaged(path, f"it does not hold the {shard.tokens} tokens the manifest says")
    return mapped[begin:]


def _no_text(what: str, why: str) -> LocalError:
    return LocalError(
        "HP-DATA-001",
        f"no text in {what}",
        why=why,
        fix="give text files or folders with --data",
        exit_code=ExitCode.CONFIG,
    )


def _damaged(path: Path, why: str) -> LocalError:
    return LocalError(
        "HP-DATA-002",
        f"token shard {path} is damaged",
        why=why,
        fix="fetch it again, or make the run again from the same text",
        exit_code=ExitCode.VERSION,
    )
