"""Scenario files for `hetpeer simulate`: devices, a model, churn and stragglers.

model = "gpt2"                   # a run directory, or a size that `hetpeer plan` knows
microbatches = 32
steps = 20
devices = "swarm.toml"           # beside this file, as for `hetpeer plan --devices`; or [[device]] here
plan = "search"                  # or "equal": equal parts in the order of the file, `stages` to a pipeline
ratio = 100.0                    # highest ratio of the codec for activations and their gradients
dtype = "bf16"                   # of a size: weights and gradients on the device in 2 bytes
recompute = true                 # of a size: no activations are kept inside a stage

[churn]                          # each volunteer vanishes after a time of its own, and comes back;
mtbf_minutes = 20                # or the devices' own leaves_per_hour and away_s, which the plan weighs
away_s = 60

[stragglers]                     # after a step a volunteer's worker does nothing for a while
chance = 0.1
sleep_s = 0.6
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import first_wrong
from hetpeer.peer.planning.device_files import LONGEST_AWAY_S, NamedDevices, devices_in, read_devices
from hetpeer.peer.planning.model_workload import PRESETS, USUAL, PresetChoices, work_of
from hetpeer.stages.planning.swarms.plan_inputs import StepDemand

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MOST_MINUTES = 1e6
"""Most minutes between two departures of a volunteer."""
_OF_DEVICES = ("device", "front", "latency_ms", "bandwidth_gbit_s", "between_s", "away_s")


class _ScenarioEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Churn(_ScenarioEntry):
    """Churn: each volunteer vanishes and comes back."""

    mtbf_minutes: Annotated[float, Field(gt=0, le=MOST_MINUTES)]
    away_s: Annotated[float, Field(gt=0, le=LONGEST_AWAY_S)] = 60.0


class Stragglers(_ScenarioEntry):
    """Stragglers: after a step a worker stands still, with this chance."""

    chance: Annotated[float, Field(ge=0, le=1)]
    sleep_s: Positive


class _ScenarioFile(_ScenarioEntry):
    model: str
    microbatches: Annotated[int, Field(ge=1, le=4096)] | None = None
    steps: Annotated[int, Field(ge=3, le=100_000)] = 20
    checkpoint_every: Annotated[int, Field(ge=1)] = 10
    seed: Annotated[int, Field(ge=0)] = 0
    devices: str | None = None
    plan: Literal["search", "equal"] = "search"
    stages: Annotated[int, Field(ge=1)] | None = None
    seconds: Positive = 5.0
    ratio: Annotated[float, Field(ge=1, le=1000)] | None = None
    dtype: Literal["float32", "bf16"] = "float32"
    recompute: bool = False
    churn: Churn | None = None
    stragglers: Stragglers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Contents of a scenario file. `seconds`: processor time that the search for a plan may take."""

    devices: NamedDevices
    work: StepDemand
    model: str
    steps: int
    checkpoint_every: int
    seed: int
    equal_stages: int | None
    """Stages of a pipeline that is cut into equal parts; None: a plan is searched."""
    seconds: float
    churn: Churn | None
    stragglers: Stragglers | None


def read_scenario(path: Path) -> Scenario:
    """Read a scenario file.

    Raises `LocalError` HP-SIM-001 with the entry that is wrong, HP-SIM-003 for a run of mode `grouped`, and
    the errors of device files and models.
    """
    try:
        data = tomllib.loads(path.read_text())
        own = {name: value for name, value in data.items() if name not in _OF_DEVICES}
        file = _ScenarioFile.model_validate(own)
    except ValidationError as error:
        raise _wrong(path, ": ".join(first_wrong(error))) from None
    except (OSError, ValueError) as error:
        raise _wrong(path, getattr(error, "strerror", None) or str(error)) from None
    devices = _devices(path, file, data)
    if file.churn is not None and devices.devices.departures is not None:
        raise _wrong(path, "churn: the devices say how often they leave; give one of both")
    choices = PresetChoices(bf16=file.dtype == "bf16", recompute=file.recompute)
    if choices != USUAL and file.model not in PRESETS:
        raise _wrong(path, "dtype, recompute: the manifest of a run says them")
    work = replace(
        work_of(file.model, file.microbatches, file.ratio, choices), checkpoint_every=file.checkpoint_every
    )
    if work.averaging is not None:
        raise LocalError(
            "HP-SIM-003",
            f"{file.model} cannot be simulated",
            why="its pipelines train batches of their own and average (mode grouped),"
            " and only runs of mode exact are simulated",
            fix="ask `hetpeer plan --devices` what a batch takes, or name a run of mode exact",
            exit_code=ExitCode.CONFIG,
        )
    if file.plan == "equal":
        most = min(len(devices.names), len(work))
        if file.stages is None or file.stages > most:
            raise _wrong(path, f'stages: with plan = "equal" it must be 1 to {most}')
    return Scenario(
        devices=devices,
        work=work,
        model=file.model,
        steps=file.steps,
        checkpoint_every=file.checkpoint_every,
        seed=file.seed,
        equal_stages=file.stages if file.plan == "equal" else None,
        seconds=file.seconds,
        churn=file.churn,
        stragglers=file.stragglers,
    )


def _devices(path: Path, file: _ScenarioFile, data: dict[str, Any]) -> NamedDevices:
    given = {name: data[name] for name in _OF_DEVICES if name in data}
    if file.devices is not None and given and "device" not in given:
        raise _wrong(path, f"{min(given)}: the devices are in {file.devices}; give it there")
    if (file.devices is None) == (not given):
        raise _wrong(path, "devices: give the name of a file, or [[device]] tables, one of both")
    return devices_in(given, str(path)) if file.devices is None else read_devices(path.parent / file.devices)


def _wrong(path: Path, why: str) -> LocalError:
    return LocalError(
        "HP-SIM-001",
        f"{path} is not a scenario",
        why=why,
        fix="correct the entry (docs/planning.md has an example)",
        exit_code=ExitCode.CONFIG,
    )
