"""Data files to documents: their records one after the other, as text in bytes or as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from hetpeer.bootstrap.samples.arrow_records import dataset_records, hub_records, parquet_records
from hetpeer.bootstrap.samples.formats import DataFile, Format
from hetpeer.bootstrap.samples.hub_name import HubName
from hetpeer.bootstrap.samples.line_records import csv_records, jsonl_records, text_records
from hetpeer.bootstrap.samples.record import CHAT_FIELD, Progress, Record, bad_record, unicode_text
from hetpeer.bootstrap.samples.tokenizer import Document, Message, Tokenizer
from hetpeer.dht.base.errors import ExitCode, LocalError

T = TypeVar("T")

BATCH_CHARACTERS, BATCH_RECORDS = 2**20, 1024
"""Most that is tokenized at once."""


def records(
    files: Iterable[DataFile], asked: str | None, progress: Progress, label: str | None = None
) -> Iterator[Record]:
    """All records of `files`, in order. `asked`: the field that is read; None: `text`, or else `messages`.

    `label`: the field of the label; None: records have none. Raises `LocalError` HP-DATA-008, and
    HP-DATA-001 for a file that cannot be read.
    """
    for file in files:
        if label is not None and file.format is Format.TEXT:
            raise bad_record(
                str(file.path), "a text has no fields, and so no label", "give .jsonl, .csv or .parquet"
            )
        labelled = {} if label is None else {"label": label}
        found = _reader(file, asked)(progress=progress, **labelled)
        try:
            for number, record in enumerate(found):
                if not number and asked in (None, CHAT_FIELD):
                    _check_no_written_chat(record)
                yield record
        except OSError as error:
            raise LocalError(
                "HP-DATA-001",
                f"cannot read {file.path}",
                why=error.strerror or str(error),
                fix="see that the file is whole, and that you may read it",
                exit_code=ExitCode.CONFIG,
            ) from error


def _check_no_written_chat(record: Record) -> None:
    """Refuse a chat that is written as a text, which would be trained on as it stands there."""
    content = record.content
    if not isinstance(content, str) or not content.lstrip().startswith("["):
        return
    with suppress(ValueError, RecursionError):
        chat = json.loads(content)
        if chat and all(isinstance(message, dict) and "role" in message for message in chat):
            raise bad_record(
                record.where,
                "its field holds a chat that is written as a text",
                "write the messages as a list of objects, in .jsonl or .parquet",
            )


def texts(found: Iterable[Record]) -> Iterator[bytes]:
    """Each record's text in UTF-8, a newline before all but the first.

    Raises `LocalError` HP-DATA-008 for other contents.
    """
    for number, record in enumerate(found):
        if not isinstance(record.content, str):
            raise bad_record(
                record.where, _no_text(record.content), "give --tokenizer for chats, or another --text-field"
            )
        yield b"\n" * (number > 0) + unicode_text(record.where, record.content).encode()


def documents(found: Iterable[Record], tokenizer: Tokenizer) -> Iterator[Document]:
    """Tokenized texts and chats, in order; empty texts are left out. Raises HP-DATA-008, HP-DATA-009."""
    for batch in _ahead([*_tokenized(batch, tokenizer)] for batch in _batches(found)):
        yield from batch


def _batches(found: Iterable[Record]) -> Iterator[list[Record]]:
    """Records that are tokenized at once: all texts, or all chats."""
    batch: list[Record] = []
    size = 0
    for record in found:
        if batch and isinstance(batch[0].content, str) != isinstance(record.content, str):
            yield batch
            batch, size = [], 0
        if record.content != "":
            batch.append(record)
            size += len(record.content) if isinstance(record.content, str) else 1000
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """`items`; a thread makes the next one while the caller uses the last one."""
    end: Any = object()
    with ThreadPoolExecutor(1, "tokenizing") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item


def _tokenized(batch: Sequence[Record], tokenizer: Tokenizer) -> Iterator[Document]:
    if isinstance(batch[0].content, str):
        return tokenizer.texts([unicode_text(record.where, record.content) for record in batch])
    return tokenizer.chats([(record.where, _messages(record)) for record in batch])


def _messages(record: Record) -> list[Message]:
    """The messages of a chat. Raises `LocalError` HP-DATA-008 if they are none."""
    content = record.content
    if not isinstance(content, list) or not content:
        raise bad_record(
            record.where, _no_text(content), "choose another --text-field, or leave the record out"
        )
    return [_message(record.where, message) for message in content]


def _message(where: str, message: Any) -> Message:
    """A message whose content, if it has one, is a text: parts of a text are put together."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise bad_record(where, "a message of the chat has no role", "give role and content to each")
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = "".join(part["text"] for part in content)
    if len(found) == 1:
        raise bad_record(where, "a message of the chat has no content", "give role and content to each")
    if content is None:
        return found  # such as a call of a tool
    if not isinstance(content, str):
        raise bad_record(
            where,
            f"the content of a message is a value of type {type(content).__name__}, and no text",
            "give texts, or a list of parts like {'type': 'text', 'text': '…'}",
        )
    return found | {"content": unicode_text(where, content)}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _no_text(content: Any) -> str:
    kind = "nothing" if content is None else f"a value of type {type(content).__name__}"
    return f"its field holds {kind}, no text or chat"


def _reader(file: DataFile, asked: str | None) -> Callable[..., Iterator[Record]]:
    """Function that reads `file` and takes a `progress`."""
    match file.format:
        case Format.TEXT:
            return partial(text_records, file.path)
        case Format.JSONL:
            return partial(jsonl_records, file.path, asked)
        case Format.CSV:
            return partial(csv_records, file.path, asked, delimiter=",")
        case Format.TSV:
            return partial(csv_records, file.path, asked, delimiter="\t")
        case Format.PARQUET:
            return partial(parquet_records, file.path, file.bytes, asked)
        case Format.DATASET:
            return partial(dataset_records, file.path, file.bytes, asked)
        case Format.HUB:
            return partial(hub_records, HubName.parse(str(file.path)), asked)
