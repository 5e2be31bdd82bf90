"""Devices to plan for, from a TOML or JSON file.

    latency_ms = 40                  # between any two devices, or rows of a matrix
    between_s = 0.5                  # from a step's last work to the next one's first, without reduces
    away_s = 60                      # until a device that left is back, or another has its place

    [[device]]
    name = "attic"
    peer = "QmeATs…"                 # its peer id, if it is known: a plan then seats this very peer
    tflops = 8.5                     # reached by its worker
    memory_gib = 6.0                 # offered of the memory that it computes in
    host_gib = 12.0                  # main memory beside a GPU; without it, memory_gib is main memory
    disk_gib = 20.0                  # for what does not fit into memory
    offload = "auto"                 # none, host or disk: as `hetpeer join --offload`
    pcie_gb_s = 12.0                 # between GPU and main memory
    disk_gb_s = 1.0
    up_mbps = 20
    down_mbps = 100
    private = true                   # nobody can connect to it: two such devices need a front
    processor = 1                    # devices with the same number compute on the same processor
    processor_part = 0.5             # how much of it this one takes while it computes
    line = 1                         # devices with the same number share an uplink
    leaves_per_hour = 0.5            # expected departures an hour; without it, the mean of the others

    [[front]]                        # a reliable peer that relays and computes nothing
    name = "server"
    up_mbps = 1000
    down_mbps = 1000

The rate between two devices is the smaller of the sender's up_mbps and the receiver's down_mbps.
`bandwidth_gbit_s` gives it pair by pair, the devices' rows before the fronts'; 0 means that two cannot reach
each other, private or not.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.untrusted import plain_reason
from hetpeer.stages.pipeline.place_memory import kinds_of
from hetpeer.stages.planning.device_network import MOST, DeviceNetwork, through_fronts, wrong
from hetpeer.stages.planning.swarms.departure_costs import HOUR_S
from hetpeer.stages.planning.swarms.plan_inputs import (
    AWAY_S,
    DISK,
    LATENCY_S,
    LINE,
    PCIE,
    Beside,
    DepartureRates,
    Devices,
    Sharing,
    StepDemand,
)

Amount = Annotated[float, Field(ge=1e-6, le=1e9, strict=True)]
Group = Annotated[int, Field(ge=0, le=10**6, strict=True)]
BITS, MEGA, GIGA, TERA, GIB = 8.0, 1e6, 1e9, 1e12, float(1 << 30)
LATENCY_MS, LINE_MBPS = 1e3 * LATENCY_S, LINE * BITS / MEGA
"""Defaults of a link."""
LONGEST_S = 3600.0
"""Most seconds between two steps."""
LONGEST_AWAY_S = 7 * 86_400.0
"""Most seconds that a device is away."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FrontEntry(_Entry):
    """A `[[front]]` of the file."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    up_mbps: Amount | None = None
    down_mbps: Amount | None = None


class DeviceEntry(FrontEntry):
    """A `[[device]]` of the file."""

    peer: Annotated[str, Field(max_length=64, pattern=r"^[!-~]*$")] = ""
    tflops: Amount
    memory_gib: Amount
    host_gib: Amount | None = None
    disk_gib: Amount | None = None
    offload: Literal["auto", "none", "host", "disk"] = "auto"
    pcie_gb_s: Amount = PCIE / GIGA
    disk_gb_s: Amount = DISK / GIGA
    private: Annotated[bool, Field(strict=True)] = False
    processor: Group | None = None
    processor_part: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] = 1.0
    line: Group | None = None
    leaves_per_hour: Annotated[float, Field(ge=0.0, le=HOUR_S, strict=True)] | None = None

    @property
    def beside(self) -> Beside:
        """Its offer beside the memory that it computes in."""
        return Beside(
            host=(self.host_gib or 0.0) * GIB,
            disk=(self.disk_gib or 0.0) * GIB,
            kinds=kinds_of(self.offload),
            pcie=self.pcie_gb_s * GIGA,
            disk_rate=self.disk_gb_s * GIGA,
        )


class _DeviceFile(_Entry):
    device: Annotated[tuple[DeviceEntry, ...], Field(min_length=1)]
    front: tuple[FrontEntry, ...] = ()
    latency_ms: Any = LATENCY_MS
    bandwidth_gbit_s: Any = None
    between_s: Annotated[float, Field(ge=0.0, le=LONGEST_S, strict=True)] = 0.0
    away_s: Annotated[float, Field(gt=0.0, le=LONGEST_AWAY_S, strict=True)] = AWAY_S


@dataclass(frozen=True, slots=True)
class NamedDevices:
    """Devices and fronts of a file, with their names."""

    names: tuple[str, ...]
    devices: Devices
    through: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """(from, to) → the front between two devices that cannot reach each other directly."""
    between_s: float = 0.0
    """Seconds between two steps, without reduces."""
    peers: tuple[str, ...] = ()
    """Peer id of each device; empty where the file has none."""

    def of(self, work: StepDemand) -> StepDemand:
        """`work` with the `between_s` of the file."""
        return replace(work, between_s=self.between_s)


def read_devices(path: Path) -> NamedDevices:
    """Read a file of devices. Raises `LocalError` HP-PLAN-002 naming the wrong device, row or column."""
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise wrong(f"{path}: {why}", "give a TOML or JSON file with devices") from None
    return devices_in(data, str(path))


def devices_in(data: Any, source: str) -> NamedDevices:
    """Devices from the contents of a file, called `source` in errors.

    Raises `LocalError` HP-PLAN-002 that names the wrong device, row or column.
    """
    try:
        file = _DeviceFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place, why = _where(first["loc"], data), plain_reason(first["msg"])
        raise wrong(f"{source}: {place}: {why}", "correct the entry") from None
    entries = (*file.device, *file.front)
    names = tuple(entry.name for entry in entries)
    if twice := {name for name in names if names.count(name) > 1}:
        raise wrong(f"{source}: two devices are called {min(twice)}", "give each a name of its own")
    peers = tuple(entry.peer for entry in file.device)
    if twice := {peer for peer in peers if peer and peers.count(peer) > 1}:
        raise wrong(f"{source}: two devices have the peer id {min(twice)}", "give each its own")
    up, down = (
        np.array([getattr(entry, name) or LINE_MBPS for entry in entries])
        for name in ("up_mbps", "down_mbps")
    )
    unknown = LINE_MBPS if file.bandwidth_gbit_s is None else np.inf  # only the pairs are known
    uplink = np.array([entry.up_mbps or unknown for entry in entries])
    network = DeviceNetwork.of(
        {
            "latency_ms": _square(file.latency_ms, len(names)),
            "bandwidth_gbit_s": file.bandwidth_gbit_s
            if file.bandwidth_gbit_s is not None
            else (np.minimum(up[:, None], down[None, :]) * MEGA / GIGA).tolist(),
        },
        apart=True,
    )
    if len(network) != len(names):
        raise wrong(f"{source}: {len(names)} devices, and matrices of {len(network)}", "give a row for each")
    count, fronts = len(file.device), len(file.front)
    private = np.array([entry.private for entry in file.device] + [False] * fronts)
    met = ~(private[:, None] & private[None, :])
    devices, through = through_fronts(
        Devices(
            flops=np.array([entry.tflops * TERA for entry in file.device] + [0.0] * fronts),
            memory=np.array([entry.memory_gib * GIB for entry in file.device] + [0.0] * fronts),
            uplink=uplink * MEGA / BITS,
            latency=network.latency_s,
            bandwidth=network.bandwidth_gbit_s
            * (met if file.bandwidth_gbit_s is None else 1.0)
            * GIGA
            / BITS,
            beside=tuple(entry.beside for entry in file.device) + (Beside(),) * fronts,
        ),
        fronts,
    )
    devices = replace(
        devices, sharing=_sharing(file.device), departures=_departures(file.device, file.away_s)
    )
    alone = (devices.bandwidth <= 0) & ~np.eye(count, dtype=np.bool_)
    if alone.any():
        one, other = np.argwhere(alone)[0].tolist()
        unreached = f"{names[one]} does not reach {names[other]}, and no front reaches both"
        why = f"row {one}, column {other}: {unreached}"
        raise wrong(f"{source}: {why}", "give them a line, or a [[front]] between them")
    passing = {pair: names[count + front] for pair, front in through.items()}
    return NamedDevices(names[:count], devices, passing, file.between_s, peers)


def _sharing(entries: Sequence[DeviceEntry]) -> Sharing | None:
    """Processors and lines that devices share; None if each has its own of all."""
    if all(entry.processor is entry.line is None for entry in entries):
        return None

    def numbered(groups: Sequence[int | None]) -> NDArray[np.intp]:
        """Equal numbers from 0 for equal groups; a device without one is a group by itself."""
        names = [("alone", n) if group is None else ("group", group) for n, group in enumerate(groups)]
        number = {name: n for n, name in enumerate(dict.fromkeys(names))}
        return np.array([number[name] for name in names], dtype=np.intp)

    return Sharing(
        processor=numbered([entry.processor for entry in entries]),
        part=np.array([entry.processor_part for entry in entries]),
        line=numbered([entry.line for entry in entries]),
    )


def _departures(entries: Sequence[DeviceEntry], away_s: float) -> DepartureRates | None:
    """Departures a second of each device; None if no entry says any."""
    said = [entry.leaves_per_hour for entry in entries if entry.leaves_per_hour is not None]
    if not any(said):
        return None
    usual = sum(said) / len(said)
    hourly = [usual if entry.leaves_per_hour is None else entry.leaves_per_hour for entry in entries]
    return DepartureRates(rate=np.array(hourly) / HOUR_S, away_s=away_s)


def _square(latency: Any, count: int) -> Any:
    """An N x N matrix; a single number is that of all pairs."""
    if isinstance(latency, int | float) and not isinstance(latency, bool) and abs(latency) <= MOST:
        return [[0.0 if a == b else float(latency) for a in range(count)] for b in range(count)]
    return latency


def _where(place: tuple[int | str, ...], data: Any) -> str:
    """A device by its name, where it has one."""
    words = [str(word) for word in place]
    if len(place) > 1 and place[0] == "device" and isinstance(place[1], int):
        entry = data["device"][place[1]]
        name = entry.get("name") if isinstance(entry, dict) else None
        words[:2] = [f"device {place[1]}" + (f" ({name})" if name else "")]
    return ", ".join(words)
