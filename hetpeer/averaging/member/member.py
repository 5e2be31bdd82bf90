"""A volunteer's protocol core: from the handshake to the applied update.

Pure: messages, tensors (as opaque handles) and finished work in, effects out. The daemon and the simulator drive the
same object. It trusts nobody's fields about themselves: senders come from the transport, and whatever is not of our
(term, view, step), or from an incarnation that is not in the roster, changes nothing (docs/protocol.md, fencing).
This is the side that faces the coordinator; worker_side.py faces peers and worker, held_step.py is one step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import (
    Choose,
    Effect,
    FetchState,
    InStep,
    Leave,
    Prepare,
    SaveState,
    StepEffect,
    StepId,
    Stop,
    Tell,
)
from hetpeer.averaging.member.early_tensors import Origin
from hetpeer.averaging.member.held_step import HeldStep
from hetpeer.averaging.member.step_vote import Shape
from hetpeer.averaging.member.worker_side import Working
from hetpeer.stages.pipeline.in_flight import Window

__all__ = ["Effect", "InStep", "Member", "Origin", "Phase", "StepEffect"]


class Phase(enum.Enum):
    """A member's life in the run, as `status` shows it."""

    JOINING = "joining"
    PREPARING = "preparing"
    SYNCING = "syncing"
    READY = "ready"
    TRAINING = "training"
    REDUCING = "reducing"
    APPLYING = "applying"
    STOPPED = "stopped"


class Member(Working):
    """The core of one volunteer. `shape` is what the manifest says of the model's vectors and slots, `window` how many
    microbatches may be under way.
    """

    def __init__(self, me: str, hello: m.Hello, shape: Shape, window: Window | None = None) -> None:
        super().__init__(window)
        self.me = me
        self.phase = Phase.JOINING
        self.place: m.Range | None = None
        self.digests: dict[int, str] = {}
        """Block → digest of its state at `version`."""
        self.loss: float | None = None
        self._hello = hello
        self._shape = shape
        self._graphs: m.Range | None = None
        """Blocks whose graphs the worker has."""
        self._preparing: m.Range | None = None
        self._fetching: int | None = None
        """The version that is being loaded."""
        self._begun = (self.line, -1, 0)
        """Line, number and entry of the last step that was begun."""
        self._deferred: list[m.Message] = []

    @property
    def incarnation(self) -> int:
        return self._hello.incarnation

    # ── the control stream ───────────────────────────────────────────────────────────────────────────────────────

    def connected(self, uplink: float = 0.0) -> list[Effect]:
        """A fresh session with a coordinator: introduce ourselves, with what we still hold. `uplink`: bytes/s, if it was measured since."""
        held = () if self.version is None else self._held()
        place = self.place if self.place == self._graphs else None
        known = {"held": held, "place": place, "cluster": self.line.cluster}
        self._deferred.clear()  # said to the session that is over
        self._hello = self._hello.model_copy(update={"uplink": uplink or self._hello.uplink})
        return [Tell(self._hello.model_copy(update=known))]

    def reborn(self, incarnation: int) -> list[Effect]:
        """After `Leave`: the same volunteer with a new incarnation; what it holds is not trusted any more."""
        self._deferred.clear()
        self._distrust()
        self._hello = self._hello.model_copy(update={"incarnation": incarnation})
        self.phase = Phase.JOINING
        return self._drop_all()

    def receive(self, message: m.Message) -> list[Effect]:
        """A message of the coordinator. Messages of another line of history are ignored."""
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            return []
        if self.phase is Phase.APPLYING and not isinstance(message, self._URGENT):
            self._deferred.append(message)
            return []
        line = getattr(message, "line", None)
        if line is not None and line != self.line and not isinstance(message, self._LINE_SETTERS):
            return []
        effects: list[Effect] = handler(self, message)
        return [*effects, *self._share_worker()]

    # ── joining and syncing ──────────────────────────────────────────────────────────────────────────────────────

    def _welcome(self, message: m.Welcome) -> list[Effect]:
        commit = message.commit
        if (message.line.cluster, message.line.view) != (self.line.cluster, self.line.view):
            self._distrust()  # the run went back without us: an equal version would be of another history
        self.line = message.line
        self._fetching = None
        if commit is not None and commit.step == self.version and self.holds(commit):
            self._deferred.append(message.model_copy(update={"commit": None}))
            effects = [] if commit.group else self._drop_round()
            return [*effects, *self._commit(commit)]
        effects = self._drop_all()
        if not message.member or self.place is None:
            self.phase = Phase.JOINING
            return [*effects, Choose(message.places)]
        if self.version == message.version:
            return [*effects, self._ready()]
        return [*effects, self._sync()]

    def chosen(self, place: m.Place) -> list[Effect]:
        """The daemon chose `place` from those offered."""
        return [Tell(m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))]

    def _refused(self, message: m.Refused) -> list[Effect]:
        return [Choose(message.places)] if self.phase is Phase.JOINING else []

    def _granted(self, message: m.Granted) -> list[Effect]:
        waits = self.line.cluster == m.EVERYBODY and self.line.term == message.line.term
        if message.line != self.line and not waits:
            return []  # late: of a line that is past
        place = (message.begin, message.end)
        if self.place != place:
            self._distrust()
        self.place, self._fetching = place, None
        if message.line != self.line:
            self._distrust()
            self.line = message.line
        effects = self._drop_all()
        if self._graphs == place:
            return [*effects, self._sync()]
        self._graphs, self.phase = None, Phase.PREPARING
        if self._preparing == place:
            return effects
        self._preparing = place
        return [*effects, Prepare(message.begin, message.end)]

    def prepared(self, flops_per_second: float) -> list[Effect]:
        """The graphs of the last `Prepare` are loaded; the device reaches so much on them."""
        if self._preparing is None:
            return []
        self._hello = self._hello.model_copy(update={"flops_per_second": flops_per_second})
        self._graphs, self._preparing = self._preparing, None
        return [self._sync()] if self.phase is Phase.PREPARING and self._graphs == self.place else []

    @property
    def flops_per_second(self) -> float:
        """What this machine reaches on the blocks of its place; a guess before it has tried."""
        return self._hello.flops_per_second

    def _sync(self) -> Tell:
        """We can take the state of our blocks: the coordinator says which."""
        self.phase = Phase.SYNCING
        return Tell(m.Prepared(flops_per_second=self._hello.flops_per_second))

    def _fetch(self, message: m.Fetch) -> list[Effect]:
        if self.phase in (Phase.JOINING, Phase.PREPARING):
            return []  # meant for a place that we had before; we say when we are prepared
        self.phase = Phase.SYNCING
        effects = self._drop_all()
        agreed = all(message.digests.get(b, d) == d for b, d in self.digests.items())
        if self.version == message.version and agreed:
            self._fetching = None
            return [*effects, self._ready()]
        self._distrust()  # block by block the state is about to be another one
        self._fetching = message.version
        order = FetchState(message.line, message.version, message.sources, message.digests, message.origin)
        return [*effects, order]

    def state_loaded(self, line: m.Line, version: int, digests: Mapping[int, str]) -> list[Effect]:
        """The worker holds `version` of all our blocks; `line` is that of the Fetch."""
        if line != self.line or version != self._fetching:
            return []
        self._fetching = None
        self.version, self.digests = version, dict(digests)
        return [self._ready()]

    def _ready(self) -> Tell:
        self.phase = Phase.READY
        assert self.version is not None
        return Tell(m.Ready(line=self.line, version=self.version, held=self._held()))

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, message: m.Begin) -> list[Effect]:
        if message.group:
            return self._begin_round(message)
        line, *last = self._begun
        if line == message.line and [message.step, message.entry] <= last:
            return []  # a step is begun once, unless we were admitted to it again
        self._begun = (message.line, message.step, message.entry)
        if not self._is_for_us(message):
            return []
        if message.step - message.behind != self.version or not self._follows(message):
            return [*self._drop_all(), self._sync()]
        assert self.place is not None
        beside = self._round is not None and self._round.delayed
        effects: list[Effect] = []
        if not message.behind:
            effects = self._drop_steps() if beside else self._drop_all()
        step = HeldStep(self.me, self.place, message, self._shape, self._bench)
        step.links(self._shunned, self._congested)
        self._steps.append(step)
        self.phase = Phase.TRAINING if len(self._steps) == 1 else self.phase
        shuns = self._shuns(again=True)  # the coordinator may be a new one
        return [*effects, *shuns, *step.assign(message.tasks), *self._replay_early()]

    def _follows(self, message: m.Begin) -> bool:
        """Whether the steps in progress are those between the parameters that it is computed with and itself."""
        between = range(message.step - message.behind, message.step)
        return not between or [step.id.number for step in self._steps] == list(between)

    def _begin_round(self, message: m.Begin) -> list[Effect]:
        number = (message.line.term, message.group)
        if number <= self._group or not self._is_for_us(message):
            return []
        self._group = number
        effects = self._drop_all()
        if message.step != self.version:
            return [*effects, self._sync()]
        assert self.place is not None
        self._round = HeldStep(self.me, self.place, message, self._shape, self._bench)
        self.phase = self.phase if message.delayed else Phase.TRAINING
        return [*effects, *self._round.start(), *self._replay_early()]

    def _is_for_us(self, message: m.Begin) -> bool:
        """Whether we have a place, and not a later version already."""
        if self.place is None or self.phase in (Phase.JOINING, Phase.PREPARING):
            return False
        return self.version is None or message.step >= self.version

    def _in_step(self, message: m.InStep) -> list[Effect]:
        step = self._at(message.step)
        if step is None:
            return []
        effects = step.receive(message)
        if not isinstance(message, m.Joined):
            return effects
        return [*effects, *self._shuns(), *self._replay_early()]

    def _gone(self, message: m.Gone) -> list[Effect]:
        if message.group:
            one = self._round
            return [] if one is None or one.id.group != message.group else one.gone(message.peers)
        return [effect for step in self._steps for effect in step.gone(message.peers)]

    def _plan(self, message: m.Plan) -> list[Effect]:
        step = self._named(message)
        if step is None:
            return []
        self.phase = self.phase if step.delayed else Phase.REDUCING
        return [*step.plan(message), *self._replay_early()]

    def _at(self, number: int) -> HeldStep | None:
        """The step in progress that has this number."""
        return next((step for step in self._steps if step.id.number == number), None)

    def _named(self, message: m.Plan | m.Commit) -> HeldStep | None:
        """The step or averaging that the message is of, if it is in progress."""
        if not message.group:
            return self._at(message.step)
        return self._round if self._round is not None and self._round.id.group == message.group else None

    # ── apply ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(self, message: m.Commit) -> list[Effect]:
        step = self._named(message)
        if step is None or step.commit is not None:
            return []
        if not step.matches(message) or message.step != self.version:
            return [*self._drop_all(), self._sync()]
        self.phase = Phase.APPLYING
        self.loss = self.loss if message.loss is None else message.loss
        # beside an averaging it was of evaluation alone: nobody says when that is over
        ended = self._drop_steps() if message.group else []
        return [*ended, *step.apply(message, self._needed(step))]

    def applied(self, step: StepId, block: int, digest: str) -> list[Effect]:
        """`ApplyUpdate` or `InstallAverage` is done: the block is at version `step`+1 with these bits."""
        held = self._in(step)
        record = None if held is None else held.applied(block, digest)
        if held is None or record is None:
            return []
        number = record.step.number
        self.version, self.digests = number + 1, dict(record.states)
        told = Tell(m.Applied(line=self.line, step=number, held=self._held()))
        ended = self._drop_round() if step.group else self._drop_step(held)
        self.phase = Phase.TRAINING if self._steps else Phase.READY
        effects: list[Effect] = [record, told, *ended]
        for one in self._steps:
            effects += one.catch_up() if one.id.number == self.version else ()
        effects += self._share_worker()
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            effects += self.receive(message)
        return effects

    def _save(self, message: m.Save) -> list[Effect]:
        if message.version != self.version:
            return []
        digests = {block: self.digests[block] for block in message.blocks if block in self.digests}
        return [SaveState(self.line, message.version, digests)]

    # ── going back, and the end ──────────────────────────────────────────────────────────────────────────────────

    def _rolled_back(self, message: m.RolledBack) -> list[Effect]:
        elsewhere = message.line.cluster != self.line.cluster
        if elsewhere or (message.line.term, message.line.view) <= (self.line.term, self.line.view):
            return []
        self.line, self._fetching = message.line, None
        if self.phase is Phase.APPLYING or self.version != message.version:
            self._distrust()
        self._deferred.clear()
        effects = self._drop_all()
        if self.phase in (Phase.JOINING, Phase.PREPARING):
            return effects
        # where steps are begun anew from the version that we have, nobody else may have it either
        return [*effects, self._sync() if self.version is None else self._ready()]

    def _fenced(self, message: m.Fenced) -> list[Effect]:
        return [Leave(message.why)]

    def _finished(self, message: m.Finished) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [*self._drop_all(), Stop(message.why, message.completed)]

    def _rejected(self, message: m.Rejected) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [*self._drop_all(), Stop(message.why, completed=False, rejected=message.reason)]

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _distrust(self) -> None:
        """What the worker holds is not, or will not stay, the state of one known version."""
        self.version, self.digests = None, {}

    def _held(self) -> tuple[m.Held, ...]:
        assert self.version is not None
        return tuple(m.Held(block=b, version=self.version, digest=d) for b, d in sorted(self.digests.items()))

    _LINE_SETTERS = (m.Welcome, m.Granted, m.RolledBack)
    _URGENT = (m.RolledBack, m.Fenced, m.Finished, m.Rejected)
    _HANDLERS: Mapping[type, Callable[..., list[Effect]]] = {
        m.Welcome: _welcome,
        m.Refused: _refused,
        m.Granted: _granted,
        m.Fetch: _fetch,
        m.Begin: _begin,
        m.Joined: _in_step,
        m.Reroute: _in_step,
        m.Gone: _gone,
        m.Settled: _in_step,
        m.Evict: _in_step,
        m.Check: _in_step,
        m.Show: _in_step,
        m.Prove: _in_step,
        m.Testify: _in_step,
        m.Plan: _plan,
        m.Commit: _commit,
        m.Save: _save,
        m.RolledBack: _rolled_back,
        m.Fenced: _fenced,
        m.Finished: _finished,
        m.Rejected: _rejected,
    }
