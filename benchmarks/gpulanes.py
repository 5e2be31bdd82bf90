"""A part of benchmarks.gpu: bundles on a GPU.

The same bytes as on a CPU, how fast they are chosen, and whether lanes overlap.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.block_commands import Encode
from hetpeer.stages.ipc.worker_messages import Command, Done, Encoded, Result
from hetpeer.stages.links.codec import Codec, kept_of, room
from hetpeer.stages.links.top_k import largest
from hetpeer.stages.worker.bundle_codec import Encoder
from hetpeer.stages.worker.tensor_staging import Copier, Staging

ELEMENTS, SHARE = 4 << 20, 0.01
ROUNDS = 9
CODECS = ("bf16", "int8", "int4", "topk-bf16", "topk-int8", "topk-int4")
CPU = torch.device("cpu")


def measure(device: torch.device) -> dict[str, Any]:
    """Rows of benchmarks.gpu; 16 MiB of float32, one element in a hundred."""
    arena = Arena(1 << 27)
    bundle = arena.allocate(4 * ELEMENTS)
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    torch.frombuffer(arena.memory.view(bundle), dtype=torch.float32).copy_(values)
    copier = Copier.of(device)
    encoders = {
        device: Encoder(Staging(arena.memory, copier)),
        CPU: Encoder(Staging(arena.memory, Copier())),
    }

    def encoded(where: torch.device, name: str) -> tuple[Any, bytes]:
        into = arena.allocate(room(Codec.of(name), "float32", ELEMENTS, kept_of(ELEMENTS, SHARE)))
        command = Encode(codec=name, share=SHARE, tensors=(("float32", bundle),), into=into)
        run = encoders[where].execute
        done = (copier.lane(run) if where == device else run)(command)
        assert isinstance(done, Encoded), done
        data = bytes(arena.memory.view(into)[: done.nbytes])
        arena.release(into)
        return done.written, data

    equal = {name: encoded(device, name) == encoded(CPU, name) for name in CODECS}
    rows = {"equal bytes": equal, **_selection(values.to(device)), **_copies(copier, values)}
    rows |= _overlap(device, lambda: encoded(device, "topk-int8"))
    return rows | {"met": all(equal.values()) and rows["copies are exact"]}


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median, with what is queued on the device."""

    def once() -> float:
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        return time.perf_counter() - began

    once()
    return statistics.median(once() for _ in range(ROUNDS))


def wait(device: torch.device) -> None:
    """Return when what is queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _selection(flat: torch.Tensor) -> dict[str, float]:
    kept = kept_of(ELEMENTS, SHARE)
    ours = seconds(lambda: largest(flat, kept), flat.device)
    topk = seconds(lambda: flat.abs().topk(kept, sorted=False), flat.device)
    return {"selection_s": ours, "selection against topk": topk / ours}


def _copies(copier: Copier, values: torch.Tensor) -> dict[str, Any]:
    """There and back through the pinned buffers, beside the driver's way for pageable memory."""
    back = torch.empty_like(values)

    def there_and_back() -> None:
        copier.down(copier.up(values), back)

    there = copier.up(values)
    ours = seconds(there_and_back, there.device)
    driver = seconds(lambda: back.copy_(values.to(there.device)), there.device)
    there_and_back()
    return {
        "copies are exact": back.equal(values),
        "copy_gbytes_s": 8 * ELEMENTS / ours / 1e9,
        "copies against pageable": driver / ours,
    }


def _overlap(device: torch.device, encode: Callable[[], Any]) -> dict[str, float]:
    """Products in one lane while another encodes, against one after the other: 1 is no overlap, 0.5 all of
    it.
    """
    compute = Copier.of(device)
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, device=device)

    def products(_: Command[Any]) -> Result:
        for _ in range(8):
            torch.mm(matrix, matrix)
        float(torch.mm(matrix, matrix)[0, 0])
        return Done()

    def work() -> None:
        compute.lane(products)(Command())

    def both() -> None:
        beside = threading.Thread(target=work)
        beside.start()
        encode()
        beside.join()

    alone = seconds(work, device) + seconds(encode, device)
    return {"together_over_in_turns": seconds(both, device) / alone}
