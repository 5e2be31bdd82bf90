"""What holds a volunteer back: a set of reasons, each until it is released or until a time (docs/daemon.md).

Pure: times are given, in seconds of a clock that does not stand still while the machine sleeps.
"""

from __future__ import annotations

import enum
import math


class Reason(enum.StrEnum):
    """Why a volunteer is held back, in the order in which they are told."""

    USER = "user"
    BATTERY = "battery"
    IDLE = "idle"
    SCHEDULE = "schedule"
    TEMPERATURE = "temperature"
    POWER = "power"
    GAME = "game"
    TRANSFER_CAP = "transfer_cap"
    SETTINGS = "settings"
    """A new worker takes the place of one with other limits."""


class Holds:
    """The reasons that there are. A volunteer works when there is none."""

    def __init__(self) -> None:
        self._until: dict[Reason, float] = {}

    def hold(self, reason: Reason, until: float = math.inf) -> None:
        """`reason` holds from now on; what was said of it before does not count any more."""
        self._until[reason] = until

    def release(self, reason: Reason) -> None:
        """`reason` holds no more, if it did."""
        self._until.pop(reason, None)

    def at(self, now: float) -> tuple[Reason, ...]:
        """What holds at `now`, in order."""
        return tuple(reason for reason in Reason if self._until.get(reason, -math.inf) > now)

    def until(self, now: float) -> float:
        """When nothing holds any more if nothing else is said: `now` if nothing does, infinity if never."""
        return max((self._until[reason] for reason in self.at(now)), default=now)
