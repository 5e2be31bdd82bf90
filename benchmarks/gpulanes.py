"""A part of benchmarks.gpu: bundles on a GPU.

The same bytes as on a CPU, how fast they are chosen, and whether lanes overlap.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from hetpeer.stages.block.exact_numerics import first_not_finite, is_finite
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.ipc.block_commands import Encode
from hetpeer.stages.ipc.worker_messages import Command, Done, Encoded, Result
from hetpeer.stages.links.codec import Codec, kept_of, room
from hetpeer.stages.links.top_k import largest
from hetpeer.stages.worker.bundle_codec import Encoder
from hetpeer.stages.worker.tensor_staging import Copier, Staging

ELEMENTS, SHARE = 4 << 20, 0.01
SELECTED, SHARES = (1 << 18, 1 << 20, 4 << 20, 16 << 20), (0.01, 0.1)
PARAMETERS, LOOKED = 200, 1 << 14
"""Gradients that are looked at, and elements of each."""
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
    rows = {"equal bytes": equal, **_selection(device), **_copies(copier, values), **_look(device)}
    rows |= _overlap(device, lambda: encoded(device, "topk-int8"))
    # The bundle lies in the arena: a GPU gets it through the pinned buffers first, and that counts.
    there, here = (seconds(lambda at=at: encoded(at, "topk-int8"), device) for at in (device, CPU))
    rows |= {"encoding_s": there, "encoding on the CPU against it": here / there}
    return rows | {"met": all(equal.values()) and rows["copies are exact"] and rows["selection is met"]}


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


def _selection(device: torch.device) -> dict[str, Any]:
    """Seconds of choosing the largest elements, by tensor and share, and how much longer torch.topk takes,
    which neither orders positions nor decides ties.
    """
    rows = {}
    for elements, share in itertools.product(SELECTED, SHARES):
        values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
        flat, kept = values.to(device), kept_of(elements, share)
        ours = seconds(lambda flat=flat, kept=kept: largest(flat, kept), device)
        topk = seconds(lambda flat=flat, kept=kept: flat.abs().topk(kept, sorted=False), device)
        equal = largest(flat, kept).cpu().equal(largest(values, kept))
        name = f"{share:.0%} of {elements:,}"
        rows[name] = {"seconds": ours, "against topk": topk / ours, "as on the CPU": equal}
    return {
        "selection": rows,
        "selection is met": all(row["against topk"] >= 1 and row["as on the CPU"] for row in rows.values()),
    }


def _look(device: torch.device) -> dict[str, float]:
    """One look at the gradients of a block with many parameters, and how much longer one after the other
    takes.
    """
    gradients = [torch.ones(LOOKED, device=device) for _ in range(PARAMETERS)]
    ours = seconds(lambda: first_not_finite(gradients), device)
    apart = seconds(lambda: [is_finite(gradient) for gradient in gradients], device)
    return {"look_s": ours, "looks one by one against it": apart / ours}


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
