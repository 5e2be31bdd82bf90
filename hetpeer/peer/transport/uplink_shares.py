"""Which link may use how much of our uplink while we reduce. Pure. Docs: averaging.md, "Pacing".

TCP connections that share a line do not share it evenly: who got more in the last reduce begins the next one with more, and one whose acknowledgements wait behind
what others send falls behind while its line has room. In a reduce it is known how much goes to whom, and the last link decides: each gets the part of the uplink
with which all are done at once. Nobody gets less later on; who is behind gets more, and so does who is left when others are done.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

AIR = 1.08
"""Above what was measured: that is without heads, which are a twentieth, and a line that has become faster is to be found out."""
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
        """`step` is reduced: so much, in any unit, goes to each peer. It takes the place of one that is not over."""
        total = sum(loads.values())
        self._left = {peer: load for peer, load in loads.items() if load}
        self._step, self._parts = step, {peer: load / total for peer, load in self._left.items()}

    def arrived(self, step: Hashable, peer: str, load: int) -> bool:
        """So much of what goes to `peer` is there; whether that changes what links may send."""
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
        """Bytes/s that links may send of an uplink that carries `uplink` (0: not known); those that are not named: as TCP likes."""
        if not 0 < uplink < PACED_BELOW:
            return {}
        left = max(sum(self._left.values()), 1)
        return {peer: AIR * uplink * max(part, self._left[peer] / left) for peer, part in self._parts.items()}
