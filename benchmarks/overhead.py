"""Cost of running a model as a graph: forward and backward of its blocks against the author's module
itself.

Both are in one process, on one thread, and take turns; the blocks came through bytes, as a volunteer gets
them. Figures are medians of CPU seconds, which other programs on the machine hardly change.

    python -m benchmarks.overhead
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from hetpeer.examples.gpt import GPT
from hetpeer.examples.resnet import ResNet
from hetpeer.stages.block.block import Block, flat_views, run_range, statistic_views
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace

CPU = torch.device("cpu")
GOAL = 1.10
Data = Mapping[str, Tensor]


def text(samples: int, tokens: int, vocabulary: int) -> Data:
    drawn = torch.randint(0, vocabulary, (samples, tokens + 1))
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


def images(samples: int, size: int) -> Data:
    return {"image": torch.randn(samples, 1, size, size), "label": torch.randint(0, 10, (samples,))}


CASES: Mapping[str, Callable[[], tuple[nn.Module, Data]]] = {
    "GPT, width 512, 4 layers, 4 x 128 tokens": lambda: (GPT(512, 4, 8, 128, 1000), text(4, 128, 1000)),
    "GPT, width 512, 4 layers, 1 x 64 tokens": lambda: (GPT(512, 4, 8, 64, 1000), text(1, 64, 1000)),
    "GPT, width 1024, 2 layers, 2 x 128 tokens": lambda: (GPT(1024, 2, 16, 128, 1000), text(2, 128, 1000)),
    "ResNet, widths 64 to 256, 8 x 32 x 32": lambda: (ResNet(64), images(8, 32)),
}


def received(
    packed: bytes, tensors: Mapping[str, Tensor], device: torch.device
) -> tuple[Block, list[Tensor]]:
    """The block as a volunteer has it, and its parameters: views into one flat vector."""
    spec = unpack_block(packed)
    owned = (*spec.parameter_specs, *spec.statistic_specs)
    flat = torch.cat([torch.zeros(0), *(tensors[name].flatten() for name in owned)]).to(device)
    parameters = {name: view.requires_grad_() for name, view in flat_views(spec, flat).items()}
    buffers = {name: tensors[name].to(device) for name in spec.buffer_specs}
    statistics_ = statistic_views(spec, flat[spec.parameter_count :])
    return Block(spec, parameters, buffers, statistics_, flat.device), list(parameters.values())


def opponents(model: nn.Module, data: Data, device: torch.device) -> dict[str, Callable[[], object]]:
    """A forward and backward pass of each."""
    model.train()
    dag = trace(model, data)
    held = [received(pack_block(spec), dag.tensors, device) for spec in cut_blocks(dag)]
    model.to(device)
    data = {name: values.to(device) for name, values in data.items()}
    blocks, leaves = [block for block, _ in held], [leaf for _, leaves in held for leaf in leaves]
    parameters = list(model.parameters())
    here = Draw(seed=0, step=0, microbatch=0, microbatches=1)

    def eager() -> object:
        return torch.autograd.grad(model(**data), parameters)

    def in_blocks() -> object:
        (loss,) = run_range(blocks, {}, data, dag.batch, Pass(here)).values()
        return torch.autograd.grad(loss, leaves)

    return {"eager": eager, "blocks": in_blocks}


def measure(
    rounds: int, contest: Mapping[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each by `clock`, who starts in turn, and the median of the rounds' ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        names = list(contest)[:: 1 if number % 2 else -1]
        for name in names:
            began = clock()
            contest[name]()
            if number:  # the first round wakes everything up
                seconds[name].append(clock() - began)
    ratios = [b / a for a, b in zip(seconds["eager"], seconds["blocks"], strict=True)]
    found = {f"{name}_s": statistics.median(times) for name, times in seconds.items()}
    return {**found, "ratio": round(statistics.median(ratios), 3)}


def show(figures: dict[str, Any]) -> None:
    print(f"goal: {GOAL} and less: {'met' if figures['met'] else 'MISSED'}")


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"goal": GOAL, "rounds": options.rounds, "cases": {}}
    for name, make in CASES.items():
        torch.manual_seed(options.seed)
        found = measure(options.rounds, opponents(*make(), CPU), time.thread_time)
        figures["cases"][name] = found
        if not options.json:
            print(
                f"{name}: eager {found['eager_s']:.3f} s, blocks {found['blocks_s']:.3f} s, ratio "
                f"{found['ratio']:.3f}",
                flush=True,
            )
    figures["met"] = all(case["ratio"] <= GOAL for case in figures["cases"].values())
    return report.finish("overhead", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
