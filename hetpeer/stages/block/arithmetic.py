"""A text on all that decides the last bits of a worker's numbers: processor, cache, vector width, threads, …

The same operator on the same tensors gives equal bits on machines with equal texts here, if it computes on a
processor. A GPU's kernels may add in another order each time, so its text never equals a processor's.
Seen with torch 2.13.0 on a CPU: silu, gelu, mish, softplus and elu give *one number* different last bits by
its place in a tensor and the number of threads, and matrix products depend on shape and threads. oneDNN cuts
products into pieces that fit the cache, and a virtual machine may show less cache than its processor has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPUINFO = Path("/proc/cpuinfo")
FIELDS = ("model name", "cpu family", "model", "stepping", "cache size")
CHOOSING = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Environment variables by which torch's libraries choose other kernels."""
LENGTH = 200


def arithmetic_of(device: torch.device) -> str:
    """The text for `device` of this process, at most LENGTH characters: `AMD EPYC 25 1 1 512 KB, …`."""
    import torch

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"[:LENGTH]
    threads = torch.get_num_threads()
    kernels = [torch.backends.cpu.get_cpu_capability(), f"{threads} thread{'s' if threads > 1 else ''}"]
    if not torch._C._get_mkldnn_enabled():  # noqa: SLF001 - the public attribute has no type
        kernels.append("no oneDNN")
    kernels += [f"{name}={os.environ[name]}" for name in CHOOSING if name in os.environ]
    return ", ".join([_processor(), *kernels, f"torch {torch.__version__}"])[:LENGTH]


def _processor() -> str:
    """Model, stepping and cache of the first processor; the architecture where the kernel does not say."""
    known: dict[str, str] = {}
    if CPUINFO.is_file():
        for line in CPUINFO.read_text().split("\n\n", 1)[0].splitlines():
            name, _, value = line.partition(":")
            known[name.strip()] = value.strip()
    return " ".join(known[field] for field in FIELDS if field in known) or os.uname().machine
