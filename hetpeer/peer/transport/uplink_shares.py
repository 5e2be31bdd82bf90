"""Shares of the uplink: how much each link may use during a reduce. Pure. Docs: averaging.md, "Pacing".

TCP connections on one line do not share it evenly. One that got more in the last reduce begins the next with
more, and one whose acknowledgements wait behind others' bytes falls behind while its line has room. In a
reduce the bytes for each peer are known, and the last link decides: each link gets the part of the uplink
with which all finish together. No link gets less later on; one that is behind gets more, and so do those that
are left when others are done.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

AIR = 1.08
"""Factor above the measured rate: heads are a twentieth and were not measured, and a faster line must be
noticed.
"""
PACED_BELOW = 500e6 / 8
"""Bytes/s; a faster uplink is not what a reduce waits for."""


class UplinkShares:
    """The reduce in progress; none to begin with."""

    def __init__(self) -> None:
        self._step: Hashable = None
        self._parts: Mapping[str, float] = {}
        self._left: dict[str, int] = {}

    @property
    def reduces(self) -> bool:
        """Whether a step is being reduced."""
        return self._step is not None

    def begin(self, step: Hashable, loads: Mapping[str, int]) -> None:
        """`step` is reduced with `loads`: peer → amount, in any unit. It replaces a reduce that is not
        over.
        """
        total = sum(loads.values())
        self._left = {peer: load for peer, load in loads.items() if load}
        self._step, self._parts = step, {peer: load / total for peer, load in self._left.items()}

    def arrived(self, step: Hashable, peer: str, load: int) -> bool:
        """`load` more has arrived at `peer`. Returns whether the rates of links change."""
        if step != self._step or peer not in self._left:
            return False
        self._left[peer] = max(self._left[peer] - load, 0)
        return True

    def end(self, step: Hashable) -> bool:
        """`step` is over; whether it was the one in progress."""
        if step != self._step:
            return False
        self._step, self._parts, self._left = None, {}, {}
        return True

    def rates(self, uplink: float) -> dict[str, float]:
        """Peer → bytes/s of an uplink of `uplink` bytes/s (0: unknown); links that are not named are not
        limited.
        """
        if not 0 < uplink < PACED_BELOW:
            return {}
        left = max(sum(self._left.values()), 1)
        return {peer: AIR * uplink * max(part, self._left[peer] / left) for peer, part in self._parts.items()}
