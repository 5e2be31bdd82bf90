"""A volunteer's settings (docs/limits.md), and their merging from several sources. Pure.

Amounts stay the texts that people typed; `peer/limits/amounts` reads them. `parse_where` reads the
address of the web server, without loading it.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import plain_reason
from hetpeer.peer.limits import amounts

PREFIX = "HETPEER_"
SHORT = {"HETPEER_DASHBOARD": "dashboard.listen"}
DEFAULT = "default"
"""Source of a setting that nobody has set."""
COMMAND_LINE = "the command line"
"""Source of a setting that is an option of `join`."""
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
LOOPBACK, DASHBOARD_PORT = "127.0.0.1", 8787
DASHBOARD_OFF = "off"


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

    def changed(self, key: str, value: Any, source: str) -> Settings:
        """Copy of these settings with `key` set to `value`. Raises `LocalError` HP-CONF-003."""
        now = SettingsLayer("", {name: old for name, old in self.flat().items() if name != key})
        return merged([now, SettingsLayer(source, {key: value})]).settings


KEYS = tuple(Settings().flat())


def _of_worker(settings: Settings) -> dict[str, Any]:
    return {key: settings.flat()[key] for key in WITH_WORKER} | {"threads": settings.threads}


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """Settings of one source: `section.key` → value. Later layers override earlier ones."""

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MergedSettings:
    """Settings, and the source of each that is not a default."""

    settings: Settings
    sources: Mapping[str, str]


DEFAULTS = MergedSettings(Settings(), {})


def merged(layers: Sequence[SettingsLayer]) -> MergedSettings:
    """Settings in force from all layers. Raises `LocalError` HP-CONF-003 that names key and source."""
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        for dotted, value in layer.values.items():
            if dotted not in KEYS:
                raise _unknown(dotted, layer.source)
            section, _, key = dotted.partition(".")
            values.setdefault(section, {})[key] = value
            sources[dotted] = layer.source
    try:
        return MergedSettings(Settings.model_validate(values), sources)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"][:2]))
        if "." not in place:  # of a whole section: nothing but a schedule has hours
            place = "when.hours"
        raise wrong_setting(place, sources.get(place, "the default"), plain_reason(first["msg"])) from error


def of_file(tables: Mapping[str, Any], source: str) -> SettingsLayer:
    """The layer of a TOML file."""
    values: dict[str, Any] = {}
    for name, table in tables.items():
        if isinstance(table, Mapping):
            values |= {f"{name}.{key}": value for key, value in table.items()}
        else:
            values[name] = table  # which is no key of ours
    return SettingsLayer(source, values)


def of_environment(environment: Mapping[str, str]) -> Sequence[SettingsLayer]:
    """A layer for each variable `HETPEER_<SECTION>_<KEY>`, also for a misspelt key (`merged` refuses it).

    Other variables with the prefix are ignored; `HETPEER_DASHBOARD` is short for that section's only key.
    """
    layers = []
    # the short one after the long
    for name, text in sorted(environment.items(), key=lambda item: item[0] in SHORT):
        if not name.startswith(PREFIX):
            continue
        section, _, key = name.removeprefix(PREFIX).lower().partition("_")
        dotted = SHORT.get(name, f"{section}.{key}")
        if dotted in KEYS or (key and (section in Settings.model_fields or _near(dotted))):
            layers.append(SettingsLayer(f"the environment's {name}", {dotted: text}))
    return layers


def worded(value: object) -> str:
    """A setting's value as people write it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def wrong_setting(key: str, source: str, why: str) -> LocalError:
    """HP-CONF-003."""
    return LocalError(
        "HP-CONF-003",
        f"the setting {key} of {source} has no valid value",
        why=why,
        fix="correct it; docs/limits.md says what each setting takes",
        exit_code=ExitCode.CONFIG,
    )


def _unknown(dotted: str, source: str) -> LocalError:
    near = _near(dotted, 0.6)
    return LocalError(
        "HP-CONF-003",
        f"the setting {dotted} of {source} does not exist",
        why=f"the nearest name is {near}" if near else "no name is like it",
        fix="correct the name; hetpeer config show lists the settings",
        exit_code=ExitCode.CONFIG,
    )


def _near(dotted: str, alike: float = 0.8) -> str | None:
    """The key that is meant, if one is."""
    return next(iter(difflib.get_close_matches(dotted, KEYS, 1, alike)), None)


@dataclass(frozen=True, slots=True)
class Where:
    """`port` 0: a free one."""

    host: str
    port: int
    or_any: bool = False
    """Whether a free port will do where that one is taken."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine gets there."""
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


def parse_where(text: str) -> Where | None:
    """The address in `[HOST:]PORT`; the default if empty, None for `off`. Raises `LocalError` HP-WEB-002."""
    if text == DASHBOARD_OFF:
        return None
    if not text:
        return Where(LOOPBACK, DASHBOARD_PORT, or_any=True)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16) or not _is_address(host):
        raise no_dashboard_place(text)
    return Where(host, int(port))


def no_dashboard_place(text: str) -> LocalError:
    """HP-WEB-002: no dashboard can be served at `text`."""
    return LocalError(
        "HP-WEB-002",
        f"{text[:80]!r} is not a place for a dashboard",
        why="it must be a port, or an address of this machine and a port",
        fix="--dashboard 8787 or --dashboard 0.0.0.0:8787; --dashboard off for none",
        exit_code=ExitCode.USAGE,
    )


def _is_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
