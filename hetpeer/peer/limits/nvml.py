"""NVIDIA's management library (NVML): GPUs that the driver sees, whatever torch supports, their load, heat
and users.

Only reads, and never raises. A driver that hangs blocks its caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from hetpeer.dht.base.errors import ExitCode, LocalError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs by the driver: `names`; `wrong`: why a driver that is there does not answer."""

    driver: str = ""
    names: tuple[str, ...] = ()
    wrong: str = ""

    def unused(self, torch: str) -> LocalError | None:
        """Error HP-GPU-004 if torch of version `torch` cannot use the GPUs; None without GPUs. Pure."""
        if not self.names and not self.wrong:
            return None
        built = "was built without CUDA" if torch.endswith("+cpu") else "finds no device that fits the driver"
        return LocalError(
            "HP-GPU-004",
            f"torch cannot use {', '.join(self.names) or 'the NVIDIA GPU'}",
            why=self.wrong or f"torch {torch} {built} ({self.driver})",
            fix="install torch for CUDA, or a newer driver; until then the processor computes",
            exit_code=ExitCode.NO_DEVICE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """Load of a GPU. `busy`: share of recent time with work; memory in bytes, of all users."""

    name: str
    busy: float
    memory_used: int
    memory_total: int


def gpus() -> Gpus:
    """GPUs that the driver sees; none without a driver. Waking the driver takes some tenths of a second."""
    try:
        with _opened():
            return Gpus(driver=pynvml.nvmlSystemGetDriverVersion(), names=tuple(map(_name, _all())))
    except pynvml.NVMLError as error:
        absent = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return Gpus() if absent else Gpus(wrong=f"the NVIDIA driver does not answer: {error}")


def loads() -> list[GpuLoad]:
    """Load of each GPU that reports it; none without a driver, or with one that does not answer."""
    try:
        with _opened():
            return [load for gpu in _all() if (load := _load(gpu))]
    except pynvml.NVMLError:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of a GPU in use, or that may be. `number`: NVML's index; °C and W, None if not reported."""

    number: int
    load: GpuLoad
    celsius: float | None
    watts: float | None


class GpuWatch:
    """Repeated readings of the GPUs in use (`heed`), or of all; the first look is the first driver access."""

    def __init__(self) -> None:
        self._gpus: list[Any] | None = None
        self._told = False
        """Whether a silent driver was logged."""
        self._uuids: list[str] = []
        self._heeded: tuple[str, ...] | None = None
        self._seen: dict[int, int] = {}
        """Number of a GPU → time stamp of the last sample of its users, in µs."""
        self._energy: dict[int, tuple[float, int]] = {}
        """Number of a GPU → when its energy was read last, and mJ."""
        self._watts: dict[int, tuple[float, float | None]] = {}
        """Number of a GPU → the last look at what it draws, and what that said."""

    def heed(self, uuids: tuple[str, ...] | None) -> None:
        """Watch only the GPUs with these UUIDs; None, or UUIDs of which none is known: any may be in use."""
        if uuids and not {*uuids} <= {*(self._heeded or ()), *self._uuids}:
            self._gpus = None  # it may have come since they were looked at
        self._heeded = uuids

    def states(self, now: float) -> tuple[GpuState, ...]:
        """States of the GPUs in use, or that may be; `now` as in `drawn`."""
        found = ((number, _load(self._handles()[number])) for number in self._used())
        return tuple(
            GpuState(number=number, load=load, celsius=self._celsius(number), watts=self._drawn(number, now))
            for number, load in found
            if load is not None
        )

    def hottest(self) -> float | None:
        """°C."""
        return self._of(self._used(), self._celsius)

    def drawn(self, now: float) -> float | None:
        """Mean watts since the last look, at `now` in seconds; present watts if a GPU counts no energy."""
        return self._of(self._used(), lambda number: self._drawn(number, now))

    def foreign_share(self, is_ours: Callable[[int], bool]) -> float | None:
        """Share of the GPU used by other programs since the last look; of any GPU if none is in use.

        `is_ours` tells for a pid whether the process is ours.
        """
        numbers = self._used() or range(len(self._handles()))
        return self._of(numbers, lambda number: self._foreign(number, is_ours))

    def _handles(self) -> list[Any]:
        """Handles of the GPUs; none if NVML is missing, or (for now) fails."""
        if self._gpus is None:
            try:
                pynvml.nvmlInit()  # and never shut down: as long as the process lives
                found = list(_all())
            except pynvml.NVMLError as error:
                if not self._told:
                    _log.info("no limits by a GPU's temperature or other programs on it: %s", error)
                self._told = True
                if error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                    return []  # the driver may be loaded, or the card be there, by the next look
                found = []
            self._gpus, self._uuids = found, [_uuid(gpu) for gpu in found]
            for known in (self._seen, self._energy, self._watts):
                known.clear()
        return self._gpus

    def _used(self) -> Sequence[int]:
        """Numbers of those that are computed on, or may be."""
        everything = range(len(self._handles()))
        if self._heeded == ():
            return ()
        return [number for number in everything if self._uuids[number] in (self._heeded or ())] or everything

    def _of(self, numbers: Sequence[int], read: Callable[[int], float | None]) -> float | None:
        """The largest value; if it is not known which GPU is in use, the least, which is true in any case."""
        found = [value for number in numbers if (value := read(number)) is not None]
        choose = min if self._heeded is None else max
        return choose(found, default=None)

    def _celsius(self, number: int) -> float | None:
        with suppress(pynvml.NVMLError):
            return float(
                pynvml.nvmlDeviceGetTemperature(self._handles()[number], pynvml.NVML_TEMPERATURE_GPU)
            )
        return None

    def _drawn(self, number: int, now: float) -> float | None:
        at, watts = self._watts.get(number, (None, None))
        if at != now:  # asked twice at one look, it is the same
            watts = self._measured(number, now)
            self._watts[number] = now, watts
        return watts

    def _measured(self, number: int, now: float) -> float | None:
        gpu, before = self._handles()[number], self._energy.get(number)
        with suppress(pynvml.NVMLError):  # cards before Volta
            self._energy[number] = now, pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
            if before is not None and before[0] < now and before[1] <= self._energy[number][1]:
                return float(self._energy[number][1] - before[1]) / 1000 / (now - before[0])
        with suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetPowerUsage(gpu)) / 1000
        return None

    def _foreign(self, number: int, is_ours: Callable[[int], bool]) -> float | None:
        """Share of GPU `number` that others' processes use, 0 to 1; None if the driver does not tell."""
        before = self._seen.get(number, 0)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handles()[number], before)
        except pynvml.NVMLError as error:
            # nobody has used it; or it does not tell
            return 0.0 if error.value == pynvml.NVML_ERROR_NOT_FOUND else None
        self._seen[number] = max((sample.timeStamp for sample in samples), default=before)
        latest = {sample.pid: sample for sample in sorted(samples, key=lambda sample: sample.timeStamp)}
        return float(sum(sample.smUtil for pid, sample in latest.items() if not is_ours(pid))) / 100


@contextmanager
def _opened() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _all() -> Iterator[Any]:
    """A handle of each GPU; of one that has fallen off its bus there is none."""
    for number in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError):
            yield pynvml.nvmlDeviceGetHandleByIndex(number)


def _name(gpu: Any) -> str:
    return pynvml.nvmlDeviceGetName(gpu) or "a GPU"


def _uuid(gpu: Any) -> str:
    """UUID `GPU-…`; empty if the driver tells none."""
    with suppress(pynvml.NVMLError):
        return pynvml.nvmlDeviceGetUUID(gpu) or ""
    return ""


def _load(gpu: Any) -> GpuLoad | None:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    except pynvml.NVMLError:
        return None
    busy = 0.0
    with suppress(pynvml.NVMLError):  # some do not know
        busy = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    return GpuLoad(name=_name(gpu), busy=busy, memory_used=memory.used, memory_total=memory.total)
