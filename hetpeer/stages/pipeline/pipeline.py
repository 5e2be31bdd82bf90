"""A holder's part of one step: tasks in, tasks out, and all tensors kept until the commit.

Pure: events in, effects out (effects.py). One object for each step. A task is one microbatch over a range of
blocks. Doing it twice, here or elsewhere, is waste and never an error, because the exact cover over slots
decides what counts. The sender keeps: a repeated activation is answered with the gradient of the first one.
"""

from __future__ import annotations

from functools import cached_property

from hetpeer.stages.block.rounding import UNMEASURED, Rounding
from hetpeer.stages.pipeline.delays import Delays
from hetpeer.stages.pipeline.effects import (
    Effect,
    ForgetGraph,
    Handle,
    Release,
    ReportEvaluated,
    ReportFailed,
    ReportSealed,
    RunBackward,
    RunForward,
    SendGradient,
    TaskKey,
)
from hetpeer.stages.pipeline.gradient_slots import GradientSlots
from hetpeer.stages.pipeline.recomputation import Recomputations
from hetpeer.stages.pipeline.routes import Roster, Route, rest_of
from hetpeer.stages.pipeline.schedule_1f1b import LossDistance, Schedule, WorkerQueue
from hetpeer.stages.pipeline.task_table import KeptOutputs, PipelineTask, TaskStatus, TaskTable


class Pipeline:
    """One step at one holder. Each event returns the effects that follow from it, in order.

    `me` is our peer id, `roster` the active holders, `microbatches` M of the step, `queue` the queue at the
    worker, shared with other steps under way here. `behind`: steps before this one whose updates are not
    applied here; a task waits until it can be computed with the version that `delays` names. The schedule is
    1F1B (PipeDream, Narayanan et al. 2019), see schedule_1f1b.py.

        pipeline = Pipeline("me", {"me": (0, 2)}, microbatches=4, slot_capacity=4)
        effects = pipeline.assign(0, (Hop("me", 0, 2),), attempt=0)  # RunForward
        effects = pipeline.forward_done(TaskKey(0, 0), output=None, loss=2.3)  # RunBackward
    """

    def __init__(
        self,
        me: str,
        roster: Roster,
        microbatches: int,
        slot_capacity: int,
        queue: WorkerQueue | None = None,
        behind: int = 0,
        delays: Delays | None = None,
    ) -> None:
        self.slots = GradientSlots(slot_capacity)
        self._me = me
        self._microbatches = microbatches
        self._behind = self._missing = behind
        self._delays = delays or Delays()
        self._tasks = TaskTable()
        self._queue = queue or WorkerQueue()
        self.schedule: Schedule[TaskKey] = Schedule(
            self._queue, self.slots.can_fold, self._may_begin, waits_for_older=self._delays.waits(behind)
        )
        """Ready and running tasks; `schedule.leave` ends the step here."""
        self.outputs = KeptOutputs(roster, self._tasks, self.schedule)
        self._folding = 0
        self._urged = False
        self._returned = 0
        """Gradients that have come from others."""

    @cached_property
    def recomputations(self) -> Recomputations:
        """Recomputed tasks of spot checks; most runs have none."""
        return Recomputations(self._tasks, self.outputs)

    def advance(self, missing: int) -> list[Effect]:
        """Another update is applied here: those of `missing` steps before this one are not."""
        self._missing = missing
        return self.dispatch()

    # ── tasks arriving ─────────────────────────────────────────────────────────────────────────────────────

    def assign(self, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """The coordinator hands out `microbatch`; we are its first hop and take it from the data order.

        For an id that we have, in no newer attempt, it is advice: a task that has not begun changes its
        route, or is left to another peer.
        """
        key = TaskKey(microbatch, route[0].begin)
        task = self._tasks.get(key)
        if task is not None and task.status is TaskStatus.READY and attempt == task.attempt:
            if route[0].peer == self._me:
                self.outputs.reroute(task, rest_of(route, task.route[0].end))
            else:
                del self._tasks[key]
                self.schedule.withdraw(key)
            return self.dispatch()
        if route[0].peer != self._me:
            return []
        return self._enter(microbatch, route, attempt, upstream=None, source=None)

    def activation(
        self, microbatch: int, route: Route, attempt: int, upstream: str, handle: Handle, check: int = 0
    ) -> list[Effect]:
        """`upstream` sent the bundle that enters `route[0].begin`; with `check`, for that spot check."""
        return self._enter(microbatch, route, attempt, upstream=upstream, source=handle, check=check)

    def check(self, microbatch: int, route: Route, check: int) -> list[Effect]:
        """Have `microbatch` recomputed at `route[0]`, for spot check `check`.

        We do it if it begins with the data; else we send our kept bundle to `route[0]` again.
        """
        if route[0].begin == 0:
            return self._enter(microbatch, route, 0, upstream=None, source=None, check=check)
        return self.recomputations.lend(microbatch, route, check)

    def nudge(self, microbatch: int, route: Route, attempt: int, upstream: str) -> list[Effect]:
        """Answer an activation that `upstream` sends again, if its task is known; the bundle awaits a grant.

        Does what `activation` does for a known task. Tasks here may wait for this very message.
        """
        task = self._tasks.get(TaskKey(microbatch, route[0].begin))
        return [] if task is None else self._repeated(task, route, attempt, upstream, None)

    def _enter(
        self,
        microbatch: int,
        route: Route,
        attempt: int,
        *,
        upstream: str | None,
        source: Handle | None,
        check: int = 0,
    ) -> list[Effect]:
        """Take a task: queue its forward if it is new, else answer for the one that is here."""
        key = TaskKey(microbatch, route[0].begin, check)
        task = self._tasks.get(key)
        if check and not (microbatch < self._microbatches and self.recomputations.takes(key)):
            twice: list[Effect] = [] if source is None else [Release(source)]
            return twice if task is None else [*twice, *self.recomputations.goes(task, route)]
        if task is not None:
            return self._repeated(task, route, attempt, upstream, source)
        task = PipelineTask(
            key, route, attempt, upstream, train=microbatch < self._microbatches, source=source
        )
        self._tasks[task.key] = task
        # the coordinator rations recomputations; the window is for tasks that wait in the pipeline
        counts, reach = task.train and not check, LossDistance.of(route)
        self.schedule.ready_forward(key, reach, train=counts, attempt=attempt)
        way = self._make_way(attempt, reach) if counts and attempt else []
        return way + self._start_work()  # one more task makes no slot due

    def _make_way(self, attempt: int, reach: LossDistance) -> list[Effect]:
        """Make room for a task handed out again, by setting aside a stuck one.

        Otherwise one stuck peer fills every upstream window. In a burst of failures a task may only look
        stuck: so it is kept, and the one handed out least often is given up only once there are many.
        """
        if self._queue.may_begin(self.schedule, reach):
            return []
        task = self._tasks.stuck(attempt, self._returned, self.schedule.aside)
        if task is None:
            return []
        room = self._queue.may_set_aside(reach)
        self.schedule.aside[task.key] = None
        if room:
            return []
        aside = (self._tasks[key] for key in self.schedule.aside)
        task = min((one for one in aside if one.status is TaskStatus.SENT), key=lambda one: one.attempt)
        del self._tasks[task.key]
        self.outputs.taken(task.key)
        self.schedule.finished(task.key)
        return [ForgetGraph(task.key), *task.release_inputs()]

    def _repeated(
        self, task: PipelineTask, route: Route, attempt: int, upstream: str | None, source: Handle | None
    ) -> list[Effect]:
        """Answer a known task with the kept tensors; pass on a newer attempt."""
        effects: list[Effect] = [] if source is None else [Release(source)]
        task.upstream = upstream
        if task.input_gradient is not None and upstream is not None:
            effects.append(SendGradient(task.key.id, upstream, task.key.begin, task.input_gradient))
        if attempt > task.attempt:
            task.attempt = attempt
            self.schedule.again(task.key, attempt)
            self._urged = True
            self.outputs.reroute(task, rest_of(route, task.route[0].end))
            if task.status is TaskStatus.READY and task.train and not task.key.check:
                effects += self._make_way(attempt, LossDistance.of(task.route))
            if task.output is not None:
                effects += self.outputs.send(task)
            elif task.loss is not None and not task.train:
                effects.append(ReportEvaluated(task.key.id, task.loss, task.hits))
        return effects + self.dispatch()

    def gradient(self, microbatch: int, border: int, handle: Handle) -> list[Effect]:
        """The gradient of the bundle that we sent over `border` has come back.

        Other tasks that wait for it ask for one of their own: the peer that made it keeps it and answers.
        """
        awaiting = self._tasks.awaiting(microbatch, border)
        if not awaiting:
            return [Release(handle)]
        task, *others = awaiting
        task.status = TaskStatus.GRADIENT
        self._returned += 1
        task.gradient = handle
        self.outputs.taken(task.key)
        self.schedule.ready_backward(task.key)
        asked = [send for other in others for send in self.outputs.send(other)]
        return [*asked, *self.dispatch()]

    def unread(self, microbatch: int, border: int, given: str, why: str, *, back: bool) -> list[Effect]:
        """The peer `given` sent bytes over `border` that are no bundle: an activation, or the gradient that
        comes `back`.

        If it is missing here, it has to come another way.
        """
        missed = (
            self._tasks.awaiting(microbatch, border)
            if back
            else self._tasks.get(TaskKey(microbatch, border)) is None
        )
        return [ReportFailed(microbatch, why, given)] if missed else []

    # ── work done ──────────────────────────────────────────────────────────────────────────────────────────

    def forward_done(
        self, key: TaskKey, output: Handle | None, loss: float | None, hits: tuple[int, int] | None = None
    ) -> list[Effect]:
        """The forward of `key` is done: `output` is the next hop's bundle, or `loss` (and `hits`) the end."""
        self.schedule.running -= 1
        task = self._tasks[key]
        effects: list[Effect] = []
        task.output, task.loss, task.hits = output, loss, hits
        if output is not None and key.check:
            effects += self.recomputations.passes_on(task, output)
        elif loss is None:
            task.status = TaskStatus.SENT if task.train else TaskStatus.DONE
            task.returned = self._returned
            effects += self.outputs.send(task)
        elif task.train:
            task.status = TaskStatus.GRADIENT
            self.schedule.ready_backward(key)
        else:
            task.status = TaskStatus.DONE
            effects.append(ReportEvaluated(key.id, loss, hits))
        if not task.train:
            effects += task.release_inputs()
        return effects + self.dispatch()

    def backward_done(
        self, key: TaskKey, input_gradient: Handle | None, rounding: Rounding = UNMEASURED
    ) -> list[Effect]:
        """The worker ran the backward of `key` and folded it; `input_gradient` is for the hop before us.

        `rounding` is known of some tasks of spot checks.
        """
        self.schedule.running -= 1
        task = self._tasks[key]
        task.input_gradient = input_gradient
        if key.check:
            return [*self.recomputations.done(task, rounding), *self.dispatch()]
        self._folding -= 1
        task.status = TaskStatus.DONE
        self.schedule.finished(key)
        effects: list[Effect] = [*task.release_inputs()]
        if input_gradient is not None and task.upstream is not None:
            effects.append(SendGradient(key.id, task.upstream, key.begin, input_gradient))
        if not all(self.slots.holds(key.id, block) for block in range(key.begin, task.route[0].end)):
            # its slot was dropped meanwhile: it may be asked for again
            del self._tasks[key]
        return effects + self.dispatch()

    def work_failed(self, key: TaskKey, why: str, given: str = "") -> list[Effect]:
        """The worker could not do `key`; `given`: the peer whose tensor is at fault, if any.

        A broken backward spoils the open slot, which is dropped as a whole.
        """
        self.schedule.running -= 1
        task = self._tasks[key]
        if key.check:
            return [*self.recomputations.failed(task), *self.dispatch()]
        del self._tasks[key]
        self.schedule.finished(key)
        effects: list[Effect] = [ForgetGraph(key), ReportFailed(key.id, why, given)]
        effects += task.release_inputs()
        if task.status is TaskStatus.BACKWARD:
            self._folding -= 1
            drops, ids = self.slots.spoil()
            effects += drops
            self._tasks.forget(ids, [drop.block for drop in drops])
        return effects + self.dispatch()

    # ── the coordinator's answers, and lost peers ───────────────────────────────────────────────────────────

    def settled(self, slot: int, refused: tuple[int, ...]) -> list[Effect]:
        """The coordinator counts `slot` except at the blocks `refused`, which may have to be done again."""
        ids = self.slots.contents().get(slot, {})
        lost = {microbatch for block in refused for microbatch in ids.get(block, ())}
        effects: list[Effect] = [*self.slots.settle(slot, refused)]
        self._tasks.forget(lost, refused)
        return effects + self.dispatch()

    def urge(self) -> list[Effect]:
        """The coordinator waits: report what is done, even if the slot is not full and we wait ourselves."""
        self._urged = True
        return self.dispatch()

    def evict(self, blocks: tuple[int, ...]) -> list[Effect]:
        """Drop our accepted ids at `blocks`, which no longer count."""
        effects: list[Effect] = []
        for block in blocks:
            base = self.slots.accepted()
            lost = self.slots.contents()[base].get(block, frozenset()) if base is not None else frozenset()
            effects += self.slots.evict(block)
            self._tasks.forget(lost, (block,))
        return effects + self.dispatch()

    def gone(self, peer: str) -> list[Effect]:
        """`peer` is lost: everything it was sent in this step goes to another holder."""
        return [*self.outputs.gone(peer), *self._if_congested(peer)]

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down: send its tasks to another holder if there is one."""
        return [*self.outputs.unreachable(peer), *self._if_congested(peer)]

    def _if_congested(self, peer: str) -> list[Effect]:
        """Begin tasks that the peer's congested link held up and that now go another way."""
        return self.dispatch() if peer in self.outputs.congested else []

    def congested(self, peer: str, blocks: int | None) -> list[Effect]:
        """The link to `peer` cannot keep up: begin no forward over it with `blocks` or more left to the loss.

        None: it takes all tasks again. Backwards, other routes and forwards nearer to the loss go on: what
        holds the link up may itself wait for them.
        """
        if blocks is None:
            self.outputs.congested.pop(peer, None)
        else:
            self.outputs.congested[peer] = blocks
        return self.dispatch()  # fewer may be held than before

    # ── the worker's time ──────────────────────────────────────────────────────────────────────────────────

    def dispatch(self) -> list[Effect]:
        """Give the worker work while it has room; seal the open slot when due, which makes room for more.

        Call it when it is our turn at the worker because of an event in another step.
        """
        effects = self._start_work()
        while not self._folding and self.slots.should_seal(lambda: self._urged or self.idle):
            self._urged = False
            slot, ids = self.slots.seal()
            counted = {microbatch for held in ids.values() for microbatch in held}
            effects.append(ReportSealed(slot, ids, self._tasks.losses(counted)))
            effects += self._start_work()
        return effects

    def _start_work(self) -> list[Effect]:
        """Effects that start all work that the schedule allows now."""
        effects: list[Effect] = []
        while (work := self.schedule.begin()) is not None:
            key, task = work.key, self._tasks[work.key]
            end = task.route[0].end
            if work.backward:
                task.status = TaskStatus.BACKWARD
                effects.append(RunBackward(key, end, task.gradient, *self._fold(task)))
            else:
                task.status = TaskStatus.FORWARD
                effects.append(RunForward(key, end, task.source, task.train, len(task.route) - 1))
        return effects

    def _may_begin(self, key: TaskKey) -> bool:
        """Whether the parameters for the forward of `key` are here, and the link for its output has room."""
        return self._in_time(key) and self.outputs.may_leave(self._tasks[key].route[1:])

    def _in_time(self, key: TaskKey) -> bool:
        """Whether the parameters for the forward of `key` are here."""
        last = self._tasks[key].route[0].end - 1  # of our blocks it needs the newest version
        return self._missing <= self._delays.behind(self._behind, key.id, last)

    def _fold(self, task: PipelineTask) -> tuple[int, tuple[int, ...]]:
        """(slot, blocks) to which the gradients of `task` are added."""
        blocks = range(task.key.begin, task.route[0].end)
        if task.key.check:
            return self.recomputations.slot(task.key), tuple(blocks)
        self._folding += 1
        return self.slots.fold(task.key.id, blocks)

    @property
    def held_up(self) -> bool:
        """Whether work is ready that could begin if there were room for its result."""
        return self.schedule.waits(self._in_time)

    @property
    def idle(self) -> bool:
        """Whether no training task is in progress here, except for spot checks.

        A task whose gradient went another way may wait for ever; the coordinator then assigns again what it
        misses, which urges us to seal.
        """
        tasks = (task for task in self._tasks.values() if task.train and not task.key.check)
        return all(task.status is TaskStatus.DONE for task in tasks)
