"""What an examination found, and what follows from that for a person and for an exit status. Pure.

A check says in a few words what is well, or gives the error that a user would meet: its code, reason and remedy are those of
every other command.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from hetpeer.dht.base.errors import ExitCode, HetpeerError
from hetpeer.dht.base.printable import escaped

SCHEMA = "hetpeer.doctor/1"


class Grade(enum.StrEnum):
    """How bad it is. `fail`: a volunteer does not work like this; `warn`: it works, and less well than it could."""

    OK = "ok"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of one check. `text` says what is well or was not looked at; `error` what is wrong."""

    check: str
    grade: Grade
    text: str = ""
    error: HetpeerError | None = None

    @classmethod
    def well(cls, check: str, text: str) -> Self:
        return cls(check=check, grade=Grade.OK, text=text)

    @classmethod
    def skipped(cls, check: str, text: str) -> Self:
        return cls(check=check, grade=Grade.SKIP, text=text)

    @classmethod
    def warned(cls, check: str, error: HetpeerError) -> Self:
        return cls(check=check, grade=Grade.WARN, error=error)

    @classmethod
    def failed(cls, check: str, error: HetpeerError) -> Self:
        return cls(check=check, grade=Grade.FAIL, error=error)

    def line(self) -> str:
        """`ok    memory     3.1 GiB of 8 GiB are free`; where something is wrong, with the error's line."""
        return f"{self.grade:<6}{self.check:<11}{escaped(self.text) if self.error is None else self.error.line()}"

    def document(self) -> dict[str, Any]:
        """The object of `--json`. `code`, `why` and `fix` are null where nothing is wrong."""
        error = self.error
        return {
            "check": self.check,
            "grade": str(self.grade),
            "what": self.text if error is None else error.what,
            "code": error and error.code,
            "why": error and error.why,
            "fix": error and error.fix,
        }


def document(findings: Iterable[Finding]) -> dict[str, Any]:
    """All of an examination as one object."""
    return {"schema": SCHEMA, "findings": [finding.document() for finding in findings]}


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """That of the first failure; 0 where none failed."""
    return next(
        (one.error.exit_code for one in findings if one.error and one.grade is Grade.FAIL), ExitCode.OK
    )


def summary(findings: Iterable[Finding]) -> str:
    """`1 failure, 2 warnings`."""
    grades = [finding.grade for finding in findings]
    counts = ((grades.count(Grade.FAIL), "failure"), (grades.count(Grade.WARN), "warning"))
    said = [f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts if count]
    return ", ".join(said) or "nothing is wrong"
