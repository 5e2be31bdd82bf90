"""A volunteer's protocol core: from the handshake to the applied update.

Pure: messages, tensors (as opaque handles) and finished work in, effects out. The daemon and the simulator
drive the same object. Senders come from the transport, and a message or tensor of another (term, view, step),
or from an incarnation that is not in the roster, changes nothing (docs/protocol.md, fencing).

`_TABLE` names the method for each message of the coordinator. All transitions of a volunteer are methods of
`Member.life` (member_life.py). Peers and worker speak to `Member.work` (work_in_progress.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hetpeer.averaging import messages as m
from hetpeer.averaging.effects import Choose, Effect, Leave, StepId, Stop
from hetpeer.averaging.member.held_step import HeldStep
from hetpeer.averaging.member.member_life import MemberLife, Phase
from hetpeer.averaging.member.step_vote import ModelShape
from hetpeer.averaging.member.work_in_progress import WorkInProgress
from hetpeer.stages.pipeline.schedule_1f1b import InFlightWindow


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
    session, then come `receive` for messages, the answers that effects name (methods of `life`, and
    `applied`), and the methods of `work`.
    """

    def __init__(
        self, me: str, hello: m.Hello, shape: ModelShape, window: InFlightWindow | None = None
    ) -> None:
        self.me = me
        self.life = MemberLife(hello)
        self.work = WorkInProgress(self.life.position, window)
        self.loss: float | None = None
        """Mean loss of the newest committed step; None before the first one."""
        self._shape = shape
        self._begun = (self.line, -1, 0)
        """Term-view, number and entry of the last step that was begun."""
        self._deferred: list[m.Message] = []
        """Messages that came in APPLYING and wait until the update is applied."""

    @property
    def phase(self) -> Phase:
        """Our phase in the run."""
        return self.life.phase

    @property
    def line(self) -> m.TermView:
        """Our term-view."""
        return self.life.position.line

    @property
    def place(self) -> m.Range | None:
        """Blocks [begin, end) that we hold."""
        return self.life.position.place

    @property
    def version(self) -> int | None:
        """Version of the state in the worker; None while there is none that can be trusted."""
        return self.life.position.version

    # ── the control stream ──────────────────────────────────────────────────────────────────────────────────

    def connected(self, uplink: float = 0.0, coordinate: tuple[int, ...] = ()) -> list[Effect]:
        """Begin a session: say Hello, with the states that we hold.

        `uplink`: bytes/s, 0 if not measured. `coordinate`: where we are in the network; empty: not known.
        """
        self._deferred.clear()  # they were said to the session that is over
        return [self.life.greet(uplink, coordinate)]

    def reborn(self, incarnation: int) -> list[Effect]:
        """Go on as a new incarnation, after `Leave`; it trusts nothing that the worker holds."""
        self._deferred.clear()
        self.life.reborn(incarnation)
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
        commit = message.commit
        self.life.welcomed(message)
        if commit is not None and commit.step == self.version and self.work.holds(commit):
            self._deferred.append(message.model_copy(update={"commit": None}))
            effects = [] if commit.group else self.work.drop_averaging()
            return [*effects, *self._commit(commit)]
        return [*self.work.drop_all(), self.life.enter(message)]

    def _granted(self, message: m.Granted) -> list[Effect]:
        """Take a place, unless the message is late."""
        return [*self.work.drop_all(), *self.life.take(message)] if self.life.may_take(message) else []

    def _fetch(self, message: m.Fetch) -> list[Effect]:
        """Fetch a state; the steps in progress go on without us."""
        return [*self.work.drop_all(), self.life.fetch(message)]

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, message: m.Begin) -> list[Effect]:
        """Begin a step, or ask for the state if ours is not the version that the step needs."""
        if message.group:
            return self._begin_averaging(message)
        line, *last = self._begun
        if line == message.line and [message.step, message.entry] <= last:
            return []  # a step is begun once, unless we were admitted to it again
        self._begun = (message.line, message.step, message.entry)
        if not self.life.may_begin(message.step):
            return []
        work = self.work
        if message.step - message.behind != self.version or not self._follows(message):
            return [*work.drop_all(), self.life.sync()]
        assert self.place is not None
        beside = work.averaging is not None and work.averaging.delayed
        effects: list[Effect] = []
        if not message.behind:
            effects = work.drop_steps() if beside else work.drop_all()
        step = HeldStep(self.me, self.place, message, self._shape, work.worker_queue)
        work.begin(step)
        if len(work.steps) == 1:
            self.life.train()
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
        if number <= self.life.position.group or not self.life.may_begin(message.step):
            return []
        self.life.enter_group(number)
        if message.step != self.version:
            return [*work.drop_all(), self.life.sync()]
        effects = work.drop_averaging() if message.delayed else work.drop_all()
        assert self.place is not None
        work.averaging = HeldStep(self.me, self.place, message, self._shape, work.worker_queue)
        if not message.delayed:
            self.life.train()
        return [*effects, *work.averaging.vote.start(), *work.replay_early()]

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
        if not step.delayed:
            self.life.reduce()
        return [*step.vote.plan(message), *self.work.replay_early()]

    # ── apply ───────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(self, message: m.Commit) -> list[Effect]:
        """Apply a commit, or ask for the state if we do not hold the committed gradients."""
        step, work = self.work.named(message), self.work
        if step is None or step.vote.commit is not None:
            return []
        if not step.vote.matches(message) or message.step != self.version:
            return [*work.drop_all(), self.life.sync()]
        self.life.apply()
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
        ended = work.drop_averaging() if step.group else work.drop_step(held)
        told = self.life.updated(number, record.states, trains=bool(work.steps))
        effects: list[Effect] = [record, told, *ended]
        for one in work.steps:
            effects += one.advance(number + 1)
        effects += work.share_worker()
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            effects += self.receive(message)
        return effects

    # ── roll-back, and the end ──────────────────────────────────────────────────────────────────────────────

    def _applies(self, message: m.Message) -> bool:
        """Whether `message` goes back to the version that the update under way leads to."""
        return isinstance(message, m.RolledBack) and message.version == (self.version or 0) + 1

    def _rolled_back(self, message: m.RolledBack) -> list[Effect]:
        """Go back: drop all work, and keep our state only if it is the version to go back to."""
        if not self.life.goes_back(message):
            return []
        self._deferred.clear()
        return [*self.work.drop_all(), *self.life.go_back(message)]

    def _finished(self, message: m.Finished) -> list[Effect]:
        self.life.stop()
        return [*self.work.drop_all(), Stop(message.why, message.completed)]

    def _rejected(self, message: m.Rejected) -> list[Effect]:
        self.life.stop()
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
        m.Save: _Row(lambda self, message: self.life.save(message)),
        m.RolledBack: _Row(_rolled_back, any_line=True, urgent=True),
        m.Fenced: _Row(lambda _self, message: [Leave(message.why)], urgent=True),
        m.Finished: _Row(_finished, urgent=True),
        m.Rejected: _Row(_rejected, urgent=True),
    }
