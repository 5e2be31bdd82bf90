"""Hardware of a simulated swarm: the cost of blocks, and uplinks that carry so many bytes a second.

`hetpeer simulate` has it. Histories that look for bugs have none: work and messages take short random times
there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from hetpeer.peer.simulate.network.world import World
from hetpeer.stages.links.adaptive_ratio import SLACK, ratio_of
from hetpeer.stages.planning.swarms.plan_inputs import Devices, StepDemand
from hetpeer.stages.planning.uplinks import PeerLink, Timeline, Uplink


@dataclass(frozen=True, slots=True, kw_only=True)
class SimHardware:
    """Devices and step demand; volunteer n is device n.

    `target_s`: seconds that a link with a codec aims at, the time of a microbatch at the slowest stage.
    """

    devices: Devices
    work: StepDemand
    target_s: float

    def forward_s(self, block: int) -> float:
        """Seconds of a microbatch's forward through `block` at 1 FLOP/s."""
        return float(self.work.flops[block])

    def backward_s(self, block: int) -> float:
        """Seconds of a microbatch's backward through `block` at 1 FLOP/s."""
        return float(self.work.flops[block]) * (self.work.computed - 1)

    def fold_s(self, device: int, begin: int, end: int) -> float:
        """Seconds that a microbatch's gradient of the blocks is on its way from a GPU to main memory."""
        return self.work.carried_s(self.devices, device, begin, end)[0]

    def update_s(self, device: int, begin: int, end: int) -> float:
        """Seconds in which an update of the blocks carries numbers between GPU, main memory and disk."""
        return self.work.carried_s(self.devices, device, begin, end)[1]

    def bundle(self, sender: int, to: int, border: int, *, back: bool) -> float:
        """Bytes on the link of the activation that enters block `border`, or of its gradient with `back`."""
        nbytes, compression = float(self.work.crossing[border]), self.work.compression
        most = compression.backward if back else compression.forward
        if not compression.adaptive:
            return nbytes / most
        rate = min(float(self.devices.bandwidth[sender, to]), float(self.devices.uplink[sender]))
        return nbytes / ratio_of(nbytes / max(rate, 1e-9), SLACK * self.target_s, most)

    def reduced(self, block: int) -> float:
        """Bytes of a block's gradient in a reduce."""
        return float(self.work.reduced[block]) / self.work.compression.reduce

    def state_s(self, device: int) -> float:
        """Seconds to fetch a block's state, on the assumption that no downlink is slower than its uplink."""
        return float(self.work.state.mean() / self.devices.uplink[device])


class _LinksOfDevice(dict[str, PeerLink]):
    """Links of one device, made at first use: of the million links of a thousand devices few are used."""

    def __init__(self, rate: Callable[[str], float]) -> None:
        super().__init__()
        self._rate = rate

    def __missing__(self, to: str) -> PeerLink:
        self[to] = PeerLink(rate=max(self._rate(to), 1e-9))
        return self[to]


class SimUplinks:
    """Uplinks of the volunteers `names`, which are the devices of `hardware` in this order."""

    def __init__(self, world: World, names: Sequence[str], hardware: SimHardware) -> None:
        devices = hardware.devices
        self._hardware = hardware
        self._number = {name: number for number, name in enumerate(names)}
        self._latency = devices.latency
        self._bandwidth = devices.bandwidth
        self._largest: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """Sender → receiver → bytes of the largest bundle so far, uncompressed."""
        self._closed: set[str] = set()
        """Peers without a process."""
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
        """Receiver → seconds of the largest bundle of `sender`, uncompressed, with the link to itself."""
        number = self._number[sender]
        uplink = float(self._hardware.devices.uplink[number])
        return {
            to: nbytes / max(min(self._rate(number, to), uplink), 1e-9)
            for to, nbytes in self._largest[sender].items()
        }

    def latency_s(self, source: str, target: str) -> float | None:
        """Seconds one way; None if one of them is no device (the coordinator)."""
        if source not in self._number or target not in self._number:
            return None
        return float(self._latency[self._number[source], self._number[target]])

    def close(self, peer: str) -> None:
        """The process of `peer` has ended: nothing more goes to it, and what is under way is dropped."""
        self._closed.add(peer)
        for uplink in self._uplinks.values():
            uplink.drop(peer)

    def open(self, peer: str) -> None:
        """A process of `peer` begins."""
        self._closed.discard(peer)

    def send(self, source: str, target: str, nbytes: float, left: Callable[[], None]) -> None:
        """Call `left` when the last byte has left `source`; never if `target` is closed before that."""
        if target not in self._closed:
            self._uplinks[source].send(target, nbytes, left)
