"""The tasks of one step at one holder: their status, the tensors kept for each, and where outputs go.

Pure bookkeeping. A forgotten task counts as never done here: it is done again when asked for. The sender
keeps: an output stays until the step is committed. It is sent to the next hop, and again to another holder
when that peer is lost or out of reach (`KeptOutputs`). The choice of a way affects only liveness: a way is a
proposal, any holder of a block may do any of its tasks, and the exact cover decides what counts. An output
that no known and reachable holder can take is a leftover until somebody joins or comes back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hetpeer.stages.pipeline.effects import Handle, Release, SendActivation, TaskKey
from hetpeer.stages.pipeline.routes import Hop, Roster, Route, splice, stands
from hetpeer.stages.pipeline.schedule_1f1b import Schedule, blocks_left

OFTEN = 4
"""Attempts from which on a repeated id is no longer explained by churn."""
OVERTAKEN = 2
"""A task is stuck when this many times as many gradients have come since as tasks are waiting."""


class TaskStatus(enum.Enum):
    """Status of a task at this holder."""

    READY = "ready"
    FORWARD = "forward"
    SENT = "sent"
    GRADIENT = "gradient"
    BACKWARD = "backward"
    DONE = "done"


@dataclass(slots=True)
class PipelineTask:
    """One microbatch over the blocks of `route[0]`."""

    key: TaskKey
    route: Route
    """The route from this hop on."""
    attempt: int
    upstream: str | None
    train: bool
    status: TaskStatus = TaskStatus.READY
    source: Handle | None = None
    output: Handle | None = None
    gradient: Handle | None = None
    input_gradient: Handle | None = None
    loss: float | None = None
    hits: tuple[int, int] | None = None
    """Targets of an evaluation that are predicted right, and that count."""
    returned: int = 0
    """Gradients of other tasks that had come when its output was sent."""
    sent_to: set[str] = field(default_factory=set)
    """All peers that were sent the output: any of them may count it."""

    @property
    def counts(self) -> bool:
        """Whether the task is trained for the step itself, and not for a spot check."""
        return self.train and not self.key.check

    def release_inputs(self) -> list[Release]:
        """Release the task's source and the gradient that came back: neither is needed any more."""
        inputs = (self.source, self.gradient)
        self.source = self.gradient = None
        return [Release(handle) for handle in inputs if handle is not None]


class TaskTable(dict[TaskKey, PipelineTask]):
    """All tasks, in the order in which they came."""

    def forget(self, ids: Collection[int], blocks: Collection[int]) -> None:
        """Forget finished tasks of `ids` whose gradient was dropped at one of `blocks`."""
        for key, task in list(self.items()):
            touches = any(key.begin <= block < task.route[0].end for block in blocks)
            if key.id in ids and touches and task.status is TaskStatus.DONE and task.counts:
                del self[key]

    def awaiting(self, microbatch: int, border: int) -> list[PipelineTask]:
        """Tasks waiting for the gradient of `microbatch`'s output over `border`, one for each first block."""
        return [
            task
            for task in self.values()
            if task.key.id == microbatch
            and task.route[0].end == border
            and task.status is TaskStatus.SENT
            and task.train
        ]

    def stuck(self, attempt: int, returned: int, aside: Collection[TaskKey] = ()) -> PipelineTask | None:
        """A stuck task, not in `aside`, as others are handed out for `attempt` and `returned` gradients have
        come.

        A task is stuck if it was handed out less often, so most likely to others since, while no gradient
        comes at all or ids are handed out again and again; or if many have overtaken it. None if there is
        none.
        """
        sent = (task for task in self.values() if task.status is TaskStatus.SENT and task.key not in aside)
        waiting = [task for task in sent if task.counts]
        stuck = (
            task
            for task in waiting
            if (task.attempt < attempt and (task.returned == returned or attempt >= OFTEN))
            or returned - task.returned > OVERTAKEN * len(waiting)
        )
        return min(stuck, key=lambda task: task.attempt, default=None)

    def kept(self, microbatch: int, border: int) -> PipelineTask | None:
        """A task whose output over `border` is kept and can be lent; None if there is none."""
        outputs = (task for task in self.values() if task.key.id == microbatch and task.output is not None)
        return next((task for task in outputs if task.route[0].end == border and task.counts), None)

    def losses(self, ids: Collection[int]) -> dict[int, float]:
        """Id → loss of those of `ids` that were trained and ended here."""
        return {
            task.key.id: task.loss
            for task in self.values()
            if task.loss is not None and task.key.id in ids and task.counts
        }


class KeptOutputs:
    """Outputs of `tasks`, and the ways on from one holder in one step.

    `roster`: the active holders as the step begins; `schedule` is told when a task's way to the loss changes.
    """

    def __init__(self, roster: Roster, tasks: TaskTable, schedule: Schedule[TaskKey]) -> None:
        self._roster = dict(roster)
        self._tasks = tasks
        self._schedule = schedule
        self._avoid: set[str] = set()
        """Peers that our links do not reach."""
        self.congested: dict[str, int] = {}
        """Peer → blocks left to the loss from which on its link takes no more tasks."""
        self._resent: dict[str, float] = {}
        """Peer → how much it was given in place of others."""
        self._left: set[TaskKey] = set()

    def send(self, task: PipelineTask) -> list[SendActivation]:
        """Send the kept output to the next hop, around lost peers. Nothing if it is left over."""
        assert task.output is not None
        way = self._way(task.key, task.route[1:])
        if way is None:
            return []
        self.reroute(task, way)
        task.sent_to.add(way[0].peer)
        return [SendActivation(task.key.id, way, task.attempt, task.output)]

    def reroute(self, task: PipelineTask, after: Route) -> None:
        """Have `task` continue over `after`."""
        if after != task.route[1:]:
            task.route = (task.route[0], *after)
            self._schedule.moved(task.key, len(after))

    def taken(self, key: TaskKey) -> None:
        """The output of `key` has reached a peer that took it, or is not needed any more."""
        self._left.discard(key)

    def knows(self, hop: Hop) -> bool:
        """Whether the hop's peer is in the step and holds its blocks."""
        return stands(hop, self._roster)

    def _way(self, key: TaskKey, after: Route) -> Route | None:
        """The way of the output of `key`, planned over `after`, around peers that are lost or out of reach.

        None if no known peer holds its blocks, or if `after` is empty. If only our link does not reach the
        holder, the way is returned (and taken once the link is up), and the output is a leftover as well.
        """
        if not after:
            return None  # no honest route ends before the loss
        standing = {peer: held for peer, held in self._roster.items() if peer not in self._avoid}
        if not all(stands(hop, standing) for hop in after):
            cost = {peer: 1.0 + given for peer, given in self._resent.items()}
            found = splice(after, standing, cost)
            if not stands(found[0], standing):
                found = splice(after, self._roster, cost)
            for hop in set(found) - set(after):
                self._resent[hop.peer] = self._resent.get(hop.peer, 0.0) + 1.0
            after = found
        if stands(after[0], standing):
            self._left.discard(key)
        else:
            self._left.add(key)
        return after if stands(after[0], self._roster) else None

    # ── peers and links ────────────────────────────────────────────────────────────────────────────────────

    def gone(self, peer: str) -> list[SendActivation]:
        """`peer` is lost: everything it was sent goes to another holder.

        This includes tasks sent another way already while the link was down: as long as `peer` counted them,
        no other holder's work on them did.
        """
        self._roster.pop(peer, None)
        sent = self._resend(lambda task: peer in task.sent_to)
        for task in self._tasks.values():
            task.sent_to.discard(peer)
        return sent

    def unreachable(self, peer: str) -> list[SendActivation]:
        """Our link to `peer` is down: tasks for it go to another holder, if there is one."""
        self._avoid.add(peer)
        return self._resend(lambda task: task.route[1].peer == peer)

    def _resend(self, concerns: Callable[[PipelineTask], bool]) -> list[SendActivation]:
        """Send the kept output of each task that `concerns` selects along a new way.

        Tasks at the last hop have no output to send; those of spot checks are not rerouted.
        """
        kept = (
            task
            for task in self._tasks.values()
            if task.output is not None and len(task.route) > 1 and not task.key.check
        )
        return [send for task in kept if concerns(task) for send in self.send(task)]

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        self._avoid.discard(peer)

    def joined(self, peer: str, place: tuple[int, int]) -> list[SendActivation]:
        """`peer` holds the blocks `place` from now on and can be reached: send it the leftovers for it."""
        self._roster.setdefault(peer, place)
        self._avoid.discard(peer)
        return [send for key in self._left_over() for send in self.send(self._tasks[key])]

    def may_leave(self, after: Route) -> bool:
        """Whether a forward may begin whose output goes over `after`, as far as links are concerned."""
        if not after or after[0].peer in self._avoid or after[0].peer not in self._roster:
            return True  # the output ends here, or goes another way
        held = self.congested.get(after[0].peer)
        return held is None or blocks_left(after) < held

    # ── leftovers ──────────────────────────────────────────────────────────────────────────────────────────

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Block → ids whose bundles that enter it are kept here without a known holder."""
        left: dict[int, list[int]] = {}
        for key in self._left_over():
            left.setdefault(self._tasks[key].route[0].end, []).append(key.id)
        return {border: tuple(ids) for border, ids in left.items()}

    def _left_over(self) -> list[TaskKey]:
        """Keys of outputs without a holder, sorted. A forgotten task that came again has no output yet."""
        self._left.intersection_update(key for key, task in self._tasks.items() if task.output is not None)
        return sorted(self._left, key=lambda key: (key.id, key.begin))
