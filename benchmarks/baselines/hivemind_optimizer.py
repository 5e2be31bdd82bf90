"""hivemind.Optimizer: each peer has the whole model, gradients are averaged once the swarm has seen a batch.

Peer 0 is the first of the DHT. `python -m benchmarks.baselines.hivemind_optimizer RUN STEPS EVERY PEER PEERS
ADDRESS [FIRST]`
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.baselines.meeting import everybody_is_there
from benchmarks.baselines.task import Task, tell

MATCHMAKING_S, REQUEST_S = 3.0, 1.0
TIMEOUT_S = 120.0


def main() -> None:
    import hivemind

    run, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    peer, peers, address = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    task = Task(run)
    model = task.model()
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=sys.argv[7:], start=True, use_auto_relay=False
    )
    if not peer:
        print(next(str(a) for a in dht.get_visible_maddrs() if "/p2p/" in str(a)), flush=True)
    samples = task.training["microbatch_size"]
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="benchmark",
        target_batch_size=task.training["batch_size"],
        batch_size_per_step=samples,
        params=model.parameters(),
        optimizer=task.optimizer,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=TIMEOUT_S,
        delay_state_averaging=False,
        averager_opts={"request_timeout": REQUEST_S},
    )
    everybody_is_there(dht, "ready", peer, peers, TIMEOUT_S)  # or the first would train alone
    tell(begun=True)
    snapshots = {}
    number, before = peer, optimizer.local_epoch
    while optimizer.local_epoch < steps:
        tokens, targets = task.microbatch(number // task.plan.microbatches, number % task.plan.microbatches)
        number += peers
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        if optimizer.local_epoch != before:
            before = optimizer.local_epoch
            tell(step=before, train=loss.item())
            if before % every == 0 or before >= steps:
                snapshots[before] = time.monotonic(), copy.deepcopy(model.state_dict())
    if not peer:
        for step, (at, state) in snapshots.items():
            model.load_state_dict(state)
            print(f'{{"step": {step}, "loss": {task.evaluation(model)}, "at": {at}}}', flush=True)
    tell(over=True)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
