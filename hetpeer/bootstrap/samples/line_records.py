"""Records of text, jsonl and csv files, read as streams: at most one line or piece is in memory."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hetpeer.bootstrap.samples.record import Progress, Record, bad_record, chosen_field, label_of

MOST_LINE = 2**26
"""Bytes of the longest line of a jsonl file, and characters of the longest field of a csv file."""
NO_UTF8, TO_UTF8 = "it is no UTF-8 text", "convert the file to UTF-8"
PIECE_BYTES = 2**20
"""A longer text is cut at an end of a line near each multiple of this."""


def text_records(path: Path, progress: Progress) -> Iterator[Record]:
    """Pieces of a UTF-8 file, each at most about PIECE_BYTES long, unless a line is longer."""
    with path.open("rb") as file:
        while lines := file.readlines(PIECE_BYTES):
            piece = b"".join(lines)
            progress.read += len(piece)
            try:
                yield Record(str(path), piece.decode())
            except UnicodeDecodeError as error:
                raise bad_record(str(path), NO_UTF8, TO_UTF8) from error


def jsonl_records(
    path: Path, asked: str | None, progress: Progress, label: str | None = None
) -> Iterator[Record]:
    """One record for each line that is not blank. Raises `LocalError` HP-DATA-008, which names the line."""
    name = None
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            where = f"line {number} of {path}"
            progress.read += len(line)
            if len(line) >= MOST_LINE:
                raise bad_record(where, f"it is longer than {MOST_LINE >> 20} MiB")
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise bad_record(where, NO_UTF8, TO_UTF8) from error
            except (ValueError, RecursionError) as error:
                raise bad_record(where, f"it is no JSON: {error}", *_one_array(line)) from error
            if not isinstance(fields, dict):
                kind = type(fields).__name__
                raise bad_record(where, f"it is a JSON {kind}, not an object with fields", *_one_array(line))
            name = chosen_field(fields, name or asked, where)
            yield Record(where, fields[name], label_of(fields, label, where))


def csv_records(
    path: Path, asked: str | None, progress: Progress, delimiter: str, label: str | None = None
) -> Iterator[Record]:
    """One record for each row below the header. Raises `LocalError` HP-DATA-008, which names the line."""
    csv.field_size_limit(MOST_LINE)
    with path.open("rb") as file:
        rows = csv.reader(_decoded(file, path, progress), delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                return
            if len(header) == 1 and ";" in header[0]:
                raise bad_record(
                    f"line 1 of {path}",
                    "its fields are separated by semicolons",
                    "separate them by commas, or by tabs in a .tsv",
                )
            name = chosen_field(header, asked, f"line 1 of {path}")
            for row in rows:
                where = f"line {rows.line_num} of {path}"
                if row and len(row) != len(header):
                    raise bad_record(where, f"it has {len(row)} fields, and the header has {len(header)}")
                if row:
                    fields = dict(zip(header, row, strict=True))
                    yield Record(where, fields[name], label_of(fields, label, where))
        except csv.Error as error:
            raise bad_record(f"line {rows.line_num} of {path}", f"it is no CSV: {error}") from error


def _one_array(line: bytes) -> tuple[str, ...]:
    """Advice for a line that begins an array: some files are one array of all records."""
    return ("write one record a line, as `jq -c '.[]' FILE` does",) if line.lstrip().startswith(b"[") else ()


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MOST_LINE):
        yield line


def _decoded(file: IO[bytes], path: Path, progress: Progress) -> Iterator[str]:
    for number, line in enumerate(_lines(file), 1):
        progress.read += len(line)
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise bad_record(f"line {number} of {path}", NO_UTF8, TO_UTF8) from error
