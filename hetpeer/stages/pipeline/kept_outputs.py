"""Kept outputs: sent to the next hop, and again elsewhere when that peer is lost or out of reach.

Pure. The sender keeps: an output stays until the step is committed, and is sent as often as others need it.
next_hops.py chooses the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetpeer.stages.pipeline.effects import SendActivation, TaskKey
from hetpeer.stages.pipeline.next_hops import NextHops
from hetpeer.stages.pipeline.routes import Route
from hetpeer.stages.pipeline.schedule_1f1b import Schedule
from hetpeer.stages.pipeline.task_table import PipelineTask, TaskTable


class KeptOutputs:
    """Outputs of `tasks`; `schedule` is told when a task's way to the loss changes."""

    def __init__(self, onward: NextHops, tasks: TaskTable, schedule: Schedule[TaskKey]) -> None:
        self._onward = onward
        self._tasks = tasks
        self._schedule = schedule

    def send(self, task: PipelineTask) -> list[SendActivation]:
        """Send the kept output to the next hop, around lost peers. Nothing if it is left over."""
        assert task.output is not None
        way = self._onward.way(task.key, task.route[1:])
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

    def gone(self, peer: str) -> list[SendActivation]:
        """`peer` is lost: everything it was sent goes to another holder.

        This includes tasks sent another way already while the link was down: as long as `peer` counted them,
        no other holder's work on them did.
        """
        self._onward.gone(peer)
        sent = self._send_again(lambda task: peer in task.sent_to)
        for task in self._tasks:
            task.sent_to.discard(peer)
        return sent

    def unreachable(self, peer: str) -> list[SendActivation]:
        """Our link to `peer` is down: tasks for it go to another holder, if there is one."""
        self._onward.unreachable(peer)
        return self._send_again(lambda task: task.route[1].peer == peer)

    def _send_again(self, concerns: Callable[[PipelineTask], bool]) -> list[SendActivation]:
        kept = (
            task
            for task in self._tasks
            if task.output is not None and len(task.route) > 1 and not task.key.check
        )
        return [send for task in kept if concerns(task) for send in self.send(task)]

    def joined(self, peer: str, place: tuple[int, int]) -> list[SendActivation]:
        """`peer` holds the blocks `place` from now on and can be reached: send it the leftovers for it."""
        self._onward.joined(peer, place)
        return [send for key in self._left_over() for send in self.send(self._tasks[key])]

    def leftovers(self) -> Mapping[int, tuple[int, ...]]:
        """Block → ids whose bundles that enter it are kept here without a known holder."""
        left: dict[int, list[int]] = {}
        for key in self._left_over():
            left.setdefault(self._tasks[key].end, []).append(key.id)
        return {border: tuple(ids) for border, ids in left.items()}

    def _left_over(self) -> list[TaskKey]:
        """Outputs without a holder. A task that was forgotten and came again has none until it
        has run again.
        """
        return self._onward.left_over({task.key for task in self._tasks if task.output is not None})
