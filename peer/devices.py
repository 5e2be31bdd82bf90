"""Devices to plan for, as people write them: a TOML or JSON file.

    latency_ms = 40                  # between any two, or rows of a matrix

    [[device]]
    name = "attic"
    tflops = 8.5                     # that a worker reaches
    memory_gib = 6.0                 # that it gives
    up_mbps = 20
    down_mbps = 100

Where only lines are given, from one to another go as many bits as leave the one and reach the other; `bandwidth_gbit_s` says it pair by pair.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.stages.planning.network import Network, wrong
from hetpeer.stages.planning.swarms.given import Devices

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BITS, MEGA, GIGA, TERA, GIB = 8.0, 1e6, 1e9, 1e12, float(1 << 30)
LATENCY_MS, LINE_MBPS = 20.0, 1000.0
"""Of what nobody says more about."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeviceEntry(_Entry):
    """One device of the file."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    tflops: Amount
    memory_gib: Amount
    up_mbps: Amount = LINE_MBPS
    down_mbps: Amount = LINE_MBPS


class _File(_Entry):
    device: Annotated[tuple[DeviceEntry, ...], Field(min_length=1)]
    latency_ms: Any = LATENCY_MS
    bandwidth_gbit_s: Any = None


@dataclass(frozen=True, slots=True)
class NamedDevices:
    """What was read."""

    names: tuple[str, ...]
    devices: Devices


def read_devices(path: Path) -> NamedDevices:
    """Raises `LocalError` HP-PLAN-002 naming the device, row or column that is wrong."""
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise wrong(f"{path}: {error}", "give a TOML or JSON file with devices") from None
    return devices_in(data, str(path))


def devices_in(data: Any, source: str) -> NamedDevices:
    """Of such a file's contents, which came from `source`. Raises `LocalError` HP-PLAN-002 naming the device, row or column that is wrong."""
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise wrong(f"{source}: {_where(first['loc'], data)}: {first['msg']}", "correct the entry") from None
    names = tuple(entry.name for entry in file.device)
    if twice := {name for name in names if names.count(name) > 1}:
        raise wrong(f"{source}: two devices are called {min(twice)}", "give each a name of its own")
    up, down = (
        np.array([getattr(entry, name) for entry in file.device]) for name in ("up_mbps", "down_mbps")
    )
    network = Network.of(
        {
            "latency_ms": _square(file.latency_ms, len(names)),
            "bandwidth_gbit_s": file.bandwidth_gbit_s
            if file.bandwidth_gbit_s is not None
            else (np.minimum(up[:, None], down[None, :]) * MEGA / GIGA).tolist(),
        }
    )
    if len(network) != len(names):
        raise wrong(f"{source}: {len(names)} devices, and matrices of {len(network)}", "give a row for each")
    return NamedDevices(
        names,
        Devices(
            flops=np.array([entry.tflops * TERA for entry in file.device]),
            memory=np.array([entry.memory_gib * GIB for entry in file.device]),
            uplink=up * MEGA / BITS,
            latency=network.latency_s,
            bandwidth=network.bandwidth_gbit_s * GIGA / BITS,
        ),
    )


def _square(latency: Any, count: int) -> Any:
    """One number is that of all pairs."""
    if isinstance(latency, int | float) and not isinstance(latency, bool):
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
