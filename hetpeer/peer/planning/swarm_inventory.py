"""Devices of a running swarm as a file to plan for (device_files.py), from the volunteers' adverts. Pure.

Measurements in training count more than earlier ones. Lines that nobody measured are estimated
(advert_lines.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.dht.base.errors import ExitCode, LocalError, short_id
from hetpeer.dht.discovery import BACKUP, Advert
from hetpeer.dht.reach.reachability import ReachKind
from hetpeer.peer.planning.advert_lines import lines_of
from hetpeer.peer.planning.device_files import BITS, GIB, GIGA, LONGEST_S, MEGA, TERA
from hetpeer.peer.planning.machine_marks import sharing_fields, slowed
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.block_spec import times_forward
from hetpeer.stages.pipeline.place_memory import CHOICES
from hetpeer.stages.planning.pair_lines import PairLines
from hetpeer.stages.planning.swarms.departure_costs import HOUR_S
from hetpeer.stages.planning.swarms.plan_inputs import Devices
from hetpeer.stages.planning.swarms.swarm_plan import adding_up, holders_at
from hetpeer.stages.planning.swarms.untried_speeds import on_blocks

Matrix = list[list[float]]
MBPS = 1e-3, 1e6
"""Believed bounds of the rate of a link or an uplink."""
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
    doubt: NDArray[np.float64]
    """[i, j]: factor by which an estimated line may be slower; 1: it was measured. No part of the file."""

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


def inventory(
    manifest: Manifest,
    adverts: Mapping[str, Advert],
    leaves: Mapping[str, float] = MappingProxyType({}),
    *,
    beside: Mapping[str, Advert] = MappingProxyType({}),
) -> Inventory:
    """All volunteers (`adverts` by peer id). `leaves`: peer → expected departures an hour, as far as known.

    `beside`: other peers; what volunteers among them reach on blocks tells about those that have not tried.

    Raises `LocalError` HP-PLAN-001 if none advertises its speed.
    """
    known = {
        peer: advert
        for peer, advert in sorted(adverts.items())
        if advert.role == "volunteer" and advert.memory_bytes and _flops(manifest, advert)
    }
    reached = [_flops(manifest, advert) for advert in known.values()]
    others = [
        (reaches, advert.product_flops)
        for peer, advert in sorted(beside.items())
        if peer not in known and advert.role == "volunteer" and (reaches := _flops(manifest, advert))
    ]
    flops = on_blocks(
        [*reached, *(reaches for reaches, _ in others)],
        [*(advert.product_flops for advert in known.values()), *(product for _, product in others)],
    )[: len(known)]
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
    lines = lines_of(both, wide=fronts)
    private = {p for p, a in known.items() if a.reach == ReachKind.PRIVATE} if fronts else set()
    names, shared = _names(both), sharing_fields(known)
    return Inventory(
        peers=tuple(known),
        devices=tuple(
            {
                "name": names[peer],
                "peer": peer,
                "tflops": _rounded(slowed(known, peer) * flops[number] / TERA, 1e-6, 1e6),
                "memory_gib": _rounded(advert.memory_bytes / GIB, 1e-6, 1e6),
                **_beside(advert),
                "up_mbps": _rounded(lines.together[number] * BITS / MEGA, *MBPS),
                "down_mbps": _rounded(lines.down[number] * BITS / MEGA, *MBPS),
                **({"private": True} if advert.reach == ReachKind.PRIVATE else {}),
                **shared[peer],
                **({"leaves_per_hour": _rounded(leaves[peer], 0.0, HOUR_S)} if peer in leaves else {}),
            }
            for number, (peer, advert) in enumerate(known.items())
        ),
        fronts=tuple({"name": names[peer]} for peer in fronts),
        latency_ms=_matrix(1e3 * lines.latency, 0.0, 1e6),
        bandwidth_gbit_s=_matrix(
            np.where(_apart(tuple(both), private) & ~lines.measured, 0.0, lines.rate * BITS / GIGA),
            MBPS[0] * MEGA / GIGA,
            MBPS[1] * MEGA / GIGA,
        ),
        between_s=_rounded(_between_s(manifest, known, lines), 0.0, LONGEST_S),
        measured=lines.measured[: len(known), : len(known)],
        doubt=lines.doubt[: len(known), : len(known)],
    )


def _apart(peers: Sequence[str], private: Collection[str]) -> NDArray[np.bool_]:
    """[i, j]: both are private, so that they may not reach each other."""
    closed = np.array([peer in private for peer in peers], dtype=np.bool_)
    apart: NDArray[np.bool_] = closed[:, None] & closed[None, :]
    return apart


def _beside(advert: Advert) -> dict[str, Any]:
    """Entries on main memory, disk and offload, of a peer that speaks of them."""
    if not advert.offload:
        return {}
    amounts = (("host_gib", advert.host_bytes), ("disk_gib", advert.disk_bytes))
    found: dict[str, Any] = {name: _rounded(nbytes / GIB, 1e-6, 1e6) for name, nbytes in amounts if nbytes}
    return found | {"offload": advert.offload if advert.offload in CHOICES else Offload.NONE.value}


def _between_s(manifest: Manifest, known: Mapping[str, Advert], lines: PairLines) -> float:
    """Least advertised seconds from last work to update, less those estimated for the reduce; not below 0."""
    waited = min((advert.between_s for advert in known.values() if advert.between_s), default=0.0)
    work = of_manifest(manifest, manifest.training.microbatches)
    if work.averaging is not None:  # after some batches only
        return waited
    amounts = np.ones(len(known))
    devices = Devices(
        flops=amounts,
        memory=amounts,
        uplink=lines.together[: len(known)],
        latency=lines.latency[: len(known), : len(known)],
        bandwidth=lines.rate[: len(known), : len(known)],
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


def _flops(manifest: Manifest, advert: Advert) -> float:
    """FLOP/s that its worker reaches: in training if it has trained, else on what it has rehearsed, else in
    matrix products.
    """
    blocks = manifest.blocks[advert.block_begin : advert.block_end]
    seconds = advert.forward_s + advert.backward_s
    flops = sum(block.flops_forward for block in blocks) * times_forward(manifest.training.recompute)
    return flops / seconds if flops and seconds else advert.flops_per_second


def _names(adverts: Mapping[str, Advert]) -> dict[str, str]:
    """Names of the peers; with the short id where the name is empty or not unique."""
    often = Counter(advert.name for advert in adverts.values())
    return {
        peer: advert.name if advert.name and often[advert.name] == 1 else f"{advert.name}{short_id(peer)}"
        for peer, advert in adverts.items()
    }


def _matrix(entries: NDArray[np.float64], least: float, most: float) -> Matrix:
    """`entries` within `least` and `most`; 0 on the diagonal, and where they are 0."""
    return [
        [0.0 if a == b or not entry else _rounded(entry, least, most) for b, entry in enumerate(row)]
        for a, row in enumerate(entries.tolist())
    ]


def _rounded(number: float, least: float, most: float) -> float:
    """A value within its bounds: adverts are claims, and none may make the file unreadable."""
    return float(f"{min(max(number, least), most):.4g}")
