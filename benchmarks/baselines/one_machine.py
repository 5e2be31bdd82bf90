"""One process with one thread trains the whole model.

`python -m benchmarks.baselines.one_machine RUN STEPS EVERY`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks.baselines.task import Task, tell


def main() -> None:
    run, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    task = Task(run)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    size = task.training["batch_size"]
    tell(step=0, loss=task.evaluation(model))
    tell(begun=True)
    for step in range(steps):
        optimizer.zero_grad()
        train = 0.0
        for number in range(task.plan.microbatches):
            tokens, targets = task.microbatch(step, number)
            loss = model(tokens, targets) * (len(tokens) / size)
            loss.backward()
            train += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        tell(step=step + 1, train=train)
        if (step + 1) % every == 0:
            tell(step=step + 1, loss=task.evaluation(model))
            tell(begun=True)


if __name__ == "__main__":
    main()
