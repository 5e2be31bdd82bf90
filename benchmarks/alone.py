"""The opponent: a run's own model, microbatches and optimizer in one process, with nothing but torch.

`python -m benchmarks.alone RUN --threads N` trains. At the end of each step it prints a line of JSON with the
monotonic time, the seconds that the step took, and its loss; with `--held-out`, at last, the held-out loss.

With `--last-first` each step adds up its microbatches from the last to the first. In exact arithmetic that
changes nothing; how far two such processes part is what rounding errors alone become in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.run.run_directory import RunDirectory
from tests.reference.torch_optimizer import clip_gradients, optimizer_of

NAMED = "hf:"


def module(run: RunDirectory) -> nn.Module:
    """The author's module with the parameters that the run starts from."""
    reference = run.author().model
    if not reference.startswith(NAMED):
        return build_model(reference, run.manifest.seed)
    from transformers import AutoModelForCausalLM

    folder = reference.removeprefix(NAMED)
    # With a cache, which is the default, transformers would not keep packed documents apart.
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False)
    return model


def loss_of(model: nn.Module, arrays: dict[str, Any]) -> Tensor:
    """The loss of one microbatch."""
    outputs = model(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    loss: Tensor = getattr(outputs, "loss", outputs)
    return loss


def train(run: RunDirectory, model: nn.Module, last_first: bool = False) -> Iterator[tuple[float, float]]:
    """Seconds and loss of each step. It trains as tests/reference/eager_training.py does."""
    settings, batches, plan = run.manifest.training, run.batches(), run.weighted_plan()
    optimizer, rate = optimizer_of(model, settings.model_dump())
    model.train()
    for step in range(settings.steps):
        began, total = time.perf_counter(), 0.0
        optimizer.zero_grad()
        weights = plan.training_weights(step)
        for microbatch in sorted(range(len(weights)), reverse=last_first):
            share = weights[microbatch] / sum(weights)
            loss = loss_of(model, batches.microbatch(step, microbatch)) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        clip_gradients(model, settings.clip_norm or torch.inf)
        optimizer.step()
        rate.step()
        yield time.perf_counter() - began, total


@torch.no_grad()
def held_out_loss(run: RunDirectory, model: nn.Module) -> float:
    """Mean loss of the samples that an evaluation of the run has."""
    batches, weights = run.batches(), run.weighted_plan().evaluation_weights
    model.eval()
    total = sum(
        float(loss_of(model, batches.microbatch(0, number))) * weight
        for number, weight in weights.items()
        if weight
    )
    return total / sum(weights.values())


def tell(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--stop-after", type=int, help="stop there (SIGSTOP) until SIGCONT comes")
    parser.add_argument("--held-out", action="store_true", help="compute the held-out loss at the end")
    parser.add_argument("--last-first", action="store_true", help="add up microbatches from the last one on")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = RunDirectory.open(options.run)
    model = module(run)
    for step, (seconds, loss) in enumerate(train(run, model, options.last_first), 1):
        tell(ended=time.monotonic(), seconds=seconds, loss=loss)
        if step == options.stop_after:
            os.kill(os.getpid(), signal.SIGSTOP)
    if options.held_out:
        tell(held_out=held_out_loss(run, model))


if __name__ == "__main__":
    main()
