"""Tensors on their way from one simulated volunteer to another: how large they are, and what may become of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hetpeer.averaging.effects import Shard
from hetpeer.averaging.member.member import Effect, Member
from hetpeer.peer.simulate.network.wires import Wires
from hetpeer.peer.simulate.network.world import Network, World
from hetpeer.peer.simulate.sim_config import SwarmConfig
from hetpeer.peer.simulate.sim_numerics import Numerics

if TYPE_CHECKING:
    from hetpeer.peer.simulate.sim_volunteer import Volunteer

LATE_S = (0.5, 30.0)
"""How much later the second of two comes, if it is late."""


class Freight:
    """Over `network`. Without `wires` bytes cost nothing, and are not counted."""

    def __init__(
        self, world: World, network: Network, wires: Wires | None, config: SwarmConfig, numerics: Numerics
    ) -> None:
        self._world = world
        self._network = network
        self._wires = wires
        self._config = config
        self._sizes = numerics.sizes

    def bundle(self, sender: str, to: str, border: int, *, back: bool = False) -> float:
        """Bytes of a microbatch that enters block `border`, or comes `back` from it, from one volunteer to another."""
        return 0.0 if self._wires is None else self._wires.bundle(sender, to, border, back=back)

    def seconds(self, sender: str) -> dict[str, float]:
        """What `sender` says of its lines; nothing without wires."""
        return {} if self._wires is None else self._wires.seconds(sender)

    def reduced(self, shard: Shard) -> float:
        """Bytes of a part or a result of `shard`."""
        ground = self._config.ground
        if ground is None:
            return 0.0
        part = (shard.end - shard.begin) / self._sizes[shard.block]
        return ground.reduced(shard.block) * part

    def carry(
        self,
        sender: str,
        receiver: Volunteer,
        deliver: Callable[[Member], Iterable[Effect]],
        nbytes: float,
    ) -> None:
        """A tensor from one volunteer to another; sometimes twice, the second time perhaps late."""
        process, random, send = receiver.process, self._world.random, self._network.send
        send(sender, receiver.name, lambda: receiver.later(process, deliver), nbytes)
        if random.random() < self._config.duplicates:
            delay = random.choice((0.0, random.uniform(*LATE_S)))
            self._world.after(
                delay, lambda: send(sender, receiver.name, lambda: receiver.later(process, deliver))
            )
