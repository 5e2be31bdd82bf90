"""Devices of a running swarm as a file to plan for (device_files.py), from the volunteers' adverts. Pure.

Measurements in training count more than earlier ones. An unused link is assumed as fast as its ends allow,
with the median latency.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.dht.base.errors import ExitCode, LocalError, short_id
from hetpeer.dht.discovery import BACKUP, Advert
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.peer.planning.device_files import BITS, GIB, GIGA, LATENCY_MS, LINE_MBPS, LONGEST_S, MEGA, TERA
from hetpeer.peer.planning.machine_marks import sharing_fields, slowed
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.block_spec import times_forward
from hetpeer.stages.pipeline.place_memory import CHOICES
from hetpeer.stages.planning.swarms.plan_inputs import Devices
from hetpeer.stages.planning.swarms.swarm_plan import adding_up, holders_at

Matrix = list[list[float]]
MBPS = 1e-3, 1e6
"""Believed bounds of the rate of a link or an uplink."""
SEVERAL = 2
"""Links that must agree against what a peer says of its line."""
RELIABLE = frozenset({"coordinator", "reliable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Contents for `read_devices`: fields of each device, and latency and bandwidth from row to column."""

    peers: tuple[str, ...]
    """Peer ids of the devices, in order."""
    devices: tuple[Mapping[str, Any], ...]
    fronts: tuple[Mapping[str, Any], ...]
    """Reliable peers through which some of the devices are reached."""
    latency_ms: Matrix
    """Matrix over the devices, then the fronts, as all matrices here."""
    bandwidth_gbit_s: Matrix
    between_s: float
    """Seconds from the last work of a step, or its last sum, to the first work of the next."""
    measured: NDArray[np.bool_]
    """[i, j]: somebody has said what the line from i to j carries; no part of the file."""

    def document(self) -> dict[str, Any]:
        """The object of `--json`."""
        fronts = {"front": [dict(front) for front in self.fronts]} if self.fronts else {}
        return {
            "device": [dict(device) for device in self.devices],
            **fronts,
            "latency_ms": self.latency_ms,
            "bandwidth_gbit_s": self.bandwidth_gbit_s,
            "between_s": self.between_s,
        }

    def lines(self) -> Iterator[str]:
        """The file as TOML."""
        for name, matrix in (("latency_ms", self.latency_ms), ("bandwidth_gbit_s", self.bandwidth_gbit_s)):
            yield f"{name} = ["
            yield from (f"    {json.dumps(row)}," for row in matrix)
            yield "]"
        yield f"between_s = {json.dumps(self.between_s)}"
        for kind, entries in (("device", self.devices), ("front", self.fronts)):
            for entry in entries:
                yield ""
                yield f"[[{kind}]]"
                yield from (f"{name} = {json.dumps(value)}" for name, value in entry.items())


def inventory(manifest: Manifest, adverts: Mapping[str, Advert]) -> Inventory:
    """All volunteers (`adverts` by peer id). Raises `LocalError` HP-PLAN-001 if none advertises its speed."""
    known = {
        peer: advert
        for peer, advert in sorted(adverts.items())
        if advert.role == "volunteer" and advert.memory_bytes and _flops(manifest, advert)
    }
    if not known:
        raise LocalError(
            "HP-PLAN-001",
            "no volunteers are known yet",
            why="no volunteer has published its speed",
            fix="try again when volunteers have joined",
            exit_code=ExitCode.TRY_LATER,
        )
    fronts = _fronts(known, adverts)
    both = known | fronts
    lines = _Lines(known, fronts)
    names, shared = _names(both), sharing_fields(known)
    return Inventory(
        peers=tuple(known),
        devices=tuple(
            {
                "name": names[peer],
                "peer": peer,
                "tflops": _rounded(slowed(known, peer) * _flops(manifest, advert) / TERA, 1e-6, 1e6),
                "memory_gib": _rounded(advert.memory_bytes / GIB, 1e-6, 1e6),
                **_beside(advert),
                "up_mbps": _rounded(lines.up[peer] * BITS / MEGA, *MBPS),
                "down_mbps": _rounded(lines.down[peer] * BITS / MEGA, *MBPS),
                **({"private": True} if advert.reach == ReachKind.PRIVATE else {}),
                **shared[peer],
            }
            for peer, advert in known.items()
        ),
        fronts=tuple({"name": names[peer]} for peer in fronts),
        latency_ms=_matrix(both, lambda a, b: 1e3 * lines.latency(a, b), 0.0, 1e6),
        bandwidth_gbit_s=_matrix(
            both,
            lambda a, b: lines.rate(a, b) * BITS / GIGA,
            MBPS[0] * MEGA / GIGA,
            MBPS[1] * MEGA / GIGA,
            lines.apart,
        ),
        between_s=_rounded(_between_s(manifest, known, lines), 0.0, LONGEST_S),
        measured=np.array([[lines.measured(a, b) for b in known] for a in known]),
    )


def _beside(advert: Advert) -> dict[str, Any]:
    """Entries on main memory, disk and offload, of a peer that speaks of them."""
    if not advert.offload:
        return {}
    amounts = (("host_gib", advert.host_bytes), ("disk_gib", advert.disk_bytes))
    found: dict[str, Any] = {name: _rounded(nbytes / GIB, 1e-6, 1e6) for name, nbytes in amounts if nbytes}
    return found | {"offload": advert.offload if advert.offload in CHOICES else Offload.NONE.value}


def _between_s(manifest: Manifest, known: Mapping[str, Advert], lines: _Lines) -> float:
    """Least advertised seconds from last work to update, less those estimated for the reduce; not below 0."""
    waited = min((advert.between_s for advert in known.values() if advert.between_s), default=0.0)
    work = of_manifest(manifest, manifest.training.microbatches)
    if work.averaging is not None:  # after some batches only
        return waited
    amounts = np.ones(len(known))
    devices = Devices(
        flops=amounts,
        memory=amounts,
        uplink=np.array([lines.up[peer] for peer in known]),
        latency=np.array([[lines.latency(a, b) for b in known] for a in known]),
        bandwidth=np.array([[lines.rate(a, b) for b in known] for a in known]),
    )
    held = [
        (0, 0) if advert.state == BACKUP else (advert.block_begin, advert.block_end)
        for advert in known.values()
    ]
    return max(0.0, waited - float(adding_up(devices, work, holders_at(held, len(work))).max()))


def _fronts(known: Mapping[str, Advert], adverts: Mapping[str, Advert]) -> dict[str, Advert]:
    """Public reliable peers that serve as relays of private ones."""
    named = {end for advert in known.values() if advert.reach == ReachKind.PRIVATE for end in advert.relays}
    return {
        peer: advert
        for peer, advert in sorted(adverts.items())
        if advert.role in RELIABLE and advert.reach == ReachKind.PUBLIC and peer[-8:] in named
    }


class _Lines:
    """Rates and latencies between `adverts`, assumed where unknown; uplinks of `fronts` are not limited."""

    def __init__(self, adverts: Mapping[str, Advert], fronts: Mapping[str, Advert]) -> None:
        self._rates, self._trips = {}, {}
        ends = {peer[-8:]: peer for peer in adverts}
        for sender, advert in adverts.items():
            for note in advert.links:
                if (to := ends.get(note.to)) is not None and note.rate:
                    self._rates[sender, to] = believed(note.rate)
                    self._trips[sender, to] = note.trip_s
        self._usual_trip = median(self._trips.values()) if self._trips else 2e-3 * LATENCY_MS
        self.up = _filled({peer: uplink_of(advert) for peer, advert in adverts.items()})
        """Bytes/s that leave each; an unknown one is as the middle of the known."""
        arriving = {
            p: max((r for (_, to), r in self._rates.items() if to == p), default=0.0) for p in adverts
        }
        self.down = {
            peer: max(arriving[peer], believed(advert.downlink) or self.up[peer])
            for peer, advert in adverts.items()
        }
        """Bytes/s that reach each: as its probe found, but no less than what came over a link; without a
        probe no downlink is taken to be slower than the uplink.
        """
        self.up, self.down = (
            self._contradicted(self.up, self.down),
            self._contradicted(self.down, self.up, receivers=True),
        )
        wide = dict.fromkeys(fronts, LINE_MBPS * MEGA / BITS)
        self.up |= wide
        self.down |= wide
        self._private = {p for p, a in adverts.items() if a.reach == ReachKind.PRIVATE} if fronts else set()

    def _contradicted(
        self, ends: Mapping[str, float], others: Mapping[str, float], *, receivers: bool = False
    ) -> dict[str, float]:
        """The rates of all `ends` (uplinks, or downlinks of `receivers`), less where links contradict.

        A link that carries less than half of what both its ends say is held up at one of them. If that is so
        on all links of a peer, SEVERAL at least, its own line is what holds them up: the fastest of them says
        how much it carries.
        """
        found = dict(ends)
        for peer, said in ends.items():
            rates = {
                pair[1 - receivers]: rate for pair, rate in self._rates.items() if pair[receivers] == peer
            }
            if len(rates) >= SEVERAL and all(
                rate < min(said, others[other]) / 2 for other, rate in rates.items()
            ):
                found[peer] = max(rates.values())
        return found

    def rate(self, sender: str, to: str) -> float:
        """Bytes/s."""
        return self._rates.get((sender, to)) or min(self.up[sender], self.down[to])

    def apart(self, sender: str, to: str) -> bool:
        """Whether both are private, there is a front, and nothing was measured between them."""
        return {sender, to} <= self._private and (sender, to) not in self._rates

    def measured(self, sender: str, to: str) -> bool:
        return (sender, to) in self._rates

    def latency(self, sender: str, to: str) -> float:
        """Seconds, one way: half of the way there and back, whichever end has measured it."""
        trip = self._trips.get((sender, to)) or self._trips.get((to, sender)) or self._usual_trip
        return trip / 2


def uplink_of(advert: Advert) -> float:
    """Believed bytes/s that a peer can send: no less than over its fastest link. 0: not known."""
    return believed(max(advert.uplink, *(note.rate for note in advert.links), 0.0))


def believed(rate: float) -> float:
    """An advertised rate in bytes/s, clamped so that no claim breaks the arithmetic; 0 (unknown) stays 0."""
    least, most = (mbps * MEGA / BITS for mbps in MBPS)
    return min(max(rate, least), most) if rate else 0.0


def _flops(manifest: Manifest, advert: Advert) -> float:
    """FLOP/s that its worker reaches: in training if it has trained, else on what it has rehearsed."""
    blocks = manifest.blocks[advert.block_begin : advert.block_end]
    seconds = advert.forward_s + advert.backward_s
    flops = sum(block.flops_forward for block in blocks) * times_forward(manifest.training.recompute)
    return flops / seconds if flops and seconds else advert.flops_per_second


def _filled(amounts: Mapping[str, float]) -> dict[str, float]:
    known = [amount for amount in amounts.values() if amount]
    usual = median(known) if known else LINE_MBPS * MEGA / BITS
    return {peer: amount or usual for peer, amount in amounts.items()}


def _names(adverts: Mapping[str, Advert]) -> dict[str, str]:
    """Names of the peers; with the short id where the name is empty or not unique."""
    often = Counter(advert.name for advert in adverts.values())
    return {
        peer: advert.name if advert.name and often[advert.name] == 1 else f"{advert.name}{short_id(peer)}"
        for peer, advert in adverts.items()
    }


def _matrix(
    peers: Mapping[str, Advert],
    entry: Callable[[str, str], float],
    least: float,
    most: float,
    apart: Callable[[str, str], bool] = lambda _a, _b: False,
) -> Matrix:
    """Matrix of `entry` for each pair of peers, within `least` and `most`; 0 for itself and pairs `apart`."""
    return [
        [0.0 if a == b or apart(a, b) else _rounded(entry(a, b), least, most) for b in peers] for a in peers
    ]


def _rounded(number: float, least: float, most: float) -> float:
    """A value within its bounds: adverts are claims, and none may make the file unreadable."""
    return float(f"{min(max(number, least), most):.4g}")
