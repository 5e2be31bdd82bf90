"""Links of simulated volunteers with flow control: the daemon's own grants.

On a link a tensor waits for a grant; a receiver grants room for a few. A tensor that has arrived uses its
grant until its handle is released. A link connects two processes: when either ends, tensors on their way are
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from hetpeer.averaging.effects import Effect, StepId
from hetpeer.averaging.member.member import Member
from hetpeer.dht.streams.flow_control import GrantBudget, GrantQueue, HeldBytes, LinkGrants, Pool
from hetpeer.peer.transport.uplink import Pressure

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_volunteer import SimVolunteer


from hetpeer.peer.simulate.network.sim_links import SimFrame


class GrantedLink:
    """Link from one process to another. The receiver has room for `frames` bundles of each kind."""

    def __init__(self, sender: SimVolunteer, receiver: SimVolunteer, frames: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._processes = sender.process, receiver.process
        self._queue: GrantQueue[SimFrame] = GrantQueue()
        self._pressure = Pressure()
        self._spent: dict[Pool, int] = {}
        sizes = receiver.swarm.shape.sizes
        budgets = (
            GrantBudget(1, frames),
            GrantBudget(max(sizes.values()), 2 * sum(sizes.values())),
            GrantBudget(1, frames),
        )
        self._grants = LinkGrants(
            budgets, receiver.swarm.pools.count(len(sizes)), HeldBytes(), self._announce
        )
        self._lane = self._grants.lane()
        self._announcing = False
        self._announce()

    @property
    def stands(self) -> bool:
        """Whether both ends are still the processes between which it was opened."""
        return self._processes == (self._sender.process, self._receiver.process)

    def send(self, frame: SimFrame) -> None:
        """Queue a tensor; it leaves once it is granted."""
        self._queue.add(frame)
        self._go_on()

    def nudge(self, pool: Pool, word: Callable[[Member], Iterable[Effect]]) -> None:
        """Send `word`, which stands for a repeated activation, if that activation would have to wait."""
        if self._queue.is_short(pool, 1):
            receiver, process = self._receiver, self._processes[1]
            self._carry(lambda: receiver.later(process, word))

    def end_step(self, step: StepId) -> None:
        """Drop the queued tensors of `step`."""
        self._queue.forget(step)
        self._go_on()

    def _go_on(self) -> None:
        while (frame := self._queue.next()) is not None:
            if frame.cost:
                self._spent[frame.pool] = self._spent.get(frame.pool, 0) + frame.cost
            self._leave(frame, dict(self._spent))
        if self._pressure.judge(self._queue.pools, 0, 0, 0.0):
            peer, blocks = self._receiver.name, self._pressure.held
            self._sender.later(self._processes[0], lambda core: core.work.congested(peer, blocks))

    def _leave(self, frame: SimFrame, totals: Mapping[Pool, int]) -> None:
        """Send a granted tensor; on arrival it uses its grant until the receiver releases it."""
        receiver, process = self._receiver, self._processes[1]

        def arrive(core: Member) -> Iterable[Effect]:
            self._lane.offered(totals)
            self._lane.claim(frame.pool, frame.cost)
            handle = receiver.boxes.new(frame.tag, frame.value, self._sender.name)
            receiver.boxes.lend(handle, self._lane.settle(frame.pool, frame.cost))
            return frame.take(core, handle)

        self._carry(lambda: receiver.later(process, arrive))

    def _carry(self, deliver: Callable[[], None]) -> None:
        network = self._sender.swarm.network
        network.send(self._sender.name, self._receiver.name, deliver)

    def _announce(self) -> None:
        """Send the sender its grants soon; several calls make one message."""
        if self._announcing:
            return
        self._announcing = True

        def say() -> None:
            self._announcing = False
            told = self._grants.said()
            sender, process = self._sender, self._processes[0]

            def hear(_core: Member) -> Iterable[Effect]:
                self._queue.granted(*told)
                self._go_on()
                return ()

            sender.swarm.network.send(self._receiver.name, sender.name, lambda: sender.later(process, hear))

        self._sender.swarm.world.after(0.0, say)
