"""NVIDIA's management library, asked directly: which GPUs the driver sees, whatever torch was built for.

Five calls of its C interface (docs.nvidia.com/deploy/nvml-api), so no package is needed. Nothing is set.
"""

from __future__ import annotations

import ctypes

from hetpeer.peer.checkup.judging import Gpus

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
MAX_GPUS = 64


def gpus() -> Gpus:
    """What the driver sees; nothing where there is no driver. Takes some tenths of a second where the driver sleeps."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Gpus()
    if status := library.nvmlInit_v2():
        return Gpus(wrong=f"the NVIDIA driver does not answer: {_words(library, status)}")
    try:
        driver = ctypes.create_string_buffer(_TEXT_BYTES)
        library.nvmlSystemGetDriverVersion(driver, _TEXT_BYTES)
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        names = tuple(_name(library, index) for index in range(min(count.value, MAX_GPUS)))
    finally:
        library.nvmlShutdown()
    return Gpus(driver=driver.value.decode(errors="replace"), names=names)


def _name(library: ctypes.CDLL, index: int) -> str:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_TEXT_BYTES)
    status = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    if not status:
        status = library.nvmlDeviceGetName(handle, name, _TEXT_BYTES)
    return f"GPU {index} ({_words(library, status)})" if status else name.value.decode(errors="replace")


def _words(library: ctypes.CDLL, status: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    said = library.nvmlErrorString(status)
    return said.decode(errors="replace") if said else f"error {status}"
