"""A holder's part of one step: tasks in, tasks out, and everything kept until the step is committed.

Pure: events in, effects out (effects.py). One object per step. A task is one microbatch over a range of blocks; doing
it twice, here or elsewhere, is waste and never an error, because what counts is decided by the exact cover over slots.
Who sends keeps: a repeated activation is answered with the gradient that was made of the first one.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.stages.pipeline.effects import (
    CompareBundle,
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
from hetpeer.stages.pipeline.gradient_slots import SlotBook
from hetpeer.stages.pipeline.kept_outputs import KeptOutputs
from hetpeer.stages.pipeline.next_hops import Onward
from hetpeer.stages.pipeline.recomputation import Reruns
from hetpeer.stages.pipeline.routes import Roster, Route, blocks_left, rest_of
from hetpeer.stages.pipeline.schedule_1f1b import LossDistance, Schedule, ScheduledWork
from hetpeer.stages.pipeline.task_table import PipelineTask, Status, TaskTable
from hetpeer.stages.pipeline.worker_queue import WorkerQueue


class Pipeline:
    """One step at one holder. `me` is our peer id, `roster` the active holders, `microbatches` M of the step, `bench` the worker's
    room, which it shares with other steps under way here. Ids from `early` on are not begun before `catch_up`; None: all may be.
    """

    def __init__(
        self,
        me: str,
        roster: Roster,
        microbatches: int,
        slot_capacity: int,
        bench: WorkerQueue | None = None,
        early: int | None = None,
    ) -> None:
        self.slots = SlotBook(slot_capacity)
        self._me = me
        self._microbatches = microbatches
        self._early = early
        self._tasks = TaskTable()
        self._bench = bench or WorkerQueue()
        self._schedule: Schedule[TaskKey] = Schedule(self._bench.may_begin)
        self._onward = Onward(roster)
        self._outputs = KeptOutputs(self._onward, self._tasks, self._schedule)
        self._reruns = Reruns(self._tasks, self._onward)
        self.running = 0
        """Pieces of work at the worker."""
        self._folding = 0
        self._urged = False
        self._returned = 0
        """Gradients that have come from others."""
        self._bench.enter(self)

    def over(self) -> None:
        """The step has ended here: it does not share the worker any more."""
        self._bench.leave(self)

    def catch_up(self) -> list[Effect]:
        """The parameters are here with which ids from `early` on are computed."""
        self._early = None
        return self._dispatch()

    def decided(self) -> None:
        """The step's gradient is decided: whatever is still under way changes nothing, nothing new is begun."""
        self._schedule.close()

    # ── tasks arriving ─────────────────────────────────────────────────────────────────────────────────────

    def assign(self, microbatch: int, route: Route, attempt: int) -> list[Effect]:
        """The coordinator hands out `microbatch`; we are its first hop and take it from the data order.

        One that we have, in no newer attempt, is advice: as long as it is not begun it goes this other way, or is begun by somebody else.
        """
        key = TaskKey(microbatch, route[0].begin)
        task = self._tasks.get(key)
        if task is not None and task.status is Status.READY and attempt == task.attempt:
            if route[0].peer == self._me:
                self._outputs.reroute(task, rest_of(route, task.end))
            else:
                self._tasks.remove(key)
                self._schedule.withdraw(key)
            return self._dispatch()
        if route[0].peer != self._me:
            return []
        return self._enter(microbatch, route, attempt, upstream=None, source=None)

    def activation(
        self, microbatch: int, route: Route, attempt: int, upstream: str, handle: Handle, check: int = 0
    ) -> list[Effect]:
        """`upstream` sent the bundle that enters block `route[0].begin`; with `check` to be computed once more for that spot check."""
        return self._enter(microbatch, route, attempt, upstream=upstream, source=handle, check=check)

    def asked(self, microbatch: int, border: int, upstream: str, handle: Handle, check: int) -> list[Effect]:
        """`upstream` has computed for spot check `check` what somebody else has sent us, and wants the gradient that we gave."""
        return self._reruns.answer(microbatch, border, upstream, handle, check)

    def returned(self, microbatch: int, border: int, peer: str, handle: Handle, check: int) -> list[Effect]:
        """`peer` has computed once more what we have lent it for spot check `check`: this is the gradient."""
        return self._reruns.compare(CompareBundle(check, microbatch, border, True, peer, handle))

    def check(self, microbatch: int, route: Route, check: int) -> list[Effect]:
        """`microbatch` is to be computed once more at `route[0]`, for spot check `check`: by us, if it begins with the data; else by whom we
        send once more what we have kept.
        """
        if route[0].begin == 0:
            return self._enter(microbatch, route, 0, upstream=None, source=None, check=check)
        return self._reruns.lend(microbatch, route, check)

    def nudge(self, microbatch: int, route: Route, attempt: int, upstream: str) -> list[Effect]:
        """`upstream` has a bundle for us that waits for credit, which tasks here may hold that wait for this very word: as
        `activation`, for a task that is known.
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
        key = TaskKey(microbatch, route[0].begin, check)
        task = self._tasks.get(key)
        if check and not (microbatch < self._microbatches and self._reruns.takes(key)):
            twice: list[Effect] = [] if source is None else [Release(source)]
            return twice if task is None else [*twice, *self._reruns.goes(task, route)]
        if task is not None:
            return self._repeated(task, route, attempt, upstream, source)
        task = PipelineTask(
            key, route, attempt, upstream, train=microbatch < self._microbatches, source=source
        )
        self._tasks.enter(task)
        # what is done once more is rationed by the coordinator: the window is for what waits in the pipeline
        counts, reach = task.train and not check, _reach(route)
        self._schedule.ready_forward(key, reach, train=counts, attempt=attempt)
        way = self._make_way(attempt, reach) if counts else []
        return way + self._dispatch()

    def _make_way(self, attempt: int, reach: LossDistance) -> list[Effect]:
        """A task that is not begun was handed out; if that is again, and there is no room for it here, one that got stuck is set aside. Or who holds those up would hold up all whose rooms they fill.
        It may have looked so, in a burst of failures: so it is kept, and the one that was handed out least often is given up only once there are many.
        """
        if not attempt or self._schedule.has_room(reach):
            return []
        task = self._tasks.stuck(attempt, self._returned, self._schedule.aside)
        if task is None:
            return []
        room = self._bench.may_set_aside(reach)
        self._schedule.set_aside(task.key)
        if room:
            return []
        aside = (self._tasks[key] for key in self._schedule.aside)
        task = min((one for one in aside if one.status is Status.SENT), key=lambda one: one.attempt)
        self._tasks.remove(task.key)
        self._onward.done(task.key)
        self._schedule.finished(task.key)
        return [ForgetGraph(task.key), *task.release_source()]

    @property
    def held(self) -> int:
        """Forwards that wait for their gradient."""
        return self._schedule.held

    @property
    def aside(self) -> int:
        """Those of them that got stuck, and were set aside."""
        return len(self._schedule.aside)

    def _repeated(
        self, task: PipelineTask, route: Route, attempt: int, upstream: str | None, source: Handle | None
    ) -> list[Effect]:
        """A task that we know already: answer with what is kept; a newer attempt is passed on."""
        effects: list[Effect] = [] if source is None else [Release(source)]
        task.upstream = upstream
        if task.input_gradient is not None and upstream is not None:
            effects.append(SendGradient(task.key.id, upstream, task.key.begin, task.input_gradient))
        if attempt > task.attempt:
            task.attempt = attempt
            self._schedule.again(task.key, attempt)
            self._urged = True
            self._outputs.reroute(task, rest_of(route, task.end))
            if task.status is Status.READY and task.train and not task.key.check:
                effects += self._make_way(attempt, _reach(task.route))
            if task.output is not None:
                effects += self._outputs.send(task)
            elif task.loss is not None and not task.train:
                effects.append(ReportEvaluated(task.key.id, task.loss))
        return effects + self._dispatch()

    def gradient(self, microbatch: int, border: int, handle: Handle) -> list[Effect]:
        """The gradient of the bundle that we sent over `border` has come back. Others that wait for it ask for one of their own: who made
        it keeps it, and answers.
        """
        awaiting = self._tasks.awaiting(microbatch, border)
        if not awaiting:
            return [Release(handle)]
        task, *others = awaiting
        task.status = Status.GRADIENT
        self._returned += 1
        task.gradient = handle
        self._onward.done(task.key)
        self._schedule.ready_backward(task.key)
        asked = [send for other in others for send in self._outputs.send(other)]
        return [*asked, *self._dispatch()]

    def unread(self, microbatch: int, border: int, given: str, why: str, *, back: bool) -> list[Effect]:
        """The peer `given` sent bytes over `border` that are no bundle: an activation, or the gradient that comes `back`. If it is missed here,
        it is to come another way.
        """
        missed = (
            self._tasks.awaiting(microbatch, border)
            if back
            else self._tasks.get(TaskKey(microbatch, border)) is None
        )
        return [ReportFailed(microbatch, why, given)] if missed else []

    # ── work done ──────────────────────────────────────────────────────────────────────────────────────────

    def forward_done(self, key: TaskKey, output: Handle | None, loss: float | None) -> list[Effect]:
        """The worker ran the forward of `key`: `output` is the bundle for the next hop, or `loss` the end."""
        self.running -= 1
        task = self._tasks[key]
        effects: list[Effect] = []
        task.output, task.loss = output, loss
        if output is not None and key.check:
            effects += self._reruns.passes_on(task, output)
        elif loss is None:
            task.status = Status.SENT if task.train else Status.DONE
            task.returned = self._returned
            effects += self._outputs.send(task)
        elif task.train:
            task.status = Status.GRADIENT
            self._schedule.ready_backward(key)
        else:
            task.status = Status.DONE
            effects.append(ReportEvaluated(key.id, loss))
        if not task.train:
            effects += task.release_source()
        return effects + self._dispatch()

    def backward_done(self, key: TaskKey, input_gradient: Handle | None) -> list[Effect]:
        """The worker ran the backward of `key` and folded it; `input_gradient` is for the hop before us."""
        self.running -= 1
        task = self._tasks[key]
        task.input_gradient = input_gradient
        if key.check:
            return [*self._reruns.done(task), *self._dispatch()]
        self._folding -= 1
        task.status = Status.DONE
        self._schedule.finished(key)
        effects: list[Effect] = [*task.release_source(), *task.release_gradient()]
        if input_gradient is not None and task.upstream is not None:
            effects.append(SendGradient(key.id, task.upstream, key.begin, input_gradient))
        if not all(self.slots.holds(key.id, block) for block in range(key.begin, task.end)):
            # what it was folded into was dropped meanwhile: it may be asked for again
            self._tasks.remove(key)
        return effects + self._dispatch()

    def work_failed(self, key: TaskKey, why: str, given: str = "") -> list[Effect]:
        """The worker could not do `key`, because of what the peer `given` had sent, if it is that. A broken backward spoils the open slot: it is dropped as a whole."""
        self.running -= 1
        task = self._tasks[key]
        if key.check:
            return [*self._reruns.failed(task), *self._dispatch()]
        self._tasks.remove(key)
        self._schedule.finished(key)
        effects: list[Effect] = [ForgetGraph(key), ReportFailed(key.id, why, given)]
        effects += [*task.release_source(), *task.release_gradient()]
        if task.status is Status.BACKWARD:
            self._folding -= 1
            drops, ids = self.slots.spoil()
            effects += drops
            self._tasks.forget(ids, [drop.block for drop in drops])
        return effects + self._dispatch()

    # ── the coordinator's word, and peers that are gone ────────────────────────────────────────────────────

    def settled(self, slot: int, refused: tuple[int, ...]) -> list[Effect]:
        """The coordinator counts `slot`, but for the blocks `refused`, which may have to be done again here."""
        ids = self.slots.contents().get(slot, {})
        lost = {microbatch for block in refused for microbatch in ids.get(block, ())}
        effects: list[Effect] = [*self.slots.settle(slot, refused)]
        self._tasks.forget(lost, refused)
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
            self._tasks.forget(lost, (block,))
        return effects + self._dispatch()

    def gone(self, peer: str) -> list[Effect]:
        """`peer` left the roster: all it was sent in this step goes to another holder, its slots died with it."""
        return [*self._outputs.gone(peer), *self._if_congested(peer)]

    def unreachable(self, peer: str) -> list[Effect]:
        """Our link to `peer` is down: send its tasks to another holder if there is one, without asking anybody."""
        return [*self._outputs.unreachable(peer), *self._if_congested(peer)]

    def _if_congested(self, peer: str) -> list[Effect]:
        """What its link held up goes another way now."""
        return self._dispatch() if self._onward.is_congested(peer) else []

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        self._onward.reachable(peer)

    def joined(self, peer: str, place: tuple[int, int]) -> list[Effect]:
        """`peer` holds the blocks `place` from now on, and can be reached: it gets what is left over for it."""
        return [*self._outputs.joined(peer, place)]

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Border → ids whose bundles over it are kept here for a holder that we do not know."""
        return self._outputs.leftovers()

    def congested(self, peer: str, blocks: int) -> list[Effect]:
        """The link to `peer` keeps no pace: begin no forward that goes there with `blocks` or more of them left to the loss.

        Backwards, other routes and nearer forwards go on: what holds a link up may itself wait for them.
        """
        self._onward.congested(peer, blocks)
        return self._dispatch()  # it may be fewer that are held than before

    def relieved(self, peer: str) -> list[Effect]:
        """The link to `peer` takes everything again."""
        self._onward.relieved(peer)
        return self._dispatch()

    # ── the worker's time ──────────────────────────────────────────────────────────────────────────────────

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
        return self._schedule.waits(self._in_time)

    def in_flight(self, reach: LossDistance) -> int:
        """Forwards within `reach` that wait for their gradient."""
        return self._schedule.in_flight(reach)

    def bid(self) -> bool | None:
        """Whether the next piece of work that could be begun is a backward; None: there is none."""
        work = self._next()
        return None if work is None else work.backward

    def _next(self) -> ScheduledWork[TaskKey] | None:
        def may_begin(key: TaskKey) -> bool:
            return self._in_time(key) and self._onward.may_leave(self._tasks[key].route[1:])

        return self._schedule.next(may_fold=self.slots.can_fold(), may_begin=may_begin)

    def _in_time(self, key: TaskKey) -> bool:
        """Whether the parameters are here with which the forward of `key` is computed."""
        return self._early is None or key.id < self._early

    def _start_work(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._bench.turn() is self and (work := self._next()) is not None:
            self._schedule.begun(work)
            task = self._tasks[work.key]
            self.running += 1
            if work.backward:
                task.status = Status.BACKWARD
                effects.append(RunBackward(work.key, task.end, task.gradient, *self._fold(task)))
            else:
                task.status = Status.FORWARD
                effects.append(RunForward(work.key, task.end, task.source, task.train, len(task.route) - 1))
        return effects

    def _fold(self, task: PipelineTask) -> tuple[int, tuple[int, ...]]:
        """The slot into which the gradients of `task` go, and at which blocks."""
        blocks = range(task.key.begin, task.end)
        if task.key.check:
            return self._reruns.slot(task.key), tuple(blocks)
        self._folding += 1
        return self.slots.fold(task.key.id, blocks)

    def _seal(self) -> ReportSealed:
        slot, ids = self.slots.seal()
        counted = {microbatch for held in ids.values() for microbatch in held}
        return ReportSealed(slot, ids, self._tasks.losses(counted))

    @property
    def idle(self) -> bool:
        """Whether no training task is in progress here. One whose gradient went another way may wait for ever: the coordinator
        then hands out again what it misses, and that urges us to seal what we have.
        """
        return self._tasks.idle


def _reach(route: Route) -> LossDistance:
    """How far a task that is to go over `route`, its own hop first, is from the loss."""
    return LossDistance(blocks_left(route), len(route) - 1)
