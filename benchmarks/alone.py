"""The opponent: a run's own model, microbatches and optimizer in one process, with nothing but torch.

`python -m benchmarks.alone RUN --threads N` trains, and prints the monotonic time at the end of each
step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.run.run_directory import RunDirectory


def train(run: RunDirectory) -> None:
    """Train as tests/reference/eager_training.py does, with one line on stdout for each step."""
    settings, batches = run.manifest.training, run.batches()
    model = build_model(run.author().model, run.manifest.seed).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.optimizer.betas,
        eps=settings.optimizer.eps,
        weight_decay=settings.weight_decay,
    )

    def loss_of(step: int, microbatch: int) -> Tensor:
        batch = {
            name: torch.from_numpy(array) for name, array in batches.microbatch(step, microbatch).items()
        }
        loss: Tensor = model(**batch)
        return loss

    for step in range(settings.steps):
        optimizer.zero_grad()
        for microbatch, size in enumerate(batches.plan.sizes):
            (loss_of(step, microbatch) * (size / settings.batch_size)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or torch.inf)
        optimizer.step()
        print(time.monotonic(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(RunDirectory.open(options.run))


if __name__ == "__main__":
    main()
