"""Records of a data file: one mapping of field names to values each, with the place for error messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpeer.dht.base.errors import ExitCode, LocalError

CHAT_FIELD = "messages"
DEFAULT_FIELDS = ("text", CHAT_FIELD)
"""Fields that are looked for, in this order, if none is named."""
SHOWN = 8
"""Field names that an error repeats."""
EVERY_S = 5.0
"""Seconds between two lines about progress."""


@dataclass(frozen=True, slots=True)
class Record:
    """Content of the chosen field of one record: a text, or a list of chat messages. `where`: its place."""

    where: str
    content: Any
    label: Any = None
    """Content of the field with the label, if one was asked for."""


@dataclass(slots=True)
class Progress:
    """How far the data is read. `tell` gets a line every EVERY_S seconds."""

    tell: Callable[[str], None]
    total: int = 0
    """Bytes of all files; 0: unknown, as for a function."""
    read: int = 0
    samples: float = 0
    _begun: float = field(init=False)
    _told: float = field(init=False)

    def __post_init__(self) -> None:
        self._begun = self._told = time.monotonic()

    def count(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Pass `samples` on and count them. The rate is that from the first one on."""
        self._begun = self._told = time.monotonic()
        for sample in samples:
            yield sample
            self.add(1)

    def add(self, samples: float) -> None:
        """Count samples that were made."""
        self.samples += samples
        now = time.monotonic()
        if now >= self._told + EVERY_S:
            self._told = now
            self.tell(self._line(now - self._begun))

    def _line(self, seconds: float) -> str:
        line = f"{self.samples:,.0f} samples, {self.samples / seconds:,.0f} a second"
        if not 0 < self.read <= self.total:
            return line
        left = seconds * (self.total - self.read) / self.read
        return f"{line}, {self.read / self.total:.0%} of the data, about {left:,.0f} s left"


def chosen_field(names: Collection[str], asked: str | None, where: str) -> str:
    """Field to read of those that a record has. Raises `LocalError` HP-DATA-008 if it lacks it."""
    found = next((name for name in ([asked] if asked else DEFAULT_FIELDS) if name in names), None)
    if found is None:
        wanted = repr(asked) if asked else " or ".join(map(repr, DEFAULT_FIELDS))
        there = ", ".join([*names][:SHOWN]) or "none"
        raise bad_record(
            where, f"it has no field {wanted}; its fields: {there}", "name the field with --text-field"
        )
    return found


def label_of(fields: Mapping[str, Any], label: str | None, where: str) -> Any:
    """Content of the field `label`; None if none is asked for. Raises `LocalError` HP-DATA-008 without it."""
    if label is not None and label not in fields:
        there = ", ".join([*fields][:SHOWN]) or "none"
        raise bad_record(
            where, f"it has no field {label!r}; its fields: {there}", "name the field with --label-field"
        )
    return None if label is None else fields[label]


def bad_record(where: str, why: str, fix: str = "mend the file, or leave the record out") -> LocalError:
    """HP-DATA-008: the record at `where` cannot be used."""
    return LocalError("HP-DATA-008", f"cannot use {where}", why=why, fix=fix, exit_code=ExitCode.CONFIG)


def unicode_text(where: str, text: str) -> str:
    """`text`. Raises `LocalError` HP-DATA-008 if it has halves of surrogate pairs, as JSON may have."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise bad_record(where, f"its text is no Unicode: {error.reason}") from error
    return text


def not_installed(what: str, package: str, extra: str = "hf") -> LocalError:
    """HP-SYS-006: `what` needs a package of an extra."""
    return LocalError(
        "HP-SYS-006",
        f"{what} is not installed",
        why=f"it needs the package {package}, which only authors need",
        fix=f"pip install 'hetpeer[{extra}]'",
        exit_code=ExitCode.CONFIG,
    )
