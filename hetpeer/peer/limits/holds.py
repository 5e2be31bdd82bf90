"""Reasons that hold a volunteer back, each until it is released or until a time (docs/daemon.md).

Pure: times are arguments, in seconds of a clock that runs on while the machine sleeps.
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
        """Hold for `reason` until then; replaces an earlier time for it."""
        self._until[reason] = until

    def release(self, reason: Reason) -> None:
        """`reason` holds no more, if it did."""
        self._until.pop(reason, None)

    def at(self, now: float) -> tuple[Reason, ...]:
        """Reasons that hold at `now`, in order."""
        return tuple(reason for reason in Reason if self._until.get(reason, -math.inf) > now)

    def until(self, now: float) -> float:
        """Time at which the last reason ends by itself: `now` without one, infinity if never."""
        return max((self._until[reason] for reason in self.at(now)), default=now)
