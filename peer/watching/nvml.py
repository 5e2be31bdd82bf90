"""NVIDIA's management library: which GPUs the driver sees, whatever torch was built for, how busy and hot they are, and by whom they are used.

Nothing is set, and nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What the driver says. `names` of the GPUs; `wrong`: why it says nothing, where there is a driver."""

    driver: str = ""
    names: tuple[str, ...] = ()
    wrong: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One look at a GPU. `busy`: the share of the last moments in which something ran; memory in bytes, of all its users."""

    name: str
    busy: float
    memory_used: int
    memory_total: int


def gpus() -> Gpus:
    """What the driver sees; nothing where there is no driver. Takes some tenths of a second where the driver sleeps."""
    try:
        with _opened():
            return Gpus(driver=pynvml.nvmlSystemGetDriverVersion(), names=tuple(map(_name, _all())))
    except pynvml.NVMLError as error:
        absent = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return Gpus() if absent else Gpus(wrong=f"the NVIDIA driver does not answer: {error}")


def loads() -> list[GpuLoad]:
    """Of each GPU that says so; none where there is no driver, or one that does not answer."""
    try:
        with _opened():
            return [load for gpu in _all() if (load := _load(gpu))]
    except pynvml.NVMLError:
        return []


class GpuWatch:
    """The machine's GPUs, looked at again and again."""

    def __init__(self) -> None:
        self._gpus: list[Any] = []
        self._seen: dict[int, int] = {}
        """Number of a GPU → time stamp of the last sample of its users, in µs."""
        self._energy: dict[int, tuple[float, int]] = {}
        """Number of a GPU → when its energy was read last, and mJ."""
        try:
            pynvml.nvmlInit()  # and never shut down: as long as the process lives
            self._gpus = list(_all())
        except pynvml.NVMLError as error:
            _log.info("no limits by a GPU's temperature or its other users: %s", error)

    @property
    def there(self) -> bool:
        """Whether there is any."""
        return bool(self._gpus)

    def hottest(self) -> float | None:
        """°C of the hottest."""
        found = []
        for gpu in self._gpus:
            with suppress(pynvml.NVMLError):
                found.append(float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)))
        return max(found, default=None)

    def drawn(self, now: float) -> float | None:
        """W of the one that draws most: its mean since the last look, at `now` in seconds, or of the moment where it counts no energy."""
        found = [self._drawn(number, now) for number in range(len(self._gpus))]
        return max((watts for watts in found if watts is not None), default=None)

    def _drawn(self, number: int, now: float) -> float | None:
        gpu, before = self._gpus[number], self._energy.get(number)
        with suppress(pynvml.NVMLError):  # cards before Volta
            self._energy[number] = now, pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
            if before is not None and before[0] < now and before[1] <= self._energy[number][1]:
                return float(self._energy[number][1] - before[1]) / 1000 / (now - before[0])
        with suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetPowerUsage(gpu)) / 1000
        return None

    def foreign_share(self, is_ours: Callable[[int], bool]) -> float | None:
        """The largest share of one GPU that others have used since the last look; `is_ours` is asked of a process's pid."""
        shares = [self._foreign(number, is_ours) for number in range(len(self._gpus))]
        return max((share for share in shares if share is not None), default=None)

    def _foreign(self, number: int, is_ours: Callable[[int], bool]) -> float | None:
        before = self._seen.get(number, 0)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._gpus[number], before)
        except pynvml.NVMLError as error:
            return (
                0.0 if error.value == pynvml.NVML_ERROR_NOT_FOUND else None
            )  # nobody has used it; or it does not tell
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


def _load(gpu: Any) -> GpuLoad | None:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    except pynvml.NVMLError:
        return None
    busy = 0.0
    with suppress(pynvml.NVMLError):  # some do not know
        busy = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    return GpuLoad(name=_name(gpu), busy=busy, memory_used=memory.used, memory_total=memory.total)
