"""Traffic of a volunteer in the current month, kept over restarts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write

NAME = "transfer.json"

Count = Annotated[int, Field(ge=0)]
_log = logging.getLogger(__name__)


class Month(BaseModel):
    """Bytes of one month of the local calendar, like `2026-11`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    month: str
    sent: Count = 0
    received: Count = 0

    @property
    def nbytes(self) -> int:
        return self.sent + self.received

    def plus(self, month: str, sent: int, received: int) -> Month:
        """The month with more bytes; a new `month` begins with them."""
        before = self if month == self.month else Month(month=month)
        return Month(month=month, sent=before.sent + sent, received=before.received + received)


def load(home: Path, month: str) -> Month:
    """The saved month, which may be over; an empty one if none is saved."""
    path = home / NAME
    try:
        return Month.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Month(month=month)
    except (OSError, ValidationError) as error:
        _log.warning("%s is damaged, so this month's traffic is counted from 0: %s", path, error)
        return Month(month=month)


def save(home: Path, month: Month) -> None:
    """Write it down as a whole. Raises `LocalError` HP-DISK-001, HP-DISK-002."""
    atomic_write(home / NAME, month.model_dump_json().encode())
