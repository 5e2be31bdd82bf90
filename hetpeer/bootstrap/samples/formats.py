"""Formats of data files, told by their names. An unknown format is refused, never taken for bytes."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

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
    """What a data file holds."""

    TEXT = "text"


BY_SUFFIX = dict.fromkeys((*PROSE, *CODE), Format.TEXT)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file whose format is known."""

    path: Path
    format: Format


def data_files(paths: Iterable[Path], tell: Callable[[str], None]) -> list[DataFile]:
    """The data files under `paths`, in order; `tell` gets a line about files of folders that are left out.

    Raises `LocalError` HP-DATA-001 for a path that does not exist or cannot be read, HP-DATA-007 for a named
    file whose format is not known, or a folder without any other.
    """
    found: list[DataFile] = []
    for path in paths:
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
        fix="give text, or a function that yields samples; to train on the bytes themselves, call it .txt",
        exit_code=ExitCode.CONFIG,
    )
