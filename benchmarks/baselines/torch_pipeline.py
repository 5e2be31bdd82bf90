"""torch.distributed.pipelining: 1F1B over gloo, a stage in each process, as its tutorial has it.

Rank r is at node r + 1 of the laboratory. `python -m benchmarks.baselines.torch_pipeline RUN STEPS RANK RANKS
ADDRESS INTERFACE`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.baselines.task import Task, tell

PORT = "29500"


class Part(nn.Module):
    """Every `ranks`-th of a GPT's layers; the first part has the embeddings, the last the head."""

    def __init__(self, model: nn.Module, rank: int, ranks: int) -> None:
        super().__init__()
        each = len(model.h) // ranks
        self.embeds = rank == 0
        self.ends = rank == ranks - 1
        if self.embeds:
            self.wte, self.wpe = model.wte, model.wpe
        self.h = nn.ModuleList(model.h[rank * each : (rank + 1) * each])
        if self.ends:
            self.ln_f, self.lm_head = model.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.embeds:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x)) if self.ends else x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def clip(parameters: list[Tensor], most: float, group: Any = None) -> None:
    """By the norm of all stages (those of `group`) together."""
    square = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    dist.all_reduce(square, group=group)
    factor = min(1.0, most / (float(square.sqrt()) + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def main() -> None:
    run, steps = Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks = int(sys.argv[3]), int(sys.argv[4])
    os.environ |= {"MASTER_ADDR": sys.argv[5], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": sys.argv[6]}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    task = Task(run)
    part = Part(task.model(), rank, ranks)
    parameters = list(part.parameters())
    optimizer = task.optimizer(parameters)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, task.plan.microbatches, loss_fn=cross_entropy)
    dist.barrier()
    if part.ends:
        tell(begun=True)
    for step in range(steps):
        optimizer.zero_grad()
        if part.embeds:
            schedule.step(task.batch(step)[0], return_outputs=False)
        elif part.ends:
            losses: list[Tensor] = []
            schedule.step(target=task.batch(step)[1], losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        clip(parameters, task.clip)
        optimizer.step()
        if part.ends:
            tell(step=step + 1, train=torch.stack(losses).detach().mean().item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
