"""torch.distributed.all_reduce over gloo, as a user would call it on a flat gradient.

`python -m benchmarks.baselines.gloo_allreduce ELEMENTS ROUNDS RANK RANKS ADDRESS INTERFACE`
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.baselines.task import tell

PORT = "29501"


def main() -> None:
    elements, rounds, rank, ranks = map(int, sys.argv[1:5])
    os.environ |= {"MASTER_ADDR": sys.argv[5], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": sys.argv[6]}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for number in range(rounds):
        vector = torch.full((elements,), float(rank + 1))
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(vector)
        tell(
            round=number,
            seconds=time.monotonic() - began,
            right=bool((vector == sum(range(ranks + 1))).all()),
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
