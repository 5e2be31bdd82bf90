"""Kept outputs of a step, and their next hops: known holders, reachable links, and leftovers.

Pure. The sender keeps: an output stays until the step is committed. It is sent to the next hop, and again to
another holder when that peer is lost or out of reach. The choice of a way affects only liveness: a way is a
proposal, any holder of a block may do any of its tasks, and the exact cover decides what counts. An output
that no known and reachable holder can take is a leftover until somebody joins or comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hetpeer.stages.pipeline.effects import SendActivation, TaskKey
from hetpeer.stages.pipeline.routes import Hop, Roster, Route, blocks_left, splice, stands
from hetpeer.stages.pipeline.schedule_1f1b import Schedule
from hetpeer.stages.pipeline.task_table import PipelineTask, TaskTable


class NextHops:
    """The ways on from one holder in one step. `roster`: the active holders as the step begins."""

    def __init__(self, roster: Roster) -> None:
        self._roster = dict(roster)
        self._avoid: set[str] = set()
        """Peers that our links do not reach."""
        self._congested: dict[str, int] = {}
        """Peer → blocks left to the loss from which on its link takes no more tasks."""
        self._resent: dict[str, float] = {}
        """Peer → how much it was given in place of others."""
        self._left: set[TaskKey] = set()

    def gone(self, peer: str) -> None:
        """`peer` is lost."""
        self._roster.pop(peer, None)

    def joined(self, peer: str, place: tuple[int, int]) -> None:
        """`peer` holds the blocks `place` and can be reached."""
        self._roster.setdefault(peer, place)
        self._avoid.discard(peer)

    def unreachable(self, peer: str) -> None:
        """Our link to `peer` is down."""
        self._avoid.add(peer)

    def knows(self, hop: Hop) -> bool:
        """Whether the hop's peer is in the step and holds its blocks."""
        return stands(hop, self._roster)

    def reachable(self, peer: str) -> None:
        """The link to `peer` is up again."""
        self._avoid.discard(peer)

    def congested(self, peer: str, blocks: int) -> None:
        """The link to `peer` cannot keep up with tasks that have `blocks` or more left to the loss."""
        self._congested[peer] = blocks

    def relieved(self, peer: str) -> None:
        """The link to `peer` takes all tasks again."""
        self._congested.pop(peer, None)

    def is_congested(self, peer: str) -> bool:
        """Whether its link holds up any tasks."""
        return peer in self._congested

    def may_leave(self, after: Route) -> bool:
        """Whether a forward may begin whose output goes over `after`, as far as links are concerned."""
        if not after or after[0].peer in self._avoid or after[0].peer not in self._roster:
            return True  # it ends here, or goes another way
        held = self._congested.get(after[0].peer)
        return held is None or blocks_left(after) < held

    def way(self, key: TaskKey, after: Route) -> Route | None:
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

    def done(self, key: TaskKey) -> None:
        """The output of `key` has reached a peer that took it."""
        self._left.discard(key)

    def left_over(self, known: Collection[TaskKey]) -> list[TaskKey]:
        """Leftovers of those still `known`, sorted."""
        self._left.intersection_update(known)
        return sorted(self._left, key=lambda key: (key.id, key.begin))


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
