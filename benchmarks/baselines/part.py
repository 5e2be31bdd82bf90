"""One part of a run's model that never waits for another: forward and backward of one microbatch after the
other, and an update after each step's.

The blocks are those that a volunteer has, without its daemon. Prints when each microbatch is done. `python -m
benchmarks.baselines.part RUN BEGIN END`
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from benchmarks.baselines.task import tell
from benchmarks.overhead import CPU, received
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.stages.block.block import run_range
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.tracing.trace import trace


def main() -> None:
    torch.set_num_threads(1)  # as a volunteer's worker
    run = RunDirectory.open(Path(sys.argv[1]))
    begin, end = int(sys.argv[2]), int(sys.argv[3])
    manifest = run.manifest
    count = manifest.training.microbatches
    data = {name: torch.from_numpy(array) for name, array in run.batches().microbatch(0, 0).items()}
    dag = trace(build_model(run.author().model, manifest.seed), data)
    held = [received(pack_block(run.block_spec(block)), dag.tensors, CPU) for block in manifest.blocks[:end]]
    blocks = [block for block, _ in held]
    with torch.no_grad():
        entering = run_range(blocks[:begin], {}, data, dag.batch, _pass(manifest.seed, 0, count))
    parameters = [leaf for _, leaves in held[begin:] for leaf in leaves]
    optimizer = torch.optim.AdamW(parameters, lr=manifest.training.learning_rate)
    for number in itertools.count():
        bundle = {name: value.requires_grad_(value.is_floating_point()) for name, value in entering.items()}
        here = _pass(manifest.seed, number % count, count)
        results = run_range(blocks[begin:], bundle, data, dag.batch, here).values()
        leaving = [result for result in results if result.requires_grad]
        torch.autograd.backward(leaving, [torch.ones_like(result) for result in leaving])
        if number % count == count - 1:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        tell(microbatch=number)


def _pass(seed: int, number: int, of: int) -> Pass:
    return Pass(Draw(seed, 0, number, of))


if __name__ == "__main__":
    main()
