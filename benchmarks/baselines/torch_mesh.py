"""A Megatron-like mesh in torch: 1F1B pipelines over gloo, and an all-reduce over the processes that have
the same stage.

Rank r is stage r mod STAGES of pipeline r div STAGES. `python -m benchmarks.baselines.torch_mesh RUN STEPS
RANK RANKS STAGES ADDRESS INTERFACE`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.baselines.task import Task, tell
from benchmarks.baselines.torch_pipeline import PORT, Part, clip, cross_entropy


def main() -> None:
    run, steps = Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks, stages = map(int, sys.argv[3:6])
    os.environ |= {"MASTER_ADDR": sys.argv[6], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": sys.argv[7]}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    replicas = ranks // stages
    mesh = init_device_mesh("cpu", (replicas, stages), mesh_dim_names=("data", "pipeline"))
    pipeline, data = mesh["pipeline"].get_group(), mesh["data"].get_group()
    replica, number = rank // stages, rank % stages
    task = Task(run)
    each = task.plan.microbatches // replicas
    part = Part(task.model(), number, stages)
    parameters = list(part.parameters())
    optimizer = task.optimizer(parameters)
    stage = PipelineStage(part, number, stages, torch.device("cpu"), group=pipeline)
    schedule = Schedule1F1B(stage, each, loss_fn=cross_entropy)

    def mine(step: int) -> tuple[Tensor, Tensor]:
        """The microbatches of this pipeline."""
        parts = [task.microbatch(step, replica * each + n) for n in range(each)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])

    dist.barrier()
    if part.ends and not replica:
        tell(begun=True)
    for step in range(steps):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if part.embeds:
            schedule.step(mine(step)[0], return_outputs=False)
        elif part.ends:
            schedule.step(target=mine(step)[1], losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        dist.all_reduce(flat, group=data)
        _spread(flat.div_(replicas), parameters)
        clip(parameters, task.clip, pipeline)
        optimizer.step()
        if part.ends:
            loss = torch.stack(losses).detach().mean()
            dist.all_reduce(loss, group=data)
            if not replica:
                tell(step=step + 1, train=loss.item() / replicas)
    dist.barrier()
    dist.destroy_process_group()


def _spread(flat: Tensor, parameters: list[Tensor]) -> None:
    begin = 0
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.copy_(flat[begin : begin + parameter.numel()].view_as(parameter))
            begin += parameter.numel()


if __name__ == "__main__":
    main()
