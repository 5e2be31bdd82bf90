"""Cost of a tensor on a link: selection, bytes, and end to end, beside FusionLLM's way and plain torch.

FusionLLM (arXiv 2410.12707) sends `torch.topk` of the magnitudes as float32 values with int64 positions, 12
bytes an element. Everything runs on one thread of one process, the alternatives take turns, and figures are
medians. "End to end" is select + encode + bytes over bandwidth + decode; the line is arithmetic, its delay is
the same for all.

    python -m benchmarks.compression
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from hetpeer.stages.links.codec import Codec, EncodedTensor, kept_of, room
from hetpeer.stages.links.tensor_codecs import decode, encode
from hetpeer.stages.links.top_k import largest

MIB = 1 << 20
SIZES = (4, 16)
SHARES = (0.01, 0.1)
LINES = {10: 5.0, 100: 5.0, 1000: 4.0}
"""Mbit/s -> how many times faster than FusionLLM's way 16 MiB are to be."""
BYTES = {("topk-int8", 0.1): 1.7, ("topk-int8", 0.01): 2.1, ("topk-bf16", 0.1): 2.7, ("topk-bf16", 0.01): 3.1}
SELECTION = 5.0
SQUEEZE_BELOW = 500
"""Mbit/s; on a faster line zstd takes longer than it saves."""


def activations(mib: int) -> Tensor:
    """Channels of different scale, as a transformer's hidden states have them."""
    scales = torch.randn(1024).mul(0.8).exp()
    return (torch.randn(mib * MIB // 4 // 1024, 1024) * scales).flatten()


def turns(rounds: int, contest: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, one after the other in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        for name, run in contest.items():
            began = time.perf_counter()
            run()
            if number:  # the first round wakes everything up
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def fusion_encode(flat: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    positions = flat.abs().topk(kept, sorted=False).indices
    return flat[positions], positions


def fusion_decode(count: int, values: Tensor, positions: Tensor) -> Tensor:
    out = torch.zeros(count)
    out[positions] = values
    return out


class Ours:
    """One codec on one tensor, with its memory."""

    def __init__(self, name: str, flat: Tensor, kept: int, *, squeeze: bool) -> None:
        self._codec = Codec.of(name)
        self._flat, self._kept, self._squeeze = flat, kept, squeeze
        self._target = memoryview(bytearray(room(self._codec, "float32", len(flat), kept)))
        self._out = torch.empty_like(flat)
        self.written, self.size = EncodedTensor(0), 0
        self.encode()

    def encode(self) -> None:
        self.written, self.size = encode(
            self._codec, self._flat, self._kept, self._target, squeeze=self._squeeze
        )

    def decode(self) -> None:
        decode(self._codec, self.written, self._target[: self.size], self._out)


def selection(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for mib in SIZES:
        flat = activations(mib)
        for share in SHARES:
            kept = kept_of(len(flat), share)
            found = turns(
                rounds,
                {
                    "topk": lambda flat=flat, kept=kept: flat.abs().topk(kept, sorted=False),
                    "ours": lambda flat=flat, kept=kept: largest(flat, kept),
                },
            )
            rows.append({"mib": mib, "share": share, **found, "faster": found["topk"] / found["ours"]})
    return rows


def end_to_end(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for mib in SIZES:
        flat = activations(mib)
        for share in SHARES:
            kept = kept_of(len(flat), share)
            theirs = fusion_encode(flat, kept)
            ours = {
                (name, squeeze): Ours(name, flat, kept, squeeze=squeeze)
                for name in ("topk-int8", "topk-bf16")
                for squeeze in (True, False)
            }
            contest: dict[str, Callable[[], Any]] = {
                "fusion encode": lambda flat=flat, kept=kept: fusion_encode(flat, kept),
                "fusion decode": lambda flat=flat, theirs=theirs: fusion_decode(len(flat), *theirs),
            }
            for (name, squeeze), one in ours.items():
                contest[f"{name} {squeeze} encode"] = one.encode
                contest[f"{name} {squeeze} decode"] = one.decode
            found = turns(rounds, contest)
            for mbps in LINES:
                line = mbps * 125_000
                fusion = found["fusion encode"] + 12 * kept / line + found["fusion decode"]
                squeeze = mbps < SQUEEZE_BELOW
                row: dict[str, Any] = {"mib": mib, "share": share, "mbps": mbps, "fusion_s": fusion}
                for name in ("topk-int8", "topk-bf16"):
                    work = found[f"{name} {squeeze} encode"] + found[f"{name} {squeeze} decode"]
                    total = work + ours[name, squeeze].size / line
                    row[name] = {
                        "s": total,
                        "faster": fusion / total,
                        "bytes": ours[name, squeeze].size / kept,
                    }
                rows.append(row)
    return rows


def dense(rounds: int) -> list[dict[str, Any]]:
    flat = activations(16)
    rows = []
    for name in ("none", "bf16", "fp16", "int8"):
        one = Ours(name, flat, len(flat), squeeze=False)
        found = turns(rounds, {"encode": one.encode, "decode": one.decode})
        error = float((one._out - flat).norm() / flat.norm())
        gigabytes = flat.nbytes / 1e9
        rows.append(
            {
                "codec": name,
                "encode_gb_s": gigabytes / found["encode"],
                "decode_gb_s": gigabytes / found["decode"],
                "bytes": one.size / len(flat),
                "error": error,
            }
        )
    return rows


def judged(figures: dict[str, Any]) -> dict[str, bool]:
    rows = figures["end_to_end"]
    return {
        "selection": all(row["faster"] >= SELECTION for row in figures["selection"] if row["mib"] == 16),
        "bytes": all(
            row[name]["bytes"] <= BYTES[name, row["share"]]
            for row in rows
            for name in ("topk-int8", "topk-bf16")
            if row["mbps"] < SQUEEZE_BELOW
        ),
        "end to end": all(
            row["topk-int8"]["faster"] >= LINES[row["mbps"]] for row in rows if row["mib"] == 16
        ),
    }


def show(figures: dict[str, Any]) -> None:
    for row in figures["selection"]:
        print(
            f"select {row['share']:4.0%} of {row['mib']:2d} MiB: torch.topk {row['topk'] * 1e3:6.1f} ms, "
            f"ours {row['ours'] * 1e3:5.1f} ms, {row['faster']:.1f} times faster"
        )
    for row in figures["end_to_end"]:
        ways = ", ".join(
            f"{name} {row[name]['s'] * 1e3:.1f} ms ({row[name]['faster']:.1f} times faster, "
            f"{row[name]['bytes']:.2f} B)"
            for name in ("topk-int8", "topk-bf16")
        )
        print(
            f"{row['mib']:2d} MiB, {row['share']:4.0%}, {row['mbps']:4d} Mbit/s: FusionLLM "
            f"{row['fusion_s'] * 1e3:.0f} ms, {ways}"
        )
    for row in figures["dense"]:
        print(
            f"{row['codec']}: {row['bytes']:.3f} B an element, encode {row['encode_gb_s']:.2f} GB/s, "
            f"decode {row['decode_gb_s']:.2f} GB/s, relative error {row['error']:.1e}"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    figures: dict[str, Any] = {
        "rounds": options.rounds,
        "selection": selection(options.rounds),
        "end_to_end": end_to_end(options.rounds),
        "dense": dense(options.rounds),
    }
    figures["goals"] = judged(figures)
    figures["met"] = all(figures["goals"].values())
    return report.finish("compression", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
