"""Records of parquet files, and of data sets as `datasets` reads them, in small batches.

The only module that imports pyarrow and datasets, which belong to the extra `hf`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.samples.hub_name import HubName, no_data_set
from hetpeer.bootstrap.samples.quiet_library import without_log
from hetpeer.bootstrap.samples.record import (
    Progress,
    Record,
    bad_record,
    chosen_field,
    label_of,
    not_installed,
)
from hetpeer.dht.base.errors import ExitCode, LocalError

ROWS = 256
"""Rows in memory at a time."""
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Ends of names of files that hold records."""


def parquet_records(
    path: Path, size: int, asked: str | None, progress: Progress, label: str | None = None
) -> Iterator[Record]:
    """One record for each row; `size`: bytes of the file.

    Raises `LocalError` HP-DATA-008 if the file is damaged or lacks the field.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise not_installed("reading parquet", "pyarrow") from error
    row = 0
    try:
        with ParquetFile(path, pre_buffer=False) as file:
            rows = file.metadata.num_rows
            columns = _columns(file.schema_arrow.names, asked, label, path)
            for batch in file.iter_batches(ROWS, columns=columns):
                yield from _rows(batch, columns, row, path)
                row += len(batch)
                progress.read += size * len(batch) // rows
    except (ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # the disk's error, and no fault of the content
            raise
        raise _damaged(path, error, "parquet file") from error


def dataset_records(
    path: Path, size: int, asked: str | None, progress: Progress, label: str | None = None
) -> Iterator[Record]:
    """One record for each row of the split `train`, or of the only split there is.

    Raises `LocalError` HP-DATA-008 if the folder is damaged, has several other splits, or lacks the field.
    """
    try:
        import datasets
        from pyarrow import ArrowException
    except ImportError as error:
        raise not_installed("reading a folder of datasets", "datasets") from error
    try:
        found = datasets.load_from_disk(str(path))
        if isinstance(found, datasets.DatasetDict):
            found = _training_split(found, path)
        columns = _columns(found.column_names, asked, label, path)
        row = 0
        for table in found.select_columns(columns).with_format("arrow").iter(ROWS):
            yield from _rows(table, columns, row, path)
            row += len(table)
            progress.read += size * len(table) // len(found)
    except IndexError:
        return  # what `load_from_disk` raises for a set without rows
    except (ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, PermissionError):
            raise
        raise _damaged(path, error, "folder of datasets") from error


def hub_records(
    name: HubName, asked: str | None, progress: Progress, label: str | None = None
) -> Iterator[Record]:
    """One record for each row of the split `train`, or of the only split, fetched as it is read.

    Raises `LocalError` HP-DATA-001 if there is no such data set or it cannot be read, HP-DATA-007 if its
    records would be read as lines of text, HP-DATA-008 if it has several other splits or lacks the field.
    """
    try:
        import datasets
    except ImportError as error:
        raise not_installed("reading data sets of the hub", "datasets") from error
    progress.total = 0  # bytes that are still to come are not known
    with _hub_errors(name):
        with without_log():
            builder = datasets.load_dataset_builder(name.name, name.config, revision=name.revision)
            _check_format(builder, name)
            rows = _training_split(builder.as_streaming_dataset(), name)
            names = rows.column_names or [*next(iter(rows.take(1)), {})]
        columns = _columns(names, asked, label, name)
        row = 0
        for table in rows.select_columns(columns).with_format("arrow").iter(ROWS):
            yield from _rows(table, columns, row, name)
            row += len(table)


def _check_format(builder: Any, name: HubName) -> None:
    """Raises `LocalError` HP-DATA-007 if `datasets` would read records as lines of text.

    It reads all configurations of a card in the format of the first one (datasets 5.2.0), without an error.
    """
    files = [str(file) for split in (builder.config.data_files or {}).values() for file in split]
    other = next((file for file in files if file.endswith(RECORDS)), None)
    if type(builder).__module__.endswith(".text") and other is not None:
        raise LocalError(
            "HP-DATA-007",
            f"the data set {name} would be read as lines of text",
            why=f"{Path(other).name} has records, but the card's first configuration has texts, and decides",
            fix="fetch its files, and give them to --data",
            exit_code=ExitCode.CONFIG,
        )


def _training_split(found: Mapping[str, Any], where: Path | HubName) -> Any:
    """The split `train`, or the only one. Raises `LocalError` HP-DATA-008."""
    if "train" not in found and len(found) != 1:
        raise bad_record(
            str(where),
            f"it has several splits, none called train: {', '.join(found)}",
            "give the folder of one split",
        )
    return found["train"] if "train" in found else next(iter(found.values()))


@contextmanager
def _hub_errors(name: HubName) -> Iterator[None]:
    """Context that turns the many errors of datasets into HP-DATA-001."""
    try:
        yield
    except LocalError:
        raise
    except ConnectionError as error:
        why = "the hub cannot be reached, and the data set is not among those that were fetched before"
        raise no_data_set(str(name), why, "connect this machine to the network, or give files") from error
    except Exception as error:
        why = " ".join((str(error).strip() or type(error).__name__).splitlines()[:2])
        fix = "check its name and configuration; a private data set needs `hf auth login` on this machine"
        raise no_data_set(str(name), why, fix) from error


def _columns(names: Collection[str], asked: str | None, label: str | None, path: Path | HubName) -> list[str]:
    """The columns to read: that of the text, and that of the label if one is asked for."""
    where = f"row 1 of {path}"
    name = chosen_field(names, asked, where)
    label_of(dict.fromkeys(names), label, where)
    return [name] if label is None else [name, label]


def _rows(table: Any, columns: Sequence[str], before: int, path: Path | HubName) -> Iterator[Record]:
    """Records of a batch of rows; `before`: rows of earlier batches."""
    contents = [table.column(name).to_pylist() for name in columns]
    for number, row in enumerate(zip(*contents, strict=True), before + 1):
        yield Record(f"row {number} of {path}", *row)


def _damaged(path: Path, error: Exception, kind: str) -> LocalError:
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return bad_record(str(path), f"it is no whole {kind}: {why}", "fetch or write it again")
