"""A volunteer's life in a run: its phase and position, the graphs and the state that its worker has.

Pure. Every change of phase and position is a method here, from the handshake to the end; nothing else sets
them. member.py says which message leads to which of them, and ends the work that is void with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Choose, Effect, FetchState, Prepare, SaveState, Tell
from hetpeer.averaging.member.position import Position


class Phase(enum.Enum):
    """A member's life in the run, as `status` shows it."""

    JOINING = "joining"
    """The volunteer has no place."""
    PREPARING = "preparing"
    SYNCING = "syncing"
    """The volunteer waits for the state of its blocks, or loads it."""
    READY = "ready"
    TRAINING = "training"
    REDUCING = "reducing"
    APPLYING = "applying"
    """The volunteer applies a commit. Most messages wait until that is done."""
    STOPPED = "stopped"


class MemberLife:
    """The life of one volunteer that introduces itself with `hello`.

    >>> life = MemberLife(m.Hello(run="run", incarnation=1))
    >>> life.enter(m.Welcome(line=life.line, version=0, member=False, places=()))
    Choose(places=())
    >>> life.phase
    <Phase.JOINING: 'joining'>
    """

    def __init__(self, hello: m.Hello) -> None:
        self.phase = Phase.JOINING
        self.position = Position()
        self.hello = hello
        """Our Hello: our incarnation, and what this machine can do, as far as it has tried."""
        self._backup = False
        """Whether we keep our place and take part in no step, by the coordinator's last word."""
        self._graphs: m.Range | None = None
        """Blocks whose graphs the worker has."""
        self._preparing: m.Range | None = None
        """Blocks whose graphs the worker loads."""
        self._fetching: int | None = None
        """The version that is being loaded."""

    @property
    def line(self) -> m.TermView:
        """Our term-view."""
        return self.position.line

    @property
    def is_spared(self) -> bool:
        """Whether we are a backup with our graphs loaded: in no step until the coordinator says so."""
        return self._backup and self.phase in (Phase.SYNCING, Phase.READY)

    # ── sessions ────────────────────────────────────────────────────────────────────────────────────────────

    def greet(self, uplink: float, coordinate: tuple[int, ...]) -> Tell:
        """Begin a session: say Hello, with the states that we hold.

        `uplink`: bytes/s, 0 if not measured. `coordinate`: where we are in the network; empty: not known.
        """
        place = self.position.place if self.position.place == self._graphs else None
        known = {"held": self.position.held(), "place": place, "cluster": self.line.cluster}
        self.hello = self.hello.model_copy(
            update={
                "uplink": uplink or self.hello.uplink,
                "coordinate": coordinate or self.hello.coordinate,
            }
        )
        return Tell(self.hello.model_copy(update=known))

    def reborn(self, incarnation: int) -> None:
        """Go on as a new incarnation; it trusts nothing that the worker holds."""
        self.position.distrust()
        self.hello = self.hello.model_copy(update={"incarnation": incarnation})
        self.phase = Phase.JOINING

    def welcomed(self, message: m.Welcome) -> None:
        """Take over the term-view of the session. A state of another history is not trusted."""
        since = message.line.view if message.since is None else message.since
        if message.line.cluster != self.line.cluster or not since <= self.line.view <= message.line.view:
            self.position.distrust()  # the run went back without us: an equal version would be another one
        self.position.line, self._backup = message.line, message.backup
        self._fetching = None

    def enter(self, message: m.Welcome) -> Effect:
        """Say Ready, ask for the state, or choose a place, after `welcomed`."""
        if not message.member or self.position.place is None:
            self.phase = Phase.JOINING
            return Choose(message.places)
        return self.ready() if self.position.version == message.version else self.sync()

    def chosen(self, place: m.Place) -> list[Effect]:
        """The driver chose `place` from those offered (`Choose`)."""
        return [Tell(m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))]

    # ── a place and its graphs ──────────────────────────────────────────────────────────────────────────────

    def may_take(self, message: m.Granted) -> bool:
        """Whether the place is of our term-view, and not of one that is past.

        It may be in another cluster than the place before, if that was not founded yet or is no more.
        """
        waits = self.line.cluster != message.line.cluster and self.line.term == message.line.term
        return message.line == self.line or waits

    def take(self, message: m.Granted) -> list[Effect]:
        """Take a place: load its graphs, unless the worker has them, then ask for its state."""
        place = (message.begin, message.end)
        if self.position.place != place or message.line != self.line:
            self.position.distrust()
        self.position.line, self.position.place, self._backup = message.line, place, message.backup
        self._fetching = None
        if self._graphs == place:
            return [self.sync()]
        self._graphs, self.phase = None, Phase.PREPARING
        if self._preparing == place:
            return []
        self._preparing = place
        return [Prepare(message.begin, message.end)]

    def prepared(self, flops_per_second: float) -> list[Effect]:
        """The graphs of the last `Prepare` are loaded; the device reaches so many FLOP/s on them."""
        if self._preparing is None:
            return []
        self.hello = self.hello.model_copy(update={"flops_per_second": flops_per_second})
        self._graphs, self._preparing = self._preparing, None
        awaited = self.phase is Phase.PREPARING and self._graphs == self.position.place
        return [self.sync()] if awaited else []

    # ── a state ─────────────────────────────────────────────────────────────────────────────────────────────

    def sync(self) -> Tell:
        """Ask which state our blocks are to have."""
        self.phase = Phase.SYNCING
        return Tell(m.Prepared(flops_per_second=self.hello.flops_per_second))

    def fetch(self, message: m.Fetch) -> Effect:
        """Fetch the state of our blocks at a version, unless we hold it with the agreed digests."""
        self.phase, self._backup = Phase.SYNCING, message.backup
        agreed = all(message.digests.get(b, d) == d for b, d in self.position.digests.items())
        if self.position.version == message.version and agreed:
            self._fetching = None
            return self.ready()
        self.position.distrust()  # the state is about to be replaced block by block
        self._fetching = message.version
        return FetchState(message.line, message.version, message.sources, message.digests, message.origin)

    def loaded(self, line: m.TermView, version: int, digests: Mapping[int, str]) -> list[Effect]:
        """The worker holds `version` of all our blocks (`FetchState`); `line` is that of the Fetch."""
        if line != self.line or version != self._fetching:
            return []
        self._fetching = None
        self.position.version, self.position.digests = version, dict(digests)
        return [self.ready()]

    def ready(self) -> Tell:
        """Say that we hold a version of our blocks."""
        self.phase = Phase.READY
        assert self.position.version is not None
        return Tell(m.Ready(line=self.line, version=self.position.version, held=self.position.held()))

    def save(self, message: m.Save) -> list[Effect]:
        """Upload the states that are asked for, if we hold that version."""
        if message.version != self.position.version:
            return []
        held = self.position.digests
        digests = {block: held[block] for block in message.blocks if block in held}
        return [SaveState(self.line, message.version, digests, message.stored)]

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def may_begin(self, step: int) -> bool:
        """Whether we have a place, its graphs, and no later version than `step` begins with."""
        if self.position.place is None or self.phase in (Phase.JOINING, Phase.PREPARING):
            return False
        return self.position.version is None or step >= self.position.version

    def enter_group(self, number: tuple[int, int]) -> None:
        """Note that we average with the group of this term and number."""
        self.position.group = number

    def train(self) -> None:
        """A step has begun, and none was in progress; or an averaging that stops the steps."""
        self.phase = Phase.TRAINING

    def reduce(self) -> None:
        """A plan is out for a step, or for an averaging that stops the steps."""
        self.phase = Phase.REDUCING

    def apply(self) -> None:
        """A commit is being applied."""
        self.phase = Phase.APPLYING

    def updated(self, step: int, states: Mapping[int, str], *, trains: bool) -> Tell:
        """All our blocks are at version `step` + 1 with the digests `states`; `trains`: other steps go on."""
        self.position.version, self.position.digests = step + 1, dict(states)
        self.phase = Phase.TRAINING if trains else Phase.READY
        return Tell(m.Applied(line=self.line, step=step, held=self.position.held()))

    # ── roll-back, and the end ──────────────────────────────────────────────────────────────────────────────

    def goes_back(self, message: m.RolledBack) -> bool:
        """Whether the roll-back is of our cluster, and not known yet."""
        line = message.line
        here = line.cluster == self.line.cluster
        return here and (line.term, line.view) > (self.line.term, self.line.view)

    def go_back(self, message: m.RolledBack) -> list[Effect]:
        """Go back, and keep our state only if it is the version to go back to."""
        self.position.line, self._fetching = message.line, None
        if self.phase is Phase.APPLYING or self.position.version != message.version:
            self.position.distrust()
        if self.phase in (Phase.JOINING, Phase.PREPARING):
            return []
        # Where steps begin again from the version that we have, nobody else may have it.
        return [self.sync() if self.position.version is None else self.ready()]

    def stop(self) -> None:
        """The run is over for us."""
        self.phase = Phase.STOPPED
