"""A holder's part of one step: tasks in, tasks out, and everything kept until the step is committed.

Pure: events in, effects out (effects.py). One object per step. A task is one microbatch over a range of blocks; doing
it twice, here or elsewhere, is waste and never an error, because what counts is decided by the exact cover over slots.
Who sends keeps: a repeated activation is answered with the gradient that was made of the first one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hetpeer.stages.execution.bench import Bench
from hetpeer.stages.execution.effects import (
    ForgetGraph,
    Handle,
    Release,
    ReportEvaluated,
    ReportFailed,
    ReportSealed,
    RunBackward,
    RunForward,
    SendActivation,
    SendGradient,
    TaskKey,
)
from hetpeer.stages.execution.onward import Onward
from hetpeer.stages.execution.routes import Hop, Roster, Route, rest_of
from hetpeer.stages.execution.schedule import Schedule, Work
from hetpeer.stages.execution.slots import Drop, Merge, SlotBook

Effect = (
    RunForward
    | RunBackward
    | ForgetGraph
    | SendActivation
    | SendGradient
    | Release
    | ReportSealed
    | ReportEvaluated
    | ReportFailed
    | Merge
    | Drop
)


class Status(enum.Enum):
    """Where a task stands at this holder."""

    READY = "ready"
    FORWARD = "forward"
    SENT = "sent"
    GRADIENT = "gradient"
    BACKWARD = "backward"
    DONE = "done"


@dataclass(slots=True)
class _Task:
    key: TaskKey
    route: Route
    """From this hop on."""
    attempt: int
    upstream: str | None
    train: bool
    status: Status = Status.READY
    source: Handle | None = None
    output: Handle | None = None
    gradient: Handle | None = None
    input_gradient: Handle | None = None
    loss: float | None = None
    sent_to: set[str] = field(default_factory=set)
    """Whoever was sent the output: any of them may count it."""

    @property
    def end(self) -> int:
        return self.route[0].end


class Pipeline:
    """One step at one holder. `me` is our peer id, `roster` the active holders, `microbatches` M of the step, `bench` the worker's
    room, which it shares with other steps under way here.
    """

    def __init__(
        self, me: str, roster: Roster, microbatches: int, slot_capacity: int, bench: Bench | None = None
    ) -> None:
        self.slots = SlotBook(slot_capacity)
        self._me = me
        self._onward = Onward(roster)
        self._microbatches = microbatches
        self._tasks: dict[TaskKey, _Task] = {}
        self._bench = bench or Bench()
        self._schedule: Schedule[TaskKey] = Schedule(self._bench.may_begin)
        self.running = 0
        """Pieces of work at the worker."""
        self._folding = 0
        self._urged = False
        self._decided = False
        self._bench.enter(self)

    def over(self) -> None:
        """The step has ended here: it does not share the worker any more."""
        self._bench.leave(self)

    def decided(self) -> None:
        """The step's gradient is decided: whatever is still under way changes nothing, nothing new is begun."""
        self._decided = True

    # ── tasks arriving ───────────────────────────────────────────────────────────────────────────────────────────

    def assign(self, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """The coordinator hands out `microbatch`; we are its first hop and take it from the data order.

        One that we have, in no newer attempt, is advice: as long as it is not begun it goes this other way, or is begun by somebody else.
        """
        key = TaskKey(microbatch, route[0].begin)
        task = self._tasks.get(key)
        if task is not None and task.status is Status.READY and attempt == task.attempt:
            if route[0].peer == self._me:
                self._go(task, rest_of(route, task.end))
            else:
                del self._tasks[key]
                self._schedule.withdraw(key)
            return self._dispatch()
        if route[0].peer != self._me:
            return []
        return self._enter(microbatch, route, attempt, upstream=None, source=None)

    def activation(
        self, microbatch: int, route: Route, attempt: int, upstream: str, handle: Handle
    ) -> list[Effect]:
        """`upstream` sent the bundle that enters block `route[0].begin`."""
        return self._enter(microbatch, route, attempt, upstream=upstream, source=handle)

    def nudge(self, microbatch: int, route: Route, attempt: int, upstream: str) -> list[Effect]:
        """`upstream` has a bundle for us that waits for credit, which tasks here may hold that wait for this very word: as
        `activation`, for a task that is known.
        """
        task = self._tasks.get(TaskKey(microbatch, route[0].begin))
        return [] if task is None else self._repeated(task, route, attempt, upstream, None)

    def _enter(
        self, microbatch: int, route: Route, attempt: int, *, upstream: str | None, source: Handle | None
    ) -> list[Effect]:
        key = TaskKey(microbatch, route[0].begin)
        task = self._tasks.get(key)
        if task is not None:
            return self._repeated(task, route, attempt, upstream, source)
        task = _Task(key, route, attempt, upstream, train=microbatch < self._microbatches, source=source)
        self._tasks[key] = task
        self._schedule.ready_forward(key, len(route) - 1, train=task.train)
        return self._dispatch()

    def _repeated(
        self, task: _Task, route: Route, attempt: int, upstream: str | None, source: Handle | None
    ) -> list[Effect]:
        """A task that we know already: answer with what is kept; a newer attempt is passed on."""
        effects: list[Effect] = [] if source is None else [Release(source)]
        task.upstream = upstream
        if task.input_gradient is not None and upstream is not None:
            effects.append(SendGradient(task.key.id, upstream, task.key.begin, task.input_gradient))
        if attempt > task.attempt:
            task.attempt = attempt
            self._urged = True
            self._go(task, rest_of(route, task.end))
            if task.output is not None:
                effects += self._forward_on(task)
            elif task.loss is not None and not task.train:
                effects.append(ReportEvaluated(task.key.id, task.loss))
        return effects + self._dispatch()

    def gradient(self, microbatch: int, border: int, handle: Handle) -> list[Effect]:
        """The gradient of the bundle that we sent over `border` has come back."""
        for task in self._tasks.values():
            if task.key.id == microbatch and task.end == border and task.status is Status.SENT and task.train:
                task.status = Status.GRADIENT
                task.gradient = handle
                self._onward.done(task.key)
                self._schedule.ready_backward(task.key)
                return self._dispatch()
        return [Release(handle)]

    # ── work done ────────────────────────────────────────────────────────────────────────────────────────────────

    def forward_done(self, key: TaskKey, output: Handle | None, loss: float | None) -> list[Effect]:
        """The worker ran the forward of `key`: `output` is the bundle for the next hop, or `loss` the end."""
        self.running -= 1
        task = self._tasks[key]
        effects: list[Effect] = []
        task.output, task.loss = output, loss
        if loss is None:
            task.status = Status.SENT if task.train else Status.DONE
            effects += self._forward_on(task)
        elif task.train:
            task.status = Status.GRADIENT
            self._schedule.ready_backward(key)
        else:
            task.status = Status.DONE
            effects.append(ReportEvaluated(key.id, loss))
        if not task.train:
            effects += self._release_source(task)
        return effects + self._dispatch()

    def backward_done(self, key: TaskKey, input_gradient: Handle | None) -> list[Effect]:
        """The worker ran the backward of `key` and folded it; `input_gradient` is for the hop before us."""
        self.running -= 1
        self._folding -= 1
        task = self._tasks[key]
        task.status = Status.DONE
        task.input_gradient = input_gradient
        self._schedule.finished(key)
        effects = self._release_source(task)
        if task.gradient is not None:
            effects.append(Release(task.gradient))
            task.gradient = None
        if input_gradient is not None and task.upstream is not None:
            effects.append(SendGradient(key.id, task.upstream, key.begin, input_gradient))
        if not all(self.slots.holds(key.id, block) for block in range(key.begin, task.end)):
            del self._tasks[key]  # what it was folded into was dropped meanwhile: it may be asked for again
        return effects + self._dispatch()

    def work_failed(self, key: TaskKey, why: str) -> list[Effect]:
        """The worker could not do `key`. A broken backward spoils the open slot: it is dropped as a whole."""
        self.running -= 1
        task = self._tasks.pop(key)
        self._schedule.finished(key)
        effects: list[Effect] = [ForgetGraph(key), ReportFailed(key.id, why), *self._release_source(task)]
        if task.gradient is not None:
            effects.append(Release(task.gradient))
        if task.status is Status.BACKWARD:
            self._folding -= 1
            drops, ids = self.slots.spoil()
            effects += drops
            self._forget(ids, tuple(drop.block for drop in drops))
        return effects + self._dispatch()

    # ── the coordinator's word, and peers that are gone ──────────────────────────────────────────────────────────

    def settled(self, slot: int, refused: tuple[int, ...]) -> list[Effect]:
        """The coordinator counts `slot`, but for the blocks `refused`, which may have to be done again here."""
        ids = self.slots.contents().get(slot, {})
        lost = {microbatch for block in refused for microbatch in ids.get(block, ())}
        effects: list[Effect] = [*self.slots.settle(slot, refused)]
        self._forget(lost, refused)
        return effects + self._dispatch()

    def urge(self) -> list[Effect]:
        """The coordinator waits: report what is done, though the slot is not full and we wait for something ourselves."""
        self._urged = True
        return self._dispatch()

    def evict(self, blocks: tuple[int, ...]) -> list[Effect]:
        """What we had counted at `blocks` does not count any more."""
        effects: list[Effect] = []
        for block in blocks:
            base = self.slots.accepted()
            lost = self.slots.contents()[base].get(block, frozenset()) if base is not None else frozenset()
            effects += self.slots.evict(block)
            self._forget(set(lost), (block,))
        return effects + self._dispatch()

    def gone(self, peer: str) -> list[Effect]:
        """`peer` left the roster: all it was sent in this step goes to another holder, its slots died with it.

        Also what had gone another way already, while the link was down: as long as `peer` counted it, nobody else's work did.
        """
        self._onward.gone(peer)
        effects = self._send_again(peer, lambda task: peer in task.sent_to)
        for task in self._tasks.values():
            task.sent_to.discard(peer)
        return effects

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down: send its tasks to another holder if there is one, without asking anybody."""
        self._onward.unreachable(peer)
        return self._send_again(peer, lambda task: task.route[1].peer == peer)

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        self._onward.reachable(peer)

    def joined(self, peer: str, place: tuple[int, int]) -> list[Effect]:
        """`peer` holds the blocks `place` from now on, and can be reached: it gets what is left over for it."""
        self._onward.joined(peer, place)
        effects: list[Effect] = []
        for key in self._left_over():
            effects += self._forward_on(self._tasks[key])
        return effects

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Border → ids whose bundles over it are kept here for a holder that we do not know."""
        left: dict[int, list[int]] = {}
        for key in self._left_over():
            left.setdefault(self._tasks[key].end, []).append(key.id)
        return {border: tuple(ids) for border, ids in left.items()}

    def _left_over(self) -> list[TaskKey]:
        """Outputs for which nobody was found. A task that was forgotten and came again has none until it has run again."""
        return self._onward.left_over({key for key, task in self._tasks.items() if task.output is not None})

    def congested(self, peer: str, hops: int) -> list[Effect]:
        """The link to `peer` keeps no pace: begin no forward that goes there and has `hops` or more hops behind it.

        Backwards, other routes and nearer forwards go on: what holds a link up may itself wait for them.
        """
        self._onward.congested(peer, hops)
        return self._dispatch()  # it may be fewer that are held than before

    def relieved(self, peer: str) -> list[Effect]:
        """The link to `peer` takes everything again."""
        self._onward.relieved(peer)
        return self._dispatch()

    def _may_leave(self, key: TaskKey) -> bool:
        return self._onward.may_leave(self._tasks[key].route[1:])

    def _send_again(self, peer: str, concerns: Callable[[_Task], bool]) -> list[Effect]:
        """What `peer` is not there for any more."""
        effects: list[Effect] = []
        for task in self._tasks.values():
            if task.output is not None and len(task.route) > 1 and concerns(task):
                effects += self._forward_on(task)
        if self._onward.is_congested(peer):  # what its link held up goes another way now
            effects += self._dispatch()
        return effects

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward_on(self, task: _Task) -> list[Effect]:
        """Send the kept output to the next hop, around peers that are gone. Nothing if it is left over."""
        assert task.output is not None
        way = self._onward.way(task.key, task.route[1:])
        if way is None:
            return []
        self._go(task, way)
        task.sent_to.add(way[0].peer)
        return [SendActivation(task.key.id, way, task.attempt, task.output)]

    def _go(self, task: _Task, after: Route) -> None:
        if after != task.route[1:]:
            task.route = (task.route[0], *after)
            self._schedule.moved(task.key, len(after))

    def _forget(self, ids: set[int], blocks: tuple[int, ...] | range) -> None:
        """Finished tasks whose gradient was dropped at one of `blocks` count as never done."""
        for key, task in list(self._tasks.items()):
            touches = any(key.begin <= block < task.end for block in blocks)
            if key.id in ids and touches and task.status is Status.DONE and task.train:
                del self._tasks[key]

    def _release_source(self, task: _Task) -> list[Effect]:
        if task.source is None:
            return []
        source, task.source = task.source, None
        return [Release(source)]

    def _dispatch(self) -> list[Effect]:
        """Hand work to the worker while it has room; seal the open slot when it is due, which makes room for more."""
        effects = self._start_work()
        while not self._folding and self.slots.should_seal(idle=self.idle or self._urged):
            self._urged = False
            effects += [self._seal(), *self._start_work()]
        return effects

    def resume(self) -> list[Effect]:
        """It is our turn at the worker, by something that happened in another step."""
        return self._dispatch()

    @property
    def held_up(self) -> bool:
        """Whether work is ready that could be begun if there were room for what comes of it."""
        return self._schedule.waiting > 0 and not self._decided

    def in_flight(self, hops_after: int) -> int:
        """Forwards, at most so many hops from the loss, that wait for their gradient."""
        return self._schedule.in_flight(hops_after)

    def bid(self) -> bool | None:
        """Whether the next piece of work that could be begun is a backward; None: there is none."""
        work = self._next()
        return None if work is None else work.backward

    def _next(self) -> Work[TaskKey] | None:
        if self._decided:
            return None
        return self._schedule.next(may_fold=self.slots.can_fold(), may_leave=self._may_leave)

    def _start_work(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._bench.turn() is self and (work := self._next()) is not None:
            self._schedule.begun(work)
            task = self._tasks[work.key]
            self.running += 1
            if work.backward:
                self._folding += 1
                task.status = Status.BACKWARD
                slot, fold = self.slots.fold(work.key.id, range(work.key.begin, task.end))
                effects.append(RunBackward(work.key, task.end, task.gradient, slot, fold))
            else:
                task.status = Status.FORWARD
                effects.append(RunForward(work.key, task.end, task.source, task.train, len(task.route) - 1))
        return effects

    def _seal(self) -> ReportSealed:
        slot, ids = self.slots.seal()
        ended = {k.id: t.loss for k, t in self._tasks.items() if t.train and t.loss is not None}
        counted = {microbatch for held in ids.values() for microbatch in held}
        return ReportSealed(slot, ids, {i: x for i, x in ended.items() if i in counted})

    @property
    def idle(self) -> bool:
        """Whether no training task is in progress here. A task whose gradient went another way may wait for ever: the
        coordinator then hands out again what it misses, and that urges us to seal what we have.
        """
        return all(task.status is Status.DONE for task in self._tasks.values() if task.train)

    def progress(self) -> Mapping[Status, int]:
        """How many tasks stand where."""
        counts = dict.fromkeys(Status, 0)
        for task in self._tasks.values():
            counts[task.status] += 1
        return counts


__all__ = ["Effect", "Hop", "Pipeline", "Status"]
