"""The uplink of a volunteer: its rate, its shares in a reduce, and whether a link is congested. Pure.

Rate. A link measures its own rate; two links that share an uplink get half each only while both have
something to send. A busy line is not always full, so the uplink's rate is its best one, not the median. With
few and small frames it never is full: what is measured then is the round-trip time. So a window counts only
if bytes in it had to wait for the line, and a burst only from its first acknowledgement on.

Shares (docs/averaging.md, "Pacing"). TCP connections on one line do not share it evenly. One that got more in
the last reduce begins the next with more, and one whose acknowledgements wait behind others' bytes falls
behind while its line has room. In a reduce the bytes for each peer are known, and the last link decides: each
link gets the part of the uplink with which all finish together. No link gets less later on; one that is
behind gets more, and so do those that are left when others are done.

Congestion. Forwards whose next hop is behind a congested link, with so many blocks or more left to the loss,
are not begun until it is relieved. Nearer ones are begun, or tensors that are waited for could themselves
wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from hetpeer.dht.streams.flow_control import Pool
from hetpeer.stages.pipeline.delays import Delays

SEVERAL = 2
WINDOW_S, ARRIVALS = 1.0, 24
"""Busy seconds and acknowledgements after which a window ends, which keeps the error at its ends small."""
FULL, ACK_S = 2.0, 0.05
"""The uplink is full if bytes under way take FULL round trips, each plus ACK_S (acknowledgement delay)."""
WINDOWS, KNOWN, SEEN = 16, 8, 2
"""Windows that are remembered; the best quarter counts, without chance maxima. With fewer than KNOWN nothing
does.

A sender that is paced to half of the true rate keeps to that, and finds out only little by little.
"""


class UplinkRate:
    """Told of every change: `look`."""

    def __init__(self) -> None:
        self._windows: deque[float] = deque(maxlen=WINDOWS)
        self._begin()
        self._links = 0
        self._flows = False
        """Something has arrived since several links are busy."""
        self._since = 0.0
        self._arrived = 0
        self._waiting = 0

    def _begin(self) -> None:
        self._seconds = self._byte_seconds = 0.0
        self._nbytes = self._arrivals = 0

    def look(self, now: float, links: int, arrived: int, waiting: int, trip_s: float) -> None:
        """Note at `now`: `links` are busy with `waiting` bytes under way, `arrived` bytes are acknowledged in
        all.

        `trip_s`: best round-trip time of the median link, in seconds.
        """
        came = max(arrived - self._arrived, 0)  # a link that is closed takes its own along
        if self._links >= SEVERAL and self._flows:
            self._seconds += now - self._since
            self._byte_seconds += (now - self._since) * self._waiting
            self._nbytes += came
            self._arrivals += came > 0
            if self._seconds >= WINDOW_S and self._arrivals >= ARRIVALS:
                if self._byte_seconds >= FULL * (trip_s + ACK_S) * self._nbytes:
                    self._windows.append(self._nbytes / self._seconds)
                self._begin()
        self._flows = min(links, self._links) >= SEVERAL and (self._flows or came > 0)
        self._links, self._since, self._arrived, self._waiting = links, now, arrived, waiting

    @property
    def rate(self) -> float:
        """Bytes/s; 0 while too little is known."""
        return self._best() if len(self._windows) >= KNOWN else 0.0

    @property
    def seen(self) -> float:
        """Bytes/s for people and planners, which a low guess does not slow down; 0 before `SEEN` windows."""
        return self._best() if len(self._windows) >= SEEN else 0.0

    def _best(self) -> float:
        best = sorted(self._windows, reverse=True)
        return best[max((len(best) - 1) // 4, 1)]


AIR = 1.08
"""Factor above the measured rate: unmeasured heads are a twentieth, and a faster link must be noticed."""
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
        """Begin the reduce of `step`, in place of any in progress; `loads`: peer → amount, in any unit."""
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
        """Peer → bytes/s of an uplink of `uplink` bytes/s (0: unknown); other links are not limited."""
        if not 0 < uplink < PACED_BELOW:
            return {}
        left = max(sum(self._left.values()), 1)
        return {peer: AIR * uplink * max(part, self._left[peer] / left) for peer, part in self._parts.items()}


GRADIENTS, SHARDS, ACTIVATIONS = range(3)
"""Pools of grants; activations have one per block left to the loss (`PoolNumbers`)."""

CONGESTED_S, RELIEVED_S = 2.0, 1.0
"""Seconds that the line needs for what is under way: congested above the first, relieved below the second."""
LEAST_FRAMES = 3
"""Frames that must be under way: one that is long on a slow link is no congestion."""
CONGESTED_BYTES = 8 << 20
"""Stands for the seconds while the line's rate is not known."""


def pool_at(blocks_left: int) -> Pool:
    """Pool of an activation with `blocks_left` > 0 to the loss; docs/links.md says what may wait for what."""
    return ACTIVATIONS + blocks_left - 1


@dataclass(frozen=True, slots=True)
class PoolNumbers:
    """Pools of activations in a run with `blocks` blocks.

    If activations of a step wait until an older step is committed (staleness by stage), they must not have
    its room: so of `apart` numbers in a row each has pools of its own. These are short while such a step
    waits, and hold no forwards of others back then (`Pressure`), since their numbers are beyond all blocks.

        PoolNumbers(blocks=4).of(blocks_left=2, step=7)  # 3
        PoolNumbers(blocks=4, apart=3).of(blocks_left=2, step=7)  # 11
    """

    blocks: int
    apart: int = 0
    """Numbers among which those of all steps under way are; 0: all steps share the pools."""

    @classmethod
    def of_run(cls, blocks: int, staleness: int, delays: Delays) -> PoolNumbers:
        """Pools of a run of which up to `staleness` steps begin early, and perhaps a mean is among them."""
        return cls(blocks, staleness + 2 if delays.stages else 0)

    def of(self, blocks_left: int, step: int) -> Pool:
        """Pool of an activation of `step` with `blocks_left` > 0 to the loss."""
        return pool_at(blocks_left) + (self.blocks * (1 + step % self.apart) if self.apart else 0)

    def count(self, most_left: int) -> int:
        """Pools in all, of activations with up to `most_left` blocks to the loss."""
        return pool_at(most_left) + 1 + self.blocks * self.apart


class Pressure:
    """The state of one link."""

    def __init__(self) -> None:
        self.held: int | None = None
        """Blocks left to the loss from which on forwards are held back; None: none are."""

    def judge(self, waiting: Iterable[Pool], frames: int, nbytes: int, rate: float) -> bool:
        """Judge the link; returns whether `held` has changed.

        `waiting`: pools without a grant; `frames`, `nbytes`: under way; `rate`: bytes/s or 0.
        """
        seconds = nbytes / rate if rate else CONGESTED_S * nbytes / CONGESTED_BYTES
        slow = self.held == 0 and seconds > RELIEVED_S
        slow = frames >= LEAST_FRAMES and (slow or seconds > CONGESTED_S)
        short = min((pool - pool_at(0) for pool in waiting if pool >= ACTIVATIONS), default=None)
        before, self.held = self.held, 0 if slow else short
        return self.held != before
