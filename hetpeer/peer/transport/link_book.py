"""Figures of a volunteer's links, the codec and ratio of each next bundle, and the advertised microbatch
time. Pure.

A volunteer that was slow in a bad moment is given nothing, computes nothing, and would never be seen to have
become faster. So it claims less and less until it is given one microbatch, which is measured. If it is as
slow as before, it waits twice as long until the next one: with more volunteers than microbatches there would
be a slow one to wait for in each step (`PaceClaim`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.run.settings import LinkSettings
from hetpeer.peer.transport.uplink import UplinkRate
from hetpeer.stages.links.adaptive_ratio import (
    FREE,
    LEAST_SHARE,
    SLACK,
    AdaptiveRatio,
    coding_for,
    gentler,
    ratio_of,
    steadied,
)
from hetpeer.stages.links.codec import Codec

EASE = 0.9
"""Factor of the claim with each idle step."""
LONGEST = 64
"""Most idle steps for one such factor."""
LEAST = 1 / 16
"""Least claim, as a share of the measured time: one idle for another reason must not be given everything."""


class PaceClaim:
    """Idle steps, and what was measured before them."""

    def __init__(self, done: int = 0) -> None:
        """`done` forwards and backwards so far, elsewhere."""
        self.idle = 0
        """Steps since a microbatch was computed here."""
        self._every = 1
        """Idle steps for one factor EASE; doubles while the volunteer is found as slow as before."""
        self._done = done
        self._before = 0.0

    def say(self, done: int, seconds: float) -> float:
        """The claim in seconds; `done`: forwards and backwards so far, the last at `seconds` a microbatch."""
        if done == self._done:
            if not self.idle:
                self._before = seconds
            self.idle += 1
        elif self.idle:
            if self._before:
                self._every = 1 if seconds < EASE * self._before else min(2 * self._every, LONGEST)
            self.idle = 0
        self._done = done
        return float(seconds * max(EASE ** (self.idle / self._every), LEAST))


RECENT = 33
"""Last microbatches that are remembered. A link aims at their median, as a busy moment is no slow machine."""
WORK = ("forward", "backward")
WORTH_S = 0.01
"""Seconds; bundles that take less on their link stay uncompressed: such times come from the scheduler."""
SQUEEZE_BELOW = 250e6 / 8
"""Bytes/s; on a faster line zstd takes longer than it saves: a tenth of values, at 300 MB/s."""


@dataclass(slots=True)
class LinkFigures:
    """One outgoing link."""

    rate: float = 0.0
    """Bytes/s at which our bytes last arrived there, as the peer says; 0: not known."""
    trip_s: float = 0.0
    """Round-trip time in seconds, the best so far; 0: unknown."""
    activation_bytes: int = 0
    """The last activation sent, as it was written."""
    gradient_bytes: int = 0
    """Bytes of the last gradient sent, as it was written."""
    codecs: dict[bool, Codec] = field(default_factory=dict)
    """Is gradient → codec of the last one, if the run's links adapt."""
    aim_s: float = 0.0
    """Seconds that a bundle was to take at most; 0: not known."""
    bundle_bytes: int = 0
    """The largest bundle sent so far, as it lies in memory."""
    raw_bytes: int = 0
    """All bundles, as they lie in memory."""
    sent_bytes: int = 0
    """Bytes of all bundles as they were written."""
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The last bundles: (as they lie in memory, as they were written)."""

    @property
    def seconds(self) -> float:
        """Seconds to send the largest bundle uncompressed, alone; 0 if the rate is unknown."""
        return self.bundle_bytes / self.rate if self.rate else 0.0

    @property
    def codec(self) -> str:
        """The coarsest codec in use there; empty if the run's links do not adapt."""
        return str(min(self.codecs.values(), key=lambda one: one.cost(LEAST_SHARE))) if self.codecs else ""

    @property
    def ratio(self) -> float:
        """Compression ratio of the last bundles. Those before the rate was known are left out."""
        sent = sum(written for _, written in self.recent)
        return sum(raw for raw, _ in self.recent) / sent if sent else 1.0


class LinkBook:
    """The links of one volunteer. `settings` are those of the run.

    `offered`: bytes/s of the uplink as it was measured before the first place; 0: unknown. It stands for all
    rates that are not known yet.
    """

    def __init__(self, settings: LinkSettings, offered: float = 0.0) -> None:
        self.target = 0.0
        """Seconds that every link is to take for a microbatch, as the coordinator said; 0: not known."""
        self.outflow, self.reducing = UplinkRate(), UplinkRate()
        """Rates of all links together: always, and during reduces, when they likely wait for our uplink."""
        self._settings, self._offered = settings, offered
        self._forward = Codec.of(settings.codec)
        self._backward = Codec.of(settings.backward or settings.codec)
        self._reduce = Codec.of(settings.reduce)
        self.done: Counter[str] = Counter()
        """Kind of work (see `computed`) → how often it was done in all."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        """Kind of work → seconds that it took in all."""
        self.raw_bytes = 0
        """Bytes of all bundles sent so far to all peers, as they lie in memory."""
        self.sent_bytes = 0
        """Bytes of the same bundles as they were written."""
        self._largest = {False: 0, True: 0}
        """Is gradient → bytes of the largest bundle for any peer, as it lies in memory."""
        self._computing: dict[str, deque[float]] = {}
        self._claim = PaceClaim()
        self._past: set[str] = set()
        """Kinds of WORK whose figures predate our idle steps: the next measurement replaces them all."""
        self.links: dict[str, LinkFigures] = {}
        """Peer → figures."""

    @property
    def feedback(self) -> bool:
        """Whether what a codec leaves out is added to the next gradient."""
        return self._settings.feedback

    def allows(self, codec: Codec, kind: str) -> bool:
        """Whether a peer may write a tensor of that kind in `codec`: the run's codec, or a gentler one."""
        limit = {"activation": self._forward, "gradient": self._backward}.get(kind, self._reduce)
        return codec == limit or codec in gentler(limit)

    def measured(self, peer: str, rate: float, trip_s: float) -> None:
        """`peer` says at which rate our bytes arrive, in bytes/s; its answer took `trip_s` at best."""
        link = self._link(peer)
        link.rate, link.trip_s = rate, trip_s

    def computed(self, what: str, seconds: float) -> None:
        """Time of `forward`, `backward`, `encode`, `decode` (microbatch), `inspect` or `update` (block)."""
        times = self._computing.setdefault(what, deque(maxlen=RECENT))
        if what in self._past:
            self._past.discard(what)
            times.clear()
        times.append(seconds)
        self.done[what] += 1
        self.spent[what] += seconds

    def begin_anew(self) -> None:
        """Forget computing times: other blocks are computed from now on."""
        self._computing.clear()
        self._claim = PaceClaim(sum(self.done[what] for what in WORK))
        self._past.clear()

    def mean(self, what: str) -> float:
        """Seconds of what `computed` is told of, as they add up; 0: not known."""
        return fmean(self._computing.get(what, (0.0,)))

    @property
    def varies(self) -> float:
        """Microbatch times' standard deviation / mean, averaged over forwards and backwards; 0: unknown."""
        shares = (
            pstdev(times) / fmean(times) for what in WORK if any(times := self._computing.get(what, ()))
        )
        return fmean([*shares] or [0.0])

    def _typical(self, what: str) -> float:
        return median(self._computing.get(what, (0.0,)))

    @property
    def computing(self) -> float:
        """Seconds of a microbatch here, forward and backward, when nothing else happens."""
        return sum(map(self._typical, WORK))

    @property
    def _own_s(self) -> float:
        """`computing`, or its guess before the first backward, which takes twice as long as a forward."""
        return self.computing if self._computing.get("backward") else 3 * self._typical("forward")

    def coding(
        self, peer: str, nbytes: int, width: float, *, gradient: bool, batch: int = 0
    ) -> AdaptiveRatio:
        """Codec and ratio of the next bundle for `peer`, of a step that trains `batch`.

        `nbytes` in memory, `width` bytes of a float (0: it has none).
        """
        link = self._link(peer)
        link.bundle_bytes = max(link.bundle_bytes, nbytes)
        self._largest[gradient] = max(self._largest[gradient], nbytes)
        limit = self._backward if gradient else self._forward
        if limit.values is None or not width:
            return AdaptiveRatio(Codec())
        most = self._settings.ratio_in(batch)
        if not self._settings.adaptive:
            return coding_for(limit, most, width)
        link.aim_s = aim = self.target or self._own_s
        seconds = self._line_s(link, nbytes) if aim else 0.0
        needed = ratio_of(seconds, max(aim, WORTH_S), most)
        rounded = ratio_of(seconds, max(SLACK * aim, WORTH_S), min(most, FREE))
        found = steadied(link.codecs.get(gradient, Codec()), limit, needed, most, width, rounded)
        link.codecs[gradient] = found.codec
        return found

    def _line_s(self, link: LinkFigures, nbytes: int) -> float:
        """Seconds of the line for a bundle of `nbytes`; 0: its rate is unknown.

        Between two stages each microbatch takes an activation and a gradient up one line, which a link's own
        rate does not show. If the line is known to be slower than both links one by one, each bundle has the
        time of both.
        """
        rate = link.rate or self._offered
        uplink = self.outflow.seen if link.rate else self._offered
        if uplink:  # small bundles do not fill a line, and it is no slower than a link that it carries
            uplink = max(uplink, *(one.rate for one in self.links.values()))
        alone = nbytes / rate if rate else 0.0
        if not uplink or not all(self._largest.values()):
            return alone
        return max(alone, sum(self._largest.values()) / uplink)

    def squeezes(self, peer: str) -> bool:
        """Whether the line to `peer` is slow enough for time to be spent on fewer bytes."""
        return self._link(peer).rate < SQUEEZE_BELOW

    def sent(self, peer: str, raw: int, nbytes: int, *, gradient: bool, evaluated: bool = False) -> None:
        """A bundle of `raw` bytes left as `nbytes`. One of an evaluation is never compressed, and no sign of
        what others will take.
        """
        link = self._link(peer)
        link.raw_bytes += raw
        link.sent_bytes += nbytes
        if not evaluated:
            if gradient:
                link.gradient_bytes = nbytes
            else:
                link.activation_bytes = nbytes
            link.recent.append((raw, nbytes))
        self.raw_bytes += raw
        self.sent_bytes += nbytes

    def paced(self, coordinate: tuple[int, ...] = ()) -> m.Paced:
        """The `Paced` message of a step, of one that is at that network coordinate."""
        done = sum(self.done[what] for what in WORK)
        computing = self._claim.say(done, self.computing)
        if self._claim.idle:
            self._past.update(WORK)
        known = {
            peer: min(self._line_s(link, link.bundle_bytes), m.FASTEST)
            for peer, link in self.links.items()
            if link.rate
        }
        return m.Paced(computing=computing, links=known, uplink=self.reducing.rate, coordinate=coordinate)

    def keep_only(self, peers: frozenset[str]) -> None:
        """Forget peers that have left."""
        for peer in self.links.keys() - peers:
            del self.links[peer]

    def _link(self, peer: str) -> LinkFigures:
        return self.links.setdefault(peer, LinkFigures())
