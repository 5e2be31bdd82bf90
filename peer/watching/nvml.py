"""NVIDIA's management library, asked directly: which GPUs the driver sees, whatever torch was built for, and how busy they are.

A few calls of its C interface (docs.nvidia.com/deploy/nvml-api), so no package is needed. Nothing is set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
MAX_GPUS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What the driver says. `names` of the GPUs; `wrong`: why it says nothing, where there is a driver."""

    driver: str = ""
    names: tuple[str, ...] = ()
    wrong: str = ""


class NvmlError(Exception):
    """The driver does not answer, and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One look at a GPU. `busy`: the share of the last moments in which something ran; memory in bytes, of all its users."""

    name: str
    busy: float
    memory_used: int
    memory_total: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def gpus() -> Gpus:
    """What the driver sees; nothing where there is no driver. Takes some tenths of a second where the driver sleeps."""
    try:
        with _opened() as library:
            if library is None:
                return Gpus()
            driver = ctypes.create_string_buffer(_TEXT_BYTES)
            library.nvmlSystemGetDriverVersion(driver, _TEXT_BYTES)
            names = tuple(_name(library, gpu) for gpu in _all(library))
            return Gpus(driver=driver.value.decode(errors="replace"), names=names)
    except NvmlError as error:
        return Gpus(wrong=f"the NVIDIA driver does not answer: {error}")


def loads() -> list[GpuLoad]:
    """Of each GPU that says so; none where there is no driver, or one that does not answer."""
    try:
        with _opened() as library:
            return [] if library is None else [load for gpu in _all(library) if (load := _load(library, gpu))]
    except NvmlError:
        return []


@contextmanager
def _opened() -> Iterator[ctypes.CDLL | None]:
    """The library, ready to be asked; None where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        yield None
        return
    if status := library.nvmlInit_v2():
        library.nvmlErrorString.restype = ctypes.c_char_p
        said = library.nvmlErrorString(status)
        raise NvmlError(said.decode(errors="replace") if said else f"error {status}")
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _all(library: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    """A handle of each GPU; of one that has fallen off its bus there is none."""
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(min(count.value, MAX_GPUS)):
        gpu = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)) == 0:
            yield gpu


def _name(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> str:
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    library.nvmlDeviceGetName(gpu, name, _TEXT_BYTES)
    return name.value.decode(errors="replace") or "a GPU"


def _load(library: ctypes.CDLL, gpu: ctypes.c_void_p) -> GpuLoad | None:
    memory, busy = _Memory(), _Utilization()
    if library.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)):
        return None
    library.nvmlDeviceGetUtilizationRates(gpu, ctypes.byref(busy))  # some do not know: 0 then
    return GpuLoad(
        name=_name(library, gpu), busy=busy.gpu / 100, memory_used=memory.used, memory_total=memory.total
    )
