"""hivemind.averaging.DecentralizedAverager on a flat vector: seconds of the all-reduce alone, and of
finding each other.

Peer 0 is the first of the DHT. `python -m benchmarks.baselines.hivemind_averager ELEMENTS ROUNDS PEER PEERS
ADDRESS [FIRST]`
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.baselines.meeting import everybody_is_there
from benchmarks.baselines.task import tell

MATCHMAKING_S, REQUEST_S = 3.0, 1.0
TIMEOUT_S = 300.0
POLL_S = 0.002


def main() -> None:
    import hivemind
    from hivemind.averaging.control import AveragingStage

    elements, rounds, peer, peers = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{sys.argv[5]}/tcp/0"],
        initial_peers=sys.argv[6:],
        start=True,
        use_auto_relay=False,
    )
    if not peer:
        print(next(str(a) for a in dht.get_visible_maddrs() if "/p2p/" in str(a)), flush=True)
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.full((elements,), float(peer + 1))],
        dht=dht,
        prefix="benchmark",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=REQUEST_S,
        allreduce_timeout=TIMEOUT_S,
        sender_timeout=TIMEOUT_S / 4,
        reducer_timeout=TIMEOUT_S / 2,
        start=True,
    )
    for number in range(rounds):
        everybody_is_there(dht, f"ready {number}", peer, peers, TIMEOUT_S)
        with averager.get_tensors() as (vector,):
            vector.fill_(float(peer + 1))
        began = time.monotonic()
        control = averager.step(wait=False, timeout=TIMEOUT_S)
        while control.stage.value < AveragingStage.RUNNING_ALLREDUCE.value and not control.done():
            time.sleep(POLL_S)
        met = time.monotonic()
        control.result(TIMEOUT_S)
        over = time.monotonic()
        with averager.get_tensors() as (vector,):
            right = bool(torch.allclose(vector, torch.full_like(vector, (peers + 1) / 2)))
        tell(round=number, seconds=over - met, matchmaking=met - began, right=right)
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
