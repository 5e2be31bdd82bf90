"""A volunteer's protocol core: from the handshake to the applied update.

Pure: messages, tensors (as opaque handles) and finished work in, effects out. The daemon and the simulator
drive the same object. Senders come from the transport, and a message or tensor of another (term, view, step),
or from an incarnation that is not in the roster, changes nothing (docs/protocol.md, fencing).

All transitions of a volunteer are here: `_TABLE` names the method for each message of the coordinator;
nothing else sets `phase` or `position`. Peers and worker speak to `Member.work` (work_in_progress.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from hetpeer.averaging.member.held_step import HeldStep
from hetpeer.averaging.member.position import Origin, Position
from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.averaging.member.work_in_progress import WorkInProgress
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow

__all__ = ["Effect", "InStep", "Member", "Origin", "Phase", "StepEffect"]


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


class _Row(NamedTuple):
    """Handler of one kind of message."""

    method: Callable[[Any, Any], list[Effect]]
    phases: frozenset[Phase] = frozenset(Phase)
    """Phases in which the message is handled; in others it is ignored."""
    any_line: bool = False
    """Handled even if it names another term-view than ours."""
    urgent: bool = False
    """Handled at once in APPLYING; others wait until the update is applied."""


class Member:
    """The core of one volunteer. `shape`: the model by the manifest; `window`: limits microbatches in flight.

    Methods return effects, which the driver carries out in order (effects.py). `connected` begins a
    session, then come `receive` for messages, the answers that effects name, and the methods of `work`.
    """

    def __init__(
        self, me: str, hello: m.Hello, shape: ModelShape, window: InFlightWindow | None = None
    ) -> None:
        self.me = me
        self.phase = Phase.JOINING
        self.position = Position()
        self.work = WorkInProgress(self.position, window)
        self.loss: float | None = None
        """Mean loss of the newest committed step; None before the first one."""
        self.hello = hello
        """Our Hello: our incarnation, and what this machine can do, as far as it has tried."""
        self.backup = False
        """Whether we keep our place and take part in no step, by the coordinator's last word."""
        self._shape = shape
        self._graphs: m.Range | None = None
        """Blocks whose graphs the worker has."""
        self._preparing: m.Range | None = None
        """Blocks whose graphs the worker loads."""
        self._fetching: int | None = None
        """The version that is being loaded."""
        self._begun = (self.line, -1, 0)
        """Term-view, number and entry of the last step that was begun."""
        self._deferred: list[m.Message] = []
        """Messages that came in APPLYING and wait until the update is applied."""

    @property
    def line(self) -> m.TermView:
        """Our term-view."""
        return self.position.line

    @property
    def is_spared(self) -> bool:
        """Whether we are a backup with our graphs loaded: in no step until the coordinator says so."""
        return self.backup and self.phase in (Phase.SYNCING, Phase.READY)

    @property
    def place(self) -> m.Range | None:
        """Blocks [begin, end) that we hold."""
        return self.position.place

    @property
    def version(self) -> int | None:
        """Version of the state in the worker; None while there is none that can be trusted."""
        return self.position.version

    # ── the control stream ──────────────────────────────────────────────────────────────────────────────────

    def connected(self, uplink: float = 0.0, coordinate: tuple[int, ...] = ()) -> list[Effect]:
        """Begin a session: say Hello, with the states that we hold.

        `uplink`: bytes/s, 0 if not measured. `coordinate`: where we are in the network; empty: not known.
        """
        place = self.place if self.place == self._graphs else None
        known = {"held": self.position.held(), "place": place, "cluster": self.line.cluster}
        self._deferred.clear()  # they were said to the session that is over
        self.hello = self.hello.model_copy(
            update={
                "uplink": uplink or self.hello.uplink,
                "coordinate": coordinate or self.hello.coordinate,
            }
        )
        return [Tell(self.hello.model_copy(update=known))]

    def reborn(self, incarnation: int) -> list[Effect]:
        """Go on as a new incarnation, after `Leave`; it trusts nothing that the worker holds."""
        self._deferred.clear()
        self.position.distrust()
        self.hello = self.hello.model_copy(update={"incarnation": incarnation})
        self.phase = Phase.JOINING
        return self.work.drop_all()

    def receive(self, message: m.Message) -> list[Effect]:
        """Handle a message of the coordinator as its row of `_TABLE` says."""
        row = self._TABLE.get(type(message))
        if row is None:
            return []
        if self.phase is Phase.APPLYING and (not row.urgent or self._applies(message)):
            self._deferred.append(message)
            return []
        line = getattr(message, "line", None)
        if line is not None and line != self.line and not row.any_line:
            return []
        effects = row.method(self, message) if self.phase in row.phases else []
        return [*effects, *self.work.share_worker()]

    # ── joining and syncing ─────────────────────────────────────────────────────────────────────────────────

    def _welcome(self, message: m.Welcome) -> list[Effect]:
        """Begin a session: apply a missed commit, then say Ready, ask for the state, or choose a place."""
        commit, position = message.commit, self.position
        since = message.line.view if message.since is None else message.since
        if message.line.cluster != self.line.cluster or not since <= self.line.view <= message.line.view:
            position.distrust()  # the run went back without us: an equal version would be of another history
        position.line, self.backup = message.line, message.backup
        self._fetching = None
        if commit is not None and commit.step == self.version and self.work.holds(commit):
            self._deferred.append(message.model_copy(update={"commit": None}))
            effects = [] if commit.group else self.work.drop_averaging()
            return [*effects, *self._commit(commit)]
        effects = self.work.drop_all()
        if not message.member or self.place is None:
            self.phase = Phase.JOINING
            return [*effects, Choose(message.places)]
        if self.version == message.version:
            return [*effects, self._ready()]
        return [*effects, self._sync()]

    def chosen(self, place: m.Place) -> list[Effect]:
        """The driver chose `place` from those offered (`Choose`)."""
        return [Tell(m.Claim(cluster=place.cluster, begin=place.begin, end=place.end))]

    def _granted(self, message: m.Granted) -> list[Effect]:
        """Take a place: load its graphs, unless the worker has them, then ask for its state.

        It may be in another cluster than the place before, if that was not founded yet or is no more.
        """
        waits = self.line.cluster != message.line.cluster and self.line.term == message.line.term
        if message.line != self.line and not waits:
            return []  # late: of a term-view that is past
        place = (message.begin, message.end)
        if self.place != place or message.line != self.line:
            self.position.distrust()
        self.position.line, self.position.place, self.backup = message.line, place, message.backup
        self._fetching = None
        effects = self.work.drop_all()
        if self._graphs == place:
            return [*effects, self._sync()]
        self._graphs, self.phase = None, Phase.PREPARING
        if self._preparing == place:
            return effects
        self._preparing = place
        return [*effects, Prepare(message.begin, message.end)]

    def prepared(self, flops_per_second: float) -> list[Effect]:
        """The graphs of the last `Prepare` are loaded; the device reaches so many FLOP/s on them."""
        if self._preparing is None:
            return []
        self.hello = self.hello.model_copy(update={"flops_per_second": flops_per_second})
        self._graphs, self._preparing = self._preparing, None
        return [self._sync()] if self.phase is Phase.PREPARING and self._graphs == self.place else []

    def _sync(self) -> Tell:
        """Ask which state our blocks are to have."""
        self.phase = Phase.SYNCING
        return Tell(m.Prepared(flops_per_second=self.hello.flops_per_second))

    def _fetch(self, message: m.Fetch) -> list[Effect]:
        """Fetch the state of our blocks at a version, unless we hold it with the agreed digests."""
        self.phase, self.backup = Phase.SYNCING, message.backup
        effects = self.work.drop_all()
        agreed = all(message.digests.get(b, d) == d for b, d in self.position.digests.items())
        if self.version == message.version and agreed:
            self._fetching = None
            return [*effects, self._ready()]
        self.position.distrust()  # the state is about to be replaced block by block
        self._fetching = message.version
        order = FetchState(message.line, message.version, message.sources, message.digests, message.origin)
        return [*effects, order]

    def state_loaded(self, line: m.TermView, version: int, digests: Mapping[int, str]) -> list[Effect]:
        """The worker holds `version` of all our blocks (`FetchState`); `line` is that of the Fetch."""
        if line != self.line or version != self._fetching:
            return []
        self._fetching = None
        self.position.version, self.position.digests = version, dict(digests)
        return [self._ready()]

    def _ready(self) -> Tell:
        self.phase = Phase.READY
        assert self.version is not None
        return Tell(m.Ready(line=self.line, version=self.version, held=self.position.held()))

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, message: m.Begin) -> list[Effect]:
        """Begin a step, or ask for the state if ours is not the version that the step needs."""
        if message.group:
            return self._begin_averaging(message)
        line, *last = self._begun
        if line == message.line and [message.step, message.entry] <= last:
            return []  # a step is begun once, unless we were admitted to it again
        self._begun = (message.line, message.step, message.entry)
        if not self._may_begin(message):
            return []
        work = self.work
        if message.step - message.behind != self.version or not self._follows(message):
            return [*work.drop_all(), self._sync()]
        assert self.place is not None
        beside = work.averaging is not None and work.averaging.delayed
        effects: list[Effect] = []
        if not message.behind:
            effects = work.drop_steps() if beside else work.drop_all()
        step = HeldStep(self.me, self.place, message, self._shape, work.worker_queue)
        work.begin(step)
        self.phase = Phase.TRAINING if len(work.steps) == 1 else self.phase
        shuns = work.tell_shunned(again=True)  # the coordinator may be a new one
        return [*effects, *shuns, *step.assign(message.tasks), *work.replay_early()]

    def _follows(self, message: m.Begin) -> bool:
        """Whether just the steps that `message`'s step overlaps are in progress; true if it overlaps none."""
        overlapped = range(message.step - message.behind, message.step)
        steps = [number for number in overlapped if number != message.mean]
        return not overlapped or [step.id.number for step in self.work.steps] == steps

    def _begin_averaging(self, message: m.Begin) -> list[Effect]:
        """Begin an averaging of our version. If it is delayed, steps go on beside it, and the phase stays."""
        number, work = (message.line.term, message.group), self.work
        if number <= self.position.group or not self._may_begin(message):
            return []
        self.position.group = number
        if message.step != self.version:
            return [*work.drop_all(), self._sync()]
        effects = work.drop_averaging() if message.delayed else work.drop_all()
        assert self.place is not None
        work.averaging = HeldStep(self.me, self.place, message, self._shape, work.worker_queue)
        self.phase = self.phase if message.delayed else Phase.TRAINING
        return [*effects, *work.averaging.vote.start(), *work.replay_early()]

    def _may_begin(self, message: m.Begin) -> bool:
        """Whether we have a place, its graphs, and no later version already."""
        if self.place is None or self.phase in (Phase.JOINING, Phase.PREPARING):
            return False
        return self.version is None or message.step >= self.version

    def _in_step(self, message: m.InStep) -> list[Effect]:
        step = self.work.numbered(message.step)
        if step is None:
            return []
        effects = step.receive(message)
        if not isinstance(message, m.Joined):
            return effects
        return [*effects, *self.work.tell_shunned(), *self.work.replay_early()]

    def _gone(self, message: m.Gone) -> list[Effect]:
        if message.group:
            one = self.work.averaging
            return [] if one is None or one.id.group != message.group else one.drop_peers(message.peers)
        return [effect for step in self.work.steps for effect in step.drop_peers(message.peers)]

    def _plan(self, message: m.Plan) -> list[Effect]:
        step = self.work.named(message)
        if step is None:
            return []
        self.phase = self.phase if step.delayed else Phase.REDUCING
        return [*step.vote.plan(message), *self.work.replay_early()]

    # ── apply ───────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(self, message: m.Commit) -> list[Effect]:
        """Apply a commit, or ask for the state if we do not hold the committed gradients."""
        step, work = self.work.named(message), self.work
        if step is None or step.vote.commit is not None:
            return []
        if not step.vote.matches(message) or message.step != self.version:
            return [*work.drop_all(), self._sync()]
        self.phase = Phase.APPLYING
        self.loss = self.loss if message.loss is None else message.loss
        # A step of this number was of evaluation alone: no message says when that is over.
        ended = work.drop_steps(message.step) if message.group else []
        return [*ended, *step.apply(message, work.oldest_base_after(step, message.step))]

    def applied(self, step: StepId, block: int, digest: str) -> list[Effect]:
        """Note that `block` is at version `step` + 1 with `digest`: its update or average is installed."""
        work = self.work
        held = work.find(step)
        record = None if held is None else held.vote.applied(block, digest)
        if held is None or record is None:
            return []
        number = record.step.number
        self.position.version, self.position.digests = number + 1, dict(record.states)
        told = Tell(m.Applied(line=self.line, step=number, held=self.position.held()))
        ended = work.drop_averaging() if step.group else work.drop_step(held)
        self.phase = Phase.TRAINING if work.steps else Phase.READY
        effects: list[Effect] = [record, told, *ended]
        for one in work.steps:
            effects += one.advance(number + 1)
        effects += work.share_worker()
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            effects += self.receive(message)
        return effects

    def _save(self, message: m.Save) -> list[Effect]:
        if message.version != self.version:
            return []
        held = self.position.digests
        digests = {block: held[block] for block in message.blocks if block in held}
        return [SaveState(self.line, message.version, digests, message.stored)]

    # ── roll-back, and the end ──────────────────────────────────────────────────────────────────────────────

    def _applies(self, message: m.Message) -> bool:
        """Whether `message` goes back to the version that the update under way leads to."""
        return isinstance(message, m.RolledBack) and message.version == (self.version or 0) + 1

    def _rolled_back(self, message: m.RolledBack) -> list[Effect]:
        """Go back: drop all work, and keep our state only if it is the version to go back to."""
        elsewhere = message.line.cluster != self.line.cluster
        if elsewhere or (message.line.term, message.line.view) <= (self.line.term, self.line.view):
            return []
        self.position.line, self._fetching = message.line, None
        if self.phase is Phase.APPLYING or self.version != message.version:
            self.position.distrust()
        self._deferred.clear()
        effects = self.work.drop_all()
        if self.phase in (Phase.JOINING, Phase.PREPARING):
            return effects
        # Where steps begin again from the version that we have, nobody else may have it.
        return [*effects, self._sync() if self.version is None else self._ready()]

    def _finished(self, message: m.Finished) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [*self.work.drop_all(), Stop(message.why, message.completed)]

    def _rejected(self, message: m.Rejected) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [*self.work.drop_all(), Stop(message.why, completed=False, rejected=message.reason)]

    # ── the table ───────────────────────────────────────────────────────────────────────────────────────────

    _PREPARED = frozenset(Phase) - {Phase.JOINING, Phase.PREPARING}
    """A Fetch before that is meant for an earlier place: we report `Prepared` when we are."""
    _TABLE: Mapping[type, _Row] = {
        m.Welcome: _Row(_welcome, any_line=True),
        m.Refused: _Row(lambda _self, message: [Choose(message.places)], frozenset({Phase.JOINING})),
        m.Granted: _Row(_granted, any_line=True),
        m.Fetch: _Row(_fetch, _PREPARED),
        m.Begin: _Row(_begin),
        m.Joined: _Row(_in_step),
        m.Reroute: _Row(_in_step),
        m.Gone: _Row(_gone),
        m.Settled: _Row(_in_step),
        m.Evict: _Row(_in_step),
        m.Check: _Row(_in_step),
        m.Show: _Row(_in_step),
        m.Prove: _Row(_in_step),
        m.Testify: _Row(_in_step),
        m.Plan: _Row(_plan),
        m.Commit: _Row(_commit),
        m.Save: _Row(_save),
        m.RolledBack: _Row(_rolled_back, any_line=True, urgent=True),
        m.Fenced: _Row(lambda _self, message: [Leave(message.why)], urgent=True),
        m.Finished: _Row(_finished, urgent=True),
        m.Rejected: _Row(_rejected, urgent=True),
    }
