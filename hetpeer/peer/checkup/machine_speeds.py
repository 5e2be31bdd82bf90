"""Speeds of a machine: matrix products as a volunteer measures them, memory, disk, loopback network.

A few tenths of a second each. The best measurement counts; for the disk the synced bytes.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.peer.checkup.local_checks import nearest
from hetpeer.peer.limits.amounts import bytes_text, flops_text
from hetpeer.stages.block import device as devices

if TYPE_CHECKING:
    import torch

SCHEMA = "hetpeer.bench/1"
MEASURE_S = 0.25
COPY_BYTES = 256 << 20
"""More than any processor's cache."""
DISK_S, DISK_BYTES = 0.5, 256 << 20
PIECE_BYTES = 1 << 20
DTYPES = ("float32", "bfloat16", "float16")
CONNECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpeed:
    """A speed. `per_second`: FLOP for `product`, otherwise bytes; None if it cannot be measured (`why`)."""

    what: str
    where: str
    dtype: str = ""
    threads: int = 0
    """Processor threads; 0 if not applicable."""
    per_second: float | None = None
    why: str = ""

    def line(self) -> str:
        """`product    cpu          float32    1 thread    97.4 GFLOP/s`."""
        text = flops_text if self.what == "product" else bytes_text
        figure = f"not measured: {self.why}" if self.per_second is None else f"{text(self.per_second)}/s"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{self.what:<10} {self.where:<12} {self.dtype:<10} {threads:<11} {figure}"


def document(machine: devices.HostResources, speeds: list[MeasuredSpeed]) -> dict[str, Any]:
    """The object of `--json`."""
    return {"schema": SCHEMA, "machine": asdict(machine), "speeds": [asdict(speed) for speed in speeds]}


def measure(home: Path, cores: int) -> Iterator[MeasuredSpeed]:
    """Yield speeds as they are measured, a few seconds in all. `home`: disk; `cores`: most threads."""
    import torch

    cpu = torch.device("cpu")
    for threads in sorted({1, cores}):  # one is what a volunteer offers unless told otherwise
        torch.set_num_threads(threads)
        yield from _products(cpu, "cpu", threads)
        yield _tried("copy", "cpu", partial(copied, cpu), threads=threads)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.device("cuda", index)
        yield from _products(gpu, str(gpu), 0)
        yield _tried("copy", str(gpu), partial(copied, gpu))
    yield _tried("write", "disk", lambda: written(nearest(home)))
    yield _tried("send", "loopback", sent)


def copied(device: torch.device) -> float:
    """Bytes/s that its memory reads and writes while one tensor is copied to another."""
    import torch

    source = torch.ones(COPY_BYTES // 4, device=device)
    target, best = torch.empty_like(source), 0.0
    target.copy_(source)  # its pages are there from now on
    deadline = time.perf_counter() + MEASURE_S
    while (begin := time.perf_counter()) < deadline:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * COPY_BYTES / (time.perf_counter() - begin))
    return best


def written(folder: Path) -> float:
    """Bytes/s that are safe on the disk, of a file without a name. Raises OSError."""
    piece, count = os.urandom(PIECE_BYTES), 0
    begin = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while count < DISK_BYTES and time.perf_counter() < begin + DISK_S:
            count += file.write(piece)
        os.fsync(file.fileno())
    return count / (time.perf_counter() - begin)


def sent() -> float:
    """Bytes/s over one TCP connection of this machine with itself. Raises OSError."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = threading.Thread(target=_send, args=(listening.getsockname(),))
        sender.start()
        try:
            listening.settimeout(CONNECT_S)
            receiving, _ = listening.accept()
            with receiving:
                buffer, count = bytearray(PIECE_BYTES), 0
                begin = time.perf_counter()
                while some := receiving.recv_into(buffer):
                    count += some
                return count / (time.perf_counter() - begin)
        finally:
            sender.join()


def _send(address: tuple[str, int]) -> None:
    piece = bytes(PIECE_BYTES)
    with socket.create_connection(address, CONNECT_S) as sending:
        deadline = time.perf_counter() + MEASURE_S
        while time.perf_counter() < deadline:
            sending.sendall(piece)


def _products(device: torch.device, where: str, threads: int) -> Iterator[MeasuredSpeed]:
    import torch

    for name in DTYPES:
        dtype = getattr(torch, name)
        yield _tried(
            "product",
            where,
            partial(devices.measure_flops, device, MEASURE_S, dtype),
            dtype=name,
            threads=threads,
        )


def _tried(
    what: str, where: str, look: Callable[[], float], *, dtype: str = "", threads: int = 0
) -> MeasuredSpeed:
    """The measured speed, or one with the reason why there is none, so that other speeds are still shown."""
    figure, why = None, ""
    try:
        figure = look()
    except (RuntimeError, OSError) as error:  # torch's own, also out of memory; a full or read-only disk
        why = (str(error) or type(error).__name__).splitlines()[0]
    return MeasuredSpeed(what=what, where=where, dtype=dtype, threads=threads, per_second=figure, why=why)
