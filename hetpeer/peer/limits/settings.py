"""A volunteer's settings (docs/limits.md): sections, defaults, and the options of `join` for them. Pure.

Amounts stay the texts that people typed; `peer/limits/amounts` reads them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from hetpeer.peer.limits import amounts

WORKER = "hetpeer.averaging.worker_main"
"""The program that computes for a daemon."""
WITH_WORKER = (
    "node.name",
    "compute.device",
    "compute.offload",
    "limits.nice",
    "limits.ram",
    "limits.gpu_memory",
    "limits.disk",
)
AT_START = ("network.host", "network.port", "network.direct_port", "network.lan", "dashboard.listen")


def _read_by(reader: Callable[[str], object]) -> AfterValidator:
    def check(text: str) -> str:
        reader(text)
        return text

    return AfterValidator(check)


def _listed(value: object) -> object:
    """The environment and the command line have commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


MOST_DEVICES = 16


def _devices(text: str) -> str:
    """`text` without spaces. A GPU has one worker at most, as two would take each other's memory."""
    if text in ("auto", "all"):
        return text
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name in ("auto", "all"):
            raise ValueError(f"{name!r} stands alone")
        if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
            raise ValueError(f"{name!r} is none of auto, all, cpu, cuda and cuda:N")
    gpus = [int(name.partition(":")[2] or 0) for name in names if name != "cpu"]
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"{text!r} names a GPU twice")
    if len(names) > MOST_DEVICES:
        raise ValueError(f"{len(names)} devices, and {MOST_DEVICES} are the most")
    return ",".join(names)


Size = Annotated[str, _read_by(amounts.share_or_bytes)]
Rate = Annotated[str, _read_by(amounts.rate)]
Hours = Annotated[str, _read_by(amounts.hours)]
Celsius = Annotated[int, Field(ge=0, le=150)]


@dataclass(frozen=True, slots=True)
class JoinOption:
    """The option of `hetpeer join` that overrides a setting: its name, and its line of the help."""

    name: str
    help: str
    positive: bool = False
    """The option takes numbers from 1 on: the setting's 0 stands for none given."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeSection(_Section):
    name: Annotated[str, Field(max_length=64), JoinOption("--name", "Name that others see.")] = ""


class ComputeSection(_Section):
    threads: Annotated[
        int,
        Field(ge=0, le=1024),
        JoinOption("--threads", "Processor threads of the compute worker.", positive=True),
    ] = 0
    device: Annotated[
        str,
        AfterValidator(_devices),
        JoinOption(
            "--device",
            "Device to compute on: auto, cpu, cuda, cuda:N, several with commas between, or all (GPUs).",
        ),
    ] = "auto"
    offload: Annotated[
        Literal["auto", "none", "host", "disk"],
        JoinOption(
            "--offload",
            "Where to keep what only updates need: auto, none (on the device), host (main memory) or disk.",
        ),
    ] = "auto"


class LimitsSection(_Section):
    cpu: Annotated[
        int,
        Field(ge=0, le=4096),
        JoinOption("--cpu-limit", "Processor cores for all of hetpeer.", positive=True),
    ] = 0
    nice: Annotated[
        int,
        Field(ge=0, le=19),
        JoinOption("--nice", "How much the compute worker gives way to other programs."),
    ] = 10
    ram: Annotated[
        Size, JoinOption("--ram-limit", "Main memory for all of hetpeer: 50% of what is free, or 4GiB.")
    ] = "50%"
    gpu_memory: Annotated[
        str, _read_by(amounts.share), JoinOption("--vram-limit", "Share of the GPU's memory: 80%.")
    ] = "100%"
    disk: Annotated[
        Size,
        JoinOption(
            "--disk-limit",
            "Disk space for data that does not fit into memory: 10% of what is free, or 20GiB.",
        ),
    ] = "10%"
    files: Annotated[
        str,
        _read_by(amounts.size),
        JoinOption("--files-limit", "Disk space for downloaded files of all runs: 50GiB or none."),
    ] = "50GiB"
    up: Annotated[Rate, JoinOption("--up-limit", "Upload: 20mbit, 2MB/s or none.")] = "none"
    down: Annotated[Rate, JoinOption("--down-limit", "Download: as --up-limit.")] = "none"
    transfer_cap: Annotated[
        str,
        _read_by(amounts.volume),
        JoinOption("--transfer-cap", "Bytes sent and received in a month: 300GB or none."),
    ] = "none"
    temperature_c: Annotated[
        Celsius, JoinOption("--temp-limit", "Pause at this temperature of the GPU in °C; 0: no limit.")
    ] = 83
    cpu_temperature_c: Annotated[Celsius, JoinOption("--cpu-temp-limit", "The same for the processor.")] = 0
    gpu_power_w: Annotated[
        int,
        Field(ge=0, le=10_000),
        JoinOption("--power-limit", "Average power of the GPU in watts; 0: no limit."),
    ] = 0


class WhenSection(_Section):
    mode: Annotated[
        Literal["always", "idle", "schedule"],
        JoinOption("--when", "When to compute: always, idle or schedule."),
    ] = "always"
    hours: Annotated[
        tuple[Hours, ...],
        BeforeValidator(_listed),
        JoinOption("--hours", "Hours of --when schedule: 22:00-07:00, several with commas."),
    ] = ()
    idle_after: Annotated[
        str,
        _read_by(amounts.duration),
        JoinOption(
            "--idle-after", "With --when idle: compute after this time without keyboard or pointer: 10m."
        ),
    ] = "10m"
    on_battery: Annotated[
        Literal["pause", "run"], JoinOption("--on-battery", "What to do on battery: pause or run.")
    ] = "pause"
    yield_to_games: Annotated[
        bool, JoinOption("--yield-to-games/--no-yield-to-games", "Pause while another program uses the GPU.")
    ] = True

    @model_validator(mode="after")
    def _a_schedule_has_hours(self) -> Self:
        if self.mode == "schedule" and not self.hours:
            raise ValueError("the mode schedule needs hours, such as 22:00-07:00: set when.hours first")
        return self


class NetworkSection(_Section):
    host: Annotated[str, _read_by(ipaddress.ip_address), JoinOption("--host", "Address to listen on.")] = (
        "0.0.0.0"  # noqa: S104 - other peers must reach us
    )
    port: Annotated[int, Field(ge=0, le=65535), JoinOption("--port", "TCP port to listen on.")] = 0
    direct_port: Annotated[
        int,
        Field(ge=0, le=65535),
        JoinOption("--direct-port", "TCP port for tensors that volunteers send directly."),
    ] = 0
    lan: Annotated[
        bool,
        JoinOption("--lan/--no-lan", "Find a run in the local network if none is given, and be found there."),
    ] = False


class DashboardSection(_Section):
    listen: str = ""


class Settings(_Section):
    """All settings, with their defaults."""

    node: NodeSection = NodeSection()
    compute: ComputeSection = ComputeSection()
    limits: LimitsSection = LimitsSection()
    when: WhenSection = WhenSection()
    network: NetworkSection = NetworkSection()
    dashboard: DashboardSection = DashboardSection()

    @property
    def threads(self) -> int:
        """Number of threads of one operator."""
        return self.compute.threads or self.limits.cpu or 1

    def flat(self) -> dict[str, Any]:
        """`section.key` → value."""
        return {f"{name}.{key}": value for name, section in self for key, value in section}

    def needs_new_worker(self, before: Settings) -> bool:
        """Whether a worker that was started by `before` has to be replaced."""
        return any(_of_worker(self)[key] != value for key, value in _of_worker(before).items())


KEYS = tuple(Settings().flat())


def _of_worker(settings: Settings) -> dict[str, Any]:
    return {key: settings.flat()[key] for key in WITH_WORKER} | {"threads": settings.threads}
