"""The registry of admission policies: a new policy is one module and one line here (docs/extending.md)."""

from __future__ import annotations

from hetpeer.bootstrap.run.admission_policy import AdmissionPolicy, Open
from hetpeer.bootstrap.run.author_admission import Invited, Listed

ADMISSION_POLICIES: dict[str, type[AdmissionPolicy]] = {
    "open": Open,
    "invited": Invited,
    "listed": Listed,
}
"""Name in the manifest → policy."""
