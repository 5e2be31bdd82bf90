"""Formats of data files, told by their names. An unknown format is refused, never taken for bytes."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.samples.hub_name import PREFIX, HubName
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.token_shards import files_under

PROSE = ("", ".txt", ".text", ".md", ".rst", ".tex")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".js"),
    *(".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".swift", ".m", ".jl", ".r", ".hs", ".ml", ".ex"),
    *(".erl", ".clj", ".lisp", ".scm", ".f90", ".asm", ".s", ".sql", ".sh", ".bash", ".zsh", ".ps1", ".bat"),
    *(".toml", ".ini", ".cfg"),
)


class Format(enum.Enum):
    """Format of a data file."""

    TEXT = "text"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    DATASET = "datasets"
    """A folder that `Dataset.save_to_disk` has written."""
    HUB = "hf"
    """A data set by its name (hub_name.py)."""


BY_SUFFIX = dict.fromkeys((*PROSE, *CODE), Format.TEXT) | {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".parquet": Format.PARQUET,
}
KNOWN = ".txt, .jsonl, .csv, .parquet, a folder of datasets, hf:ID, or a function that yields samples"
DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
"""A folder with one of these is read as a whole."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file whose format is known, a folder of datasets, or a data set of the hub."""

    path: Path
    """For a data set of the hub its name, `hf:…`."""
    format: Format

    @property
    def bytes(self) -> int:
        """Size on the disk; 0 for a data set of the hub."""
        parts = self.path.rglob("*") if self.format is Format.DATASET else [self.path]
        return sum(part.stat().st_size for part in parts if part.is_file())


def data_files(paths: Iterable[Path], tell: Callable[[str], None]) -> list[DataFile]:
    """The data files under `paths`, in order; `tell` gets a line about files of folders that are left out.

    Raises `LocalError` HP-DATA-001 for a path or name that does not exist or cannot be read, HP-DATA-007 for
    a named file whose format is not known, or a folder without any other.
    """
    found: list[DataFile] = []
    for path in paths:
        if str(path).startswith(PREFIX):
            HubName.parse(str(path))
            found.append(DataFile(path, Format.HUB))
            continue
        if any((path / name).is_file() for name in DATASET_FILES):
            found.append(DataFile(path, Format.DATASET))
            continue
        left_out = Counter[str]()
        before = len(found)
        for file in files_under([path]):
            kind = BY_SUFFIX.get(file.suffix.lower())
            if kind is not None:
                found.append(DataFile(file, kind))
            elif file == path:
                raise _unknown(f"cannot read {path}", file.suffix)
            else:
                left_out[file.suffix] += 1
        names = ", ".join(f"{count} {suffix}" for suffix, count in sorted(left_out.items()))
        if left_out and len(found) == before:
            raise _unknown(f"cannot read any file in {path}", names)
        if left_out:
            tell(f"files of {path} in other formats are left out: {names}")
    return found


def _unknown(what: str, names: str) -> LocalError:
    return LocalError(
        "HP-DATA-007",
        what,
        why=f"the format is not known ({names})",
        fix=f"give {KNOWN}; to train on the bytes themselves, call it .txt",
        exit_code=ExitCode.CONFIG,
    )
