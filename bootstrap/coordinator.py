"""The coordinator: who takes part, which step runs, when it is committed.

Pure: messages and time in, effects out; the daemon and the simulator drive the same object. Its state machine is the
table in docs/protocol.md. All truth that must outlive it goes through `Record` effects, which the driver makes durable
before it carries out the next effect; after a restart the folded log (`History`) is all it needs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.ledger import StepLedger, clip_coefficient
from hetpeer.bootstrap.membership import BlockCost, Membership, Range, Standing, Volunteer
from hetpeer.bootstrap.routing import assign_routes
from hetpeer.stages.execution.routes import Route, cheapest_path, splice


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What the manifest says of the run, and the time-outs. All durations are seconds of the coordinator's clock."""

    run: str
    steps: int
    microbatches: int
    evaluation_microbatches: int
    evaluate_every: int
    checkpoint_every: int
    clip_norm: float | None
    layouts: Sequence[Sequence[Range]]
    costs: Sequence[BlockCost]
    lease_s: float = 10.0
    """Nothing heard for so long: gone."""
    grace_s: float = 2.0
    """A broken stream may come back for so long (a restart of p2pd)."""
    sync_s: float = 120.0
    """A step waits at most so long for joiners that fetch state."""
    stall_s: float = 15.0
    """Nothing counted for so long (or four times the last step): undone ids are handed out again."""
    reduce_s: float = 20.0
    """A plan that is not voted on for so long is made anew; at the third time non-voters are fenced."""
    return_s: float = 15.0
    """After a restart, holders have so long to come back before the run goes back to the checkpoint."""
    move_s: float = 5.0
    """A block that nobody holds or prepares for so long is given to a volunteer who is redundant elsewhere."""


MAX_FAILURES = 3
"""A microbatch that failed so often, at different volunteers where there are some, halts the run and is named."""


class State(enum.Enum):
    """docs/protocol.md, coordinator states."""

    WAITING = "waiting"
    SYNCING = "syncing"
    TRAINING = "training"
    REDUCING = "reducing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to volunteer `to`."""

    to: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Record:
    """Append to the log and make durable before anything that follows."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the stream of `peer` after what was sent."""

    peer: str


@dataclass(frozen=True, slots=True)
class CollectCheckpoint:
    """Expect the state of `version`, each block from the named volunteer → `Coordinator.saved`."""

    version: int
    savers: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Halt:
    """The run is over: `completed`, or cannot go on for the reason `why`."""

    why: str
    completed: bool


Effect = Send | Record | Disconnect | CollectCheckpoint | Halt


@dataclass(slots=True)
class _Step:
    """What is in progress between Begin and Commit."""

    number: int
    ledger: StepLedger
    roster: dict[str, Range]
    routes: dict[int, Route]
    began_at: float
    progress_at: float
    attempts: dict[int, int] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    plan: int = 0
    plan_at: float = 0.0


class Coordinator:
    """One reign. `history` is the folded log; the constructor's effects are in `start`."""

    def __init__(self, config: CoordinatorConfig, history: History, now: float) -> None:
        self._config = config
        self.history = history
        self.line = m.Line(term=history.term + 1, view=history.view)
        self.state = State.WAITING
        self.members = Membership(config.layouts, config.costs)
        self._step: _Step | None = None
        self._return_by = now + config.return_s
        self._waiting_since: float | None = None
        self._sync_by = 0.0
        self._saving: dict[int, str] = {}
        self._saved: dict[int, str] = {}
        self._saving_version: int | None = None
        self._checkpoint_due = False
        self._last_step_s = 0.0
        self._tokens_at: float = now

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> list[Effect]:
        """The first effects of a reign: its term is durable before anything is said in its name."""
        return [self._log(kind="reign", term=self.line.term)]

    def receive(self, peer: str, message: m.Message, now: float) -> list[Effect]:
        """A message of `peer` (the transport's word, not the message's)."""
        if isinstance(message, m.Hello):
            return self._hello(peer, message, now)
        volunteer = self.members.volunteers.get(peer)
        if volunteer is None:
            return [
                Send(peer, m.Fenced(why="the coordinator does not know this volunteer")),
                Disconnect(peer),
            ]
        volunteer.heard_at = now
        volunteer.broken_at = None
        handler = self._HANDLERS.get(type(message))
        line = getattr(message, "line", None)
        if handler is None or (line is not None and line != self.line):
            return []
        effects: list[Effect] = handler(self, volunteer, message, now)
        return effects

    def broken(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` broke; it may come back within the grace."""
        volunteer = self.members.volunteers.get(peer)
        if volunteer is not None and volunteer.broken_at is None:
            volunteer.broken_at = now
        return []

    def resumed(self, peer: str, now: float) -> list[Effect]:
        """The stream of `peer` is back and nothing was lost on the way."""
        volunteer = self.members.volunteers.get(peer)
        if volunteer is not None:
            volunteer.broken_at, volunteer.heard_at = None, now
        return []

    def saved(self, version: int, block: int, digest: str, now: float) -> list[Effect]:
        """The state of `block` at `version` has arrived and lies durably in the checkpoint store."""
        if version != self._saving_version or block not in self._saving:
            return []
        self._saved[block] = digest
        if len(self._saved) < self.members.blocks:
            return []
        blocks = [self._saved[b] for b in range(self.members.blocks)]
        self._saving_version, self._saving = None, {}
        effects: list[Effect] = [self._log(kind="checkpoint", version=version, blocks=blocks)]
        return effects + (self._border(now) if self._resting() else [])

    def not_saved(self, version: int, now: float) -> list[Effect]:
        """The checkpoint of `version` could not be collected: it is tried again at the next border."""
        if version != self._saving_version:
            return []
        self._saving_version, self._saving = None, {}
        self._checkpoint_due = True
        return self._border(now) if self._resting() else []

    def tick(self, now: float) -> list[Effect]:
        """Time passes: leases, graces and dead-lines. To be called a few times a second."""
        if self.state is State.FINISHED:
            return []
        effects: list[Effect] = []
        for volunteer in list(self.members.volunteers.values()):
            broken = volunteer.broken_at is not None and now - volunteer.broken_at > self._config.grace_s
            if broken or now - volunteer.heard_at > self._config.lease_s:
                effects += self._lose(volunteer.peer, "stream broken" if broken else "lease expired", now)
        match self.state:
            case State.WAITING:
                effects += self._waited(now)
            case State.SYNCING:
                if now > self._sync_by:
                    effects += self._begin_or_wait(now)
            case State.TRAINING:
                effects += self._stalled(now)
            case State.REDUCING:
                effects += self._overdue(now)
        return effects

    # ── joining ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hello(self, peer: str, hello: m.Hello, now: float) -> list[Effect]:
        if hello.wire_version != m.WIRE_VERSION:
            why = f"wire version {hello.wire_version} here, {m.WIRE_VERSION} at the coordinator"
            return [Send(peer, m.Rejected(reason="version", why=why)), Disconnect(peer)]
        if hello.run != self._config.run:
            why = f"this coordinator serves run {self._config.run}, not {hello.run}"
            return [Send(peer, m.Rejected(reason="run", why=why)), Disconnect(peer)]
        if self.state is State.FINISHED:
            done = m.Finished(why="the run is complete", completed=True)
            return [Send(peer, done), Disconnect(peer)]
        known = self.members.volunteers.get(peer)
        effects: list[Effect] = []
        if known is not None:
            if hello.incarnation < known.incarnation:
                return [
                    Send(peer, m.Fenced(why="a newer incarnation of this volunteer is here")),
                    Disconnect(peer),
                ]
            effects += self._lose(peer, "came back as a new session", now)
        volunteer = Volunteer(
            peer,
            hello.incarnation,
            now,
            flops_per_second=hello.flops_per_second,
            memory_bytes=hello.memory_bytes,
            name=hello.name,
        )
        self.members.volunteers[peer] = volunteer
        member = hello.place is not None and self.members.adopt(volunteer, hello.place)
        version = self.history.version
        last = self.history.commits.get(version - 1)
        missed = any(held.version == version - 1 for held in hello.held)
        commit = self._commit_message(last) if member and missed and last is not None else None
        welcome = m.Welcome(
            line=self.line, version=version, member=member, places=self.members.places(), commit=commit
        )
        return [*effects, Send(peer, welcome)]

    def _claim(self, volunteer: Volunteer, message: m.Claim, _now: float) -> list[Effect]:
        if not self.members.claim(volunteer, message.cluster, (message.begin, message.end)):
            why = "that place was taken meanwhile"
            return [Send(volunteer.peer, m.Refused(why=why, places=self.members.places()))]
        volunteer.standing = Standing.JOINING
        return [Send(volunteer.peer, m.Granted(begin=message.begin, end=message.end))]

    def _prepared(self, volunteer: Volunteer, _message: m.Prepared, now: float) -> list[Effect]:
        if volunteer.place is None:
            return []
        effects: list[Effect] = []
        if volunteer.standing is Standing.READY:
            effects += self._leave_step(volunteer.peer, now)
        if volunteer.peer in self.members.volunteers:
            volunteer.standing = Standing.PREPARED
        return effects + (self._border(now) if self._resting() else [])

    def _ready(self, volunteer: Volunteer, message: m.Ready, now: float) -> list[Effect]:
        if volunteer.place is None or volunteer.standing is Standing.READY:
            return []
        current = self._resting() and message.version == self.history.version
        volunteer.standing = Standing.READY if current else Standing.PREPARED
        effects = self._compare(volunteer, message.held, now)
        if self.state is State.SYNCING and any(
            v.standing is Standing.SYNCING for v in self.members.volunteers.values()
        ):
            return effects
        return effects + (self._border(now) if self._resting() else [])

    def _farewell(self, volunteer: Volunteer, _message: m.Farewell, now: float) -> list[Effect]:
        return [*self._lose(volunteer.peer, "said farewell", now), Disconnect(volunteer.peer)]

    def _heartbeat(self, _volunteer: Volunteer, _message: m.Heartbeat, _now: float) -> list[Effect]:
        return []

    def _compare(self, volunteer: Volunteer, held: Sequence[m.Held], now: float) -> list[Effect]:
        """Holders of a block must have the same bits: whoever differs from the first is fenced."""
        volunteer.digests = {h.block: h.digest for h in held}
        for other in self.members.volunteers.values():
            if other is volunteer or other.standing is not Standing.READY or not held:
                continue
            both = volunteer.digests.keys() & other.digests.keys()
            same_version = len({h.version for h in held}) == 1
            if same_version and any(volunteer.digests[b] != other.digests[b] for b in both):
                return self._fence(volunteer.peer, "its state differs from that of another holder", now)
        return []

    # ── step border ──────────────────────────────────────────────────────────────────────────────────────────────

    def _resting(self) -> bool:
        return self.state in (State.WAITING, State.SYNCING)

    def _border(self, now: float) -> list[Effect]:
        """Between two steps: finish, save, let joiners fetch, or begin the next step."""
        version, history = self.history.version, self.history
        effects = self._begin_saving()
        evaluated = not self._config.evaluation_microbatches or version in history.evaluations
        if version == self._config.steps and evaluated:
            if history.checkpoint_version == version:
                return effects + self._finish()
            self.state = State.WAITING
            return effects
        joiners = [v for v in self.members.volunteers.values() if v.standing is Standing.PREPARED]
        joiners = [v for v in joiners if self._available(v.place)]
        if joiners:
            if self.state is not State.SYNCING:
                self.state, self._sync_by = State.SYNCING, now + self._config.sync_s
            for volunteer in joiners:
                volunteer.standing = Standing.SYNCING
                effects.append(Send(volunteer.peer, self._fetch(volunteer)))
            return effects
        if any(v.standing is Standing.SYNCING for v in self.members.volunteers.values()):
            return effects
        return effects + self._begin_or_wait(now)

    def _available(self, place: Range | None) -> bool:
        """Whether the current version of these blocks can be had somewhere."""
        if place is None:
            return False
        stored = self.history.checkpoint_version == self.history.version
        return stored or all(self.members.holders(block) for block in range(*place))

    def _fetch(self, volunteer: Volunteer) -> m.Fetch:
        assert volunteer.place is not None
        blocks = range(*volunteer.place)
        digests: dict[int, str] = {}
        for holder in self.members.volunteers.values():
            if holder.standing is Standing.READY:
                digests |= {b: d for b, d in holder.digests.items() if b in blocks}
        return m.Fetch(
            line=self.line,
            version=self.history.version,
            sources={b: tuple(self.members.holders(b)) for b in blocks},
            digests=digests,
        )

    def _begin_or_wait(self, now: float) -> list[Effect]:
        if not self.members.uncovered():
            return self._begin(now)
        if self.state is not State.WAITING or self._waiting_since is None:
            self.state, self._waiting_since = State.WAITING, now
        return []

    def _waited(self, now: float) -> list[Effect]:
        """A block has no holder. Whoever had it may come back; then somebody who is redundant takes its place."""
        if not self.members.uncovered():
            return []
        if not self._stored() and now > self._return_by:
            return self._roll_back("the holders of the last version did not come back in time", now)
        if self._waiting_since is None or now - self._waiting_since < self._config.move_s:
            return []
        self._waiting_since = now
        moved = self.members.move_redundant()
        if moved is None or moved.place is None:
            return []
        moved.standing = Standing.JOINING
        return [Send(moved.peer, m.Granted(begin=moved.place[0], end=moved.place[1]))]

    def _begin(self, now: float) -> list[Effect]:
        config, version = self._config, self.history.version
        train = range(config.microbatches) if version < config.steps else range(0)
        due = version % config.evaluate_every == 0 or version == config.steps
        first = config.microbatches
        evaluation = range(first, first + config.evaluation_microbatches) if due else range(0)
        roster = self.members.roster()
        routes = assign_routes((*train, *evaluation), roster, self.members.blocks, self.members.speeds())
        ledger = StepLedger(train, evaluation, self.members.blocks)
        self._step = _Step(version, ledger, roster, routes, now, now)
        self.state, self._waiting_since = State.TRAINING, None
        incarnations = {peer: self.members.volunteers[peer].incarnation for peer in roster}
        return [
            Send(
                peer,
                m.Begin(
                    line=self.line,
                    step=version,
                    microbatches=config.microbatches,
                    roster=roster,
                    incarnations=incarnations,
                    tasks=self._tasks(routes, peer),
                ),
            )
            for peer in roster
        ]

    def _tasks(self, routes: Mapping[int, Route], first: str) -> tuple[m.Task, ...]:
        attempts = self._step.attempts if self._step else {}
        return tuple(
            m.Task(id=i, route=route, attempt=attempts.get(i, 0))
            for i, route in sorted(routes.items())
            if route[0].peer == first
        )

    def _finish(self) -> list[Effect]:
        self.state = State.FINISHED
        why = f"all {self._config.steps} steps are committed"
        told: list[Effect] = [Send(p, m.Finished(why=why, completed=True)) for p in self.members.volunteers]
        return [*told, Halt(why, completed=True)]

    def _halt(self, why: str) -> list[Effect]:
        self.state = State.FINISHED
        told: list[Effect] = [Send(p, m.Finished(why=why, completed=False)) for p in self.members.volunteers]
        return [self._log(kind="halt", why=why), *told, Halt(why, completed=False)]

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_saving(self) -> list[Effect]:
        version = self.history.version
        due = version % self._config.checkpoint_every == 0 or version == self._config.steps
        if not (due or self._checkpoint_due) or self.history.checkpoint_version == version:
            return []
        if self._saving_version == version or self.members.uncovered():
            return []
        load: dict[str, int] = {}
        savers: dict[int, str] = {}
        for block in range(self.members.blocks):
            saver = min(self.members.holders(block), key=lambda peer: (load.get(peer, 0), peer))
            load[saver] = load.get(saver, 0) + 1
            savers[block] = saver
        self._saving, self._saved, self._saving_version = savers, {}, version
        self._checkpoint_due = False
        effects: list[Effect] = [CollectCheckpoint(version, savers)]
        for peer in sorted(set(savers.values())):
            blocks = tuple(b for b, p in savers.items() if p == peer)
            effects.append(Send(peer, m.Save(line=self.line, version=version, blocks=blocks)))
        return effects

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _current(self, volunteer: Volunteer, number: int) -> _Step | None:
        step = self._step
        return step if step is not None and step.number == number and volunteer.peer in step.roster else None

    def _sealed(self, volunteer: Volunteer, message: m.Sealed, now: float) -> list[Effect]:
        step = self._current(volunteer, message.step)
        if step is None:
            return []
        verdict = step.ledger.report(volunteer.peer, message.slot, message.contents, message.losses)
        settled = m.Settled(line=self.line, step=step.number, slot=message.slot, refused=verdict.refused)
        effects: list[Effect] = [Send(volunteer.peer, settled)]
        for peer, blocks in verdict.evicted.items():
            effects.append(Send(peer, m.Evict(line=self.line, step=step.number, blocks=tuple(blocks))))
        if verdict.progress:
            step.progress_at = now
        effects += self._hand_out(step, verdict.reopened)
        return effects + self._advance(step, now)

    def _evaluated(self, volunteer: Volunteer, message: m.Evaluated, now: float) -> list[Effect]:
        step = self._current(volunteer, message.step)
        if step is None or not step.ledger.evaluated(message.losses):
            return []
        step.progress_at = now
        return self._advance(step, now)

    def _failed(self, volunteer: Volunteer, message: m.Failed, now: float) -> list[Effect]:
        step = self._current(volunteer, message.step)
        if step is None or message.id not in step.routes:
            return []
        failed = step.failures.setdefault(message.id, [])
        failed.append(volunteer.peer)
        step.progress_at = now
        if len(failed) >= MAX_FAILURES:
            return self._halt(
                f"microbatch {message.id} of step {step.number} failed {len(failed)} times: {message.why}"
            )
        others = {p: r for p, r in step.roster.items() if p not in failed}
        if cheapest_path(others, 0, self.members.blocks, {}) is None:
            others = step.roster
        return self._hand_out(step, {message.id}, others)

    def _hand_out(
        self, step: _Step, ids: set[int], roster: Mapping[str, Range] | None = None
    ) -> list[Effect]:
        """Route `ids` again from the start; peers on the way pass on what they have kept."""
        routes: dict[int, Route] = {}
        for microbatch in ids & step.routes.keys():
            bridged = splice(step.routes[microbatch], roster or step.roster, {})
            if bridged is not None:
                step.routes[microbatch] = routes[microbatch] = bridged
                step.attempts[microbatch] = step.attempts.get(microbatch, 0) + 1
        return [
            Send(peer, m.Reroute(line=self.line, step=step.number, tasks=self._tasks(routes, peer)))
            for peer in sorted({route[0].peer for route in routes.values()})
        ]

    def _stalled(self, now: float) -> list[Effect]:
        step = self._step
        assert step is not None
        if now - step.progress_at < max(self._config.stall_s, 4 * self._last_step_s):
            return []
        step.progress_at = now
        return self._hand_out(step, step.ledger.undone())

    def _advance(self, step: _Step, now: float) -> list[Effect]:
        """All counted: reduce, or, when only an evaluation was left to do, end the run."""
        if self.state is not State.TRAINING or not step.ledger.complete():
            return []
        if step.ledger.ids:
            return self._plan(step, now)
        self._step, self.state = None, State.WAITING
        return [self._evaluation_record(step), *self._border(now)]

    def _plan(self, step: _Step, now: float) -> list[Effect]:
        step.plan += 1
        step.plan_at = now
        step.ledger.new_plan()
        self.state = State.REDUCING
        holders = {
            b: sorted(p for p, (begin, end) in step.roster.items() if begin <= b < end)
            for b in range(self.members.blocks)
        }
        covers = step.ledger.covers(holders)
        effects: list[Effect] = []
        for peer in sorted(step.roster):
            mine = tuple(
                c for c in covers if peer in c.receivers or peer in {holder for holder, _ in c.slots}
            )
            plan = m.Plan(line=self.line, step=step.number, plan=step.plan, covers=mine)
            effects.append(Send(peer, plan))
        return effects

    def _vote(self, volunteer: Volunteer, message: m.Vote, now: float) -> list[Effect]:
        step = self._current(volunteer, message.step)
        if step is None or self.state is not State.REDUCING or message.plan != step.plan:
            return []
        begin, end = step.roster[volunteer.peer]
        if {b.block for b in message.blocks} != set(range(begin, end)):
            return []
        step.ledger.vote(volunteer.peer, message)
        if step.ledger.voters() != set(step.roster):
            return []
        agreed, split = step.ledger.outcome()
        broken = [b for b, vote in agreed.items() if not vote.finite]
        if broken:
            return self._halt(f"the gradient of block {broken[0]} is not finite at step {step.number}")
        if split:
            return (
                self._plan(step, now) if step.plan < 3 else self._halt(_SPLIT.format(min(split), step.number))
            )
        return self._commit(step, agreed, now)

    def _overdue(self, now: float) -> list[Effect]:
        step = self._step
        assert step is not None
        if now - step.plan_at < max(self._config.reduce_s, 4 * self._last_step_s):
            return []
        silent = set(step.roster) - step.ledger.voters()
        if step.plan < 3:
            return self._plan(step, now)
        effects: list[Effect] = []
        for peer in sorted(silent):
            effects += self._fence(peer, "it did not vote on three plans", now)
        return effects

    def _commit(self, step: _Step, agreed: Mapping[int, m.BlockVote], now: float) -> list[Effect]:
        norm = math.sqrt(math.fsum(vote.squared_norm for vote in agreed.values()))
        record = self._log(
            kind="commit",
            term=self.line.term,
            view=self.line.view,
            step=step.number,
            plan=step.plan,
            loss=step.ledger.train_loss(),
            norm=norm,
            coefficient=clip_coefficient(norm, self._config.clip_norm),
            gradients={block: vote.digest for block, vote in sorted(agreed.items())},
            seconds=now - step.began_at,
        )
        effects: list[Effect] = [record]
        if step.ledger.evaluation:
            effects.append(self._evaluation_record(step))
        commit = self._commit_message(record.record)
        effects += [Send(peer, commit) for peer in sorted(step.roster)]
        self._last_step_s = now - step.began_at
        self._step, self.state = None, State.WAITING
        for volunteer in self.members.volunteers.values():
            volunteer.digests = {}
            if volunteer.standing is Standing.READY and volunteer.peer not in step.roster:
                volunteer.standing = Standing.PREPARED
        return effects + self._border(now)

    def _commit_message(self, record: Mapping[str, Any]) -> m.Commit:
        return m.Commit(
            line=self.line,
            step=record["step"],
            plan=record["plan"],
            coefficient=record["coefficient"],
            loss=record["loss"],
            digests={int(block): digest for block, digest in record["gradients"].items()},
        )

    def _applied(self, volunteer: Volunteer, message: m.Applied, now: float) -> list[Effect]:
        if message.step != self.history.version - 1 or volunteer.standing is not Standing.READY:
            return []
        return self._compare(volunteer, message.held, now)

    # ── losing volunteers ────────────────────────────────────────────────────────────────────────────────────────

    def _fence(self, peer: str, why: str, now: float) -> list[Effect]:
        return [*self._lose(peer, why, now), Send(peer, m.Fenced(why=why)), Disconnect(peer)]

    def _lose(self, peer: str, why: str, now: float) -> list[Effect]:
        """`peer` is not a member any more; its slots die with it."""
        effects: list[Effect] = [self._log(kind="gone", peer=peer, why=why, version=self.history.version)]
        effects += self._leave_step(peer, now)
        self.members.volunteers.pop(peer, None)
        if peer in self._saving.values() and self._saving_version is not None:
            effects += self.not_saved(self._saving_version, now)
        return effects

    def _leave_step(self, peer: str, now: float) -> list[Effect]:
        """`peer` takes no further part in the step; without another holder of its blocks the run goes back."""
        volunteer = self.members.volunteers[peer]
        was_ready = volunteer.standing is Standing.READY
        volunteer.standing = Standing.JOINING
        step = self._step
        if step is not None and peer in step.roster:
            return self._without(step, peer, now)
        lost = set(self.members.uncovered()).intersection(range(*(volunteer.place or (0, 0))))
        if was_ready and lost and not self._stored():
            return self._roll_back(f"no holder is left of block {min(lost)}", now)
        if self.state is State.SYNCING:
            return self._border(now)
        return []

    def _stored(self) -> bool:
        return self.history.checkpoint_version == self.history.version

    def _without(self, step: _Step, peer: str, now: float) -> list[Effect]:
        del step.roster[peer]
        if self.members.uncovered(step.roster):
            missing = self.members.uncovered(step.roster)[0]
            return self._roll_back(f"no holder is left of block {missing}", now)
        lost = step.ledger.lose(peer)
        step.progress_at = now
        gone = m.Gone(line=self.line, peers=(peer,))
        effects: list[Effect] = [Send(other, gone) for other in sorted(step.roster)]
        orphans = {i for i, route in step.routes.items() if route[0].peer == peer}
        effects += self._hand_out(step, orphans)
        if self.state is State.REDUCING:
            if not lost and step.ledger.complete():
                return effects + self._plan(step, now)
            self.state = State.TRAINING
        return effects + self._advance(step, now)

    def _roll_back(self, why: str, now: float) -> list[Effect]:
        """All holders of a block are gone: the whole run goes back to the last complete checkpoint."""
        self._step = None
        self.line = m.Line(term=self.line.term, view=self.line.view + 1)
        version = self.history.checkpoint_version
        record = self._log(
            kind="rollback", term=self.line.term, view=self.line.view, to_version=version, why=why
        )
        self.state, self._waiting_since = State.WAITING, None
        self._saving_version, self._saving = None, {}
        effects: list[Effect] = [record]
        for volunteer in self.members.volunteers.values():
            volunteer.digests = {}
            if volunteer.standing in (Standing.READY, Standing.SYNCING):
                volunteer.standing = Standing.JOINING
            told = m.RolledBack(line=self.line, version=version, why=why)
            effects.append(Send(volunteer.peer, told))
        return effects + self._border(now)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _log(self, **record: Any) -> Record:
        self.history.add(record)
        return Record(record)

    def _evaluation_record(self, step: _Step) -> Record:
        return self._log(kind="evaluation", step=step.number, loss=step.ledger.evaluation_loss())

    @property
    def step(self) -> int | None:
        """The step in progress."""
        return self._step.number if self._step else None

    @property
    def missing_blocks(self) -> Sequence[int]:
        """Blocks without a ready holder: what the run waits for."""
        return self.members.uncovered()

    _HANDLERS: Mapping[type, Callable[..., list[Effect]]] = {
        m.Claim: _claim,
        m.Prepared: _prepared,
        m.Ready: _ready,
        m.Sealed: _sealed,
        m.Evaluated: _evaluated,
        m.Failed: _failed,
        m.Vote: _vote,
        m.Applied: _applied,
        m.Farewell: _farewell,
        m.Heartbeat: _heartbeat,
    }


_SPLIT = "holders of block {} differ in the bits of the reduced gradient of step {} after three plans"
