"""What a simulated swarm runs on, where that matters: what blocks cost, and lines that carry so many bytes a second.

Histories that look for bugs do without: there everything takes a moment, and a random one on the way (sim_worker.py, world.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from hetpeer.peer.simulate.network.world import World
from hetpeer.stages.links.link_pace import SLACK, ratio_of
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.timeline import Timeline
from hetpeer.stages.planning.uplinks import PeerLink, Uplink


@dataclass(frozen=True, slots=True, kw_only=True)
class SimHardware:
    """Volunteer n of a swarm is device n. `target_s`: what lines that compress aim at, the time of a microbatch at the slowest stage."""

    devices: Devices
    work: StepDemand
    target_s: float

    def forward_s(self, block: int) -> float:
        """At a FLOP/s."""
        return float(self.work.flops[block])

    def backward_s(self, block: int) -> float:
        """At a FLOP/s."""
        return float(self.work.flops[block]) * (self.work.computed - 1)

    def bundle(self, sender: int, to: int, border: int, *, back: bool) -> float:
        """Bytes of an activation that enters block `border`, or of the gradient that goes `back`, as `sender` writes it for `to`."""
        nbytes, compression = float(self.work.crossing[border]), self.work.compression
        most = compression.backward if back else compression.forward
        if not compression.adaptive:
            return nbytes / most
        rate = min(float(self.devices.bandwidth[sender, to]), float(self.devices.uplink[sender]))
        return nbytes / ratio_of(nbytes / max(rate, 1e-9), SLACK * self.target_s, most)

    def reduced(self, block: int) -> float:
        """Bytes of a block's gradient, as it is added up."""
        return float(self.work.reduced[block]) / self.work.compression.reduce

    def state_s(self, device: int) -> float:
        """Seconds to fetch a block's state. No downlink is taken to be slower than the uplink beside it."""
        return float(self.work.state.mean() / self.devices.uplink[device])


class _LinksOfDevice(dict[str, PeerLink]):
    """Those of one device, made when they are used: of a thousand devices there are a million, and few carry anything."""

    def __init__(self, rate: Callable[[str], float]) -> None:
        super().__init__()
        self._rate = rate

    def __missing__(self, to: str) -> PeerLink:
        self[to] = PeerLink(rate=max(self._rate(to), 1e-9))
        return self[to]


class SimUplinks:
    """The uplinks of `names`, which are the devices of `ground` in this order."""

    def __init__(self, world: World, names: Sequence[str], hardware: SimHardware) -> None:
        devices = hardware.devices
        self._hardware = hardware
        self._number = {name: number for number, name in enumerate(names)}
        self._latency = devices.latency
        self._bandwidth = devices.bandwidth
        self._largest: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """From → to → bytes of the largest bundle so far, uncompressed."""
        self._uplinks = {
            name: Uplink(
                cast("Timeline", world),  # it has a clock and lets things happen later, as that has
                float(devices.uplink[sender]),
                _LinksOfDevice(partial(self._rate, sender)),
                self._number,
            )
            for name, sender in self._number.items()
        }

    def _rate(self, sender: int, to: str) -> float:
        return float(self._bandwidth[sender, self._number[to]])

    def bundle(self, sender: str, to: str, border: int, *, back: bool) -> float:
        """Bytes of an activation that enters block `border`, or of the gradient that goes `back`."""
        sent = self._largest[sender]
        sent[to] = max(sent.get(to, 0.0), float(self._hardware.work.crossing[border]))
        return self._hardware.bundle(self._number[sender], self._number[to], border, back=back)

    def seconds(self, sender: str) -> dict[str, float]:
        """What a volunteer says of its lines: receiver → seconds that the largest bundle takes, uncompressed, by all that the line carries."""
        number = self._number[sender]
        uplink = float(self._hardware.devices.uplink[number])
        return {
            to: nbytes / max(min(self._rate(number, to), uplink), 1e-9)
            for to, nbytes in self._largest[sender].items()
        }

    def latency_s(self, source: str, target: str) -> float | None:
        """One way; None where one of them is no device (the coordinator)."""
        if source not in self._number or target not in self._number:
            return None
        return float(self._latency[self._number[source], self._number[target]])

    def send(self, source: str, target: str, nbytes: float, left: Callable[[], None]) -> None:
        """`left` happens when the last byte has left `source`."""
        self._uplinks[source].send(target, nbytes, left)
