"""Findings of an examination, as lines, as a document, and as an exit status. Pure.

A check gives a few words if all is well, else the error that a user would meet, with its code, reason and
remedy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hetpeer.dht.base.errors import ExitCode, HetpeerError, escaped

SCHEMA = "hetpeer.doctor/1"


class Grade(enum.StrEnum):
    """Grade of a finding. `fail`: a volunteer cannot work; `warn`: it works less well than it could."""

    OK = "ok"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one check: `text` if all is well or it was skipped, else `error`."""

    check: str
    grade: Grade
    text: str = ""
    error: HetpeerError | None = None

    def line(self) -> str:
        """`ok    memory     3.1 GiB of 8 GiB are free`; where something is wrong, with the error's line."""
        said = escaped(self.text) if self.error is None else self.error.line()
        return f"{self.grade:<6}{self.check:<11}{said}"

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
    """The whole examination as one object."""
    return {"schema": SCHEMA, "findings": [finding.document() for finding in findings]}


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """Exit code of the first failure; 0 without one."""
    return next(
        (one.error.exit_code for one in findings if one.error and one.grade is Grade.FAIL), ExitCode.OK
    )


def summary(findings: Iterable[Finding]) -> str:
    """`1 failure, 2 warnings`."""
    grades = [finding.grade for finding in findings]
    counts = ((grades.count(Grade.FAIL), "failure"), (grades.count(Grade.WARN), "warning"))
    said = [f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts if count]
    return ", ".join(said) or "nothing is wrong"
