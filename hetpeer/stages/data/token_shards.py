"""Shards from text: one uint8 tensor `tokens` in each, every byte a token.

A sample is a window of `length` tokens and the one after them. Windows follow each other at a stride of
`length` within one shard. The held-out text, the tail of the input, has shards of its own.
"""

from __future__ import annotations

import codecs
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.microbatches import samples_in
from hetpeer.stages.data.shards import (
    SHARD_BYTES,
    TARGETS,
    TOKENS,
    ArraySpec,
    ShardFile,
    even_parts,
    too_little,
    write_shard,
)

READ_BYTES = 2**20
DEMO_BYTES = 3_000_000
"""Bytes of the default data: too many for a demo to learn by heart, few enough to hash and send at once."""
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


def sample_of(length: int) -> dict[str, ArraySpec]:
    """The arrays of a text sample: tokens, and targets, which are the tokens one later."""
    spec = ArraySpec(dtype="int64", shape=(length,))
    return {TOKENS: spec, TARGETS: spec}


def write_text(
    paths: Iterable[Path], folder: Path, heldout_fraction: float, length: int, limit: int | None = None
) -> tuple[list[ShardFile], list[ShardFile]]:
    """Cut the text under `paths` (files, or folders searched recursively) into (training, held-out) shards.

    The texts are joined by newlines in the given order, folders in sorted order; files that are no UTF-8 text
    are skipped. `limit`: most bytes that are used; `heldout_fraction` 0 holds nothing out, 1 all. Raises
    `LocalError` HP-DATA-001 if there is no text, HP-DATA-003 if there is too little for samples of `length`
    tokens, and OSError if `folder` cannot be written.
    """
    paths = list(paths)
    texts = [path for path in files_under(paths) if _is_text(path)]
    whole = sum(path.stat().st_size + 1 for path in texts)
    total = whole if limit is None else min(whole, limit)
    if not any(path.stat().st_size for path in texts):
        raise _no_text(", ".join(map(str, paths)) or "the data paths", "no UTF-8 text file was found there")
    heldout_tokens = int(total * heldout_fraction)
    sizes = [
        _shard_sizes(what, tokens, length) if share else []
        for what, tokens, share in (
            ("the training text", total - heldout_tokens, 1 - heldout_fraction),
            ("the held-out text", heldout_tokens, heldout_fraction),
        )
    ]
    pieces = _cut(_text(texts), [size for part in sizes for size in part])
    shards = [_write_shard(folder, tokens, length) for tokens in pieces]
    return shards[: len(sizes[0])], shards[len(sizes[0]) :]


def readable_texts(paths: Iterable[Path]) -> Iterator[bytes]:
    """Pieces of the texts for `write_text`; files are opened one after the other."""
    return _text(path for path in files_under(paths) if _is_text(path))


def python_standard_library_paths() -> list[Path]:
    """The default data: modules of this Python's standard library, always the same, `DEMO_BYTES` in all."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen: list[Path] = []
    size = 0
    for path in files_under([root]):
        if path.suffix != ".py" or SKIPPED.intersection(path.relative_to(root).parts):
            continue
        size += path.stat().st_size
        if size > DEMO_BYTES:
            break
        chosen.append(path)
    return chosen


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    """Regular files under the paths, folders sorted, hidden entries of folders left out."""
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            visible = _visible(path)
            yield from files_under(entry for entry in visible if entry.is_file() or not entry.is_symlink())
        elif not path.exists():
            raise _no_text(str(path), "there is no such file or folder")


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise _no_text(str(folder), f"it cannot be read: {error.strerror}") from error


def _is_text(path: Path) -> bool:
    """Whether the file is UTF-8 without NUL bytes."""
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


def _shard_sizes(what: str, tokens: int, length: int) -> list[int]:
    sizes = even_parts(tokens, SHARD_BYTES)
    smallest = min(sizes, default=0)
    if not samples_in(smallest, length):
        raise too_little(
            f"{what} makes shards of {smallest} bytes, one sequence needs {length + 1}",
            fix="give more text with --data, or a smaller --sequence-length",
        )
    return sizes


def _cut(text: Iterator[bytes], sizes: Iterable[int]) -> Iterator[bytes]:
    """Pieces of the stream, of these sizes."""
    pending = bytearray()
    for size in sizes:
        while len(pending) < size:
            pending += next(text)
        yield bytes(pending[:size])
        del pending[:size]


def _write_shard(folder: Path, text: bytes, length: int) -> ShardFile:
    tensors = {TOKENS: np.frombuffer(text, dtype=np.uint8)}
    return write_shard(folder, tensors, samples_in(len(text), length))


def _no_text(what: str, why: str) -> LocalError:
    return LocalError(
        "HP-DATA-001",
        f"no text in {what}",
        why=why,
        fix="give text files or folders with --data, or a function as module.py:function",
        exit_code=ExitCode.CONFIG,
    )
