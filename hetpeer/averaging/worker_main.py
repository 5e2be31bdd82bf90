"""The compute worker's entry point, where the engine gets its update rule: `python -m
hetpeer.averaging.worker_main`.

`stages` may not import `averaging`, so the two meet here. Torch is imported after the process is tied to its
daemon.
"""

from __future__ import annotations

import os
import socket
import sys

from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import HetpeerError
from hetpeer.stages.ipc.worker_messages import WorkerOptions
from hetpeer.stages.worker.sandbox import confine
from hetpeer.stages.worker.worker_loop import serve, settle_in


def main(arguments: list[str]) -> int:
    """Serve one daemon until the daemon ends. Returns the exit status."""
    options = WorkerOptions.parse(arguments)
    settle_in(options)
    for line in confine():  # before torch has its first threads
        print(f"the compute worker is less confined than it should be: {line}", file=sys.stderr)
    if places := os.environ.get(failpoints.VARIABLE):
        failpoints.arm(places)

    import torch

    from hetpeer.averaging.optim.outer_optimizer import outer_of
    from hetpeer.averaging.optim.update_rules import rule_of
    from hetpeer.dht.base.file_pieces import OpenFile
    from hetpeer.stages.block import device
    from hetpeer.stages.block.parameter_groups import MakeRules
    from hetpeer.stages.ipc.arena import SharedMemory
    from hetpeer.stages.ipc.worker_messages import WorkerLane
    from hetpeer.stages.worker.bundle_codec import Decoder, Encoder
    from hetpeer.stages.worker.engine import Engine
    from hetpeer.stages.worker.executor import Executor
    from hetpeer.stages.worker.holding.scratch_file import ScratchFile
    from hetpeer.stages.worker.state_files import StateFiles
    from hetpeer.stages.worker.tensor_staging import Copier, Staging

    torch.set_num_threads(options.threads)
    # TF32 rounds products to 10 bits: peers' results would differ by 1e-3. Convolutions have it by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        chosen = device.pick(options.device)
    except HetpeerError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # pinned memory would otherwise make a context on the first GPU
        torch.cuda.set_per_process_memory_fraction(options.gpu_memory, chosen)
    memory = SharedMemory(options.arena)
    copiers = {lane: Copier.of(chosen) for lane in WorkerLane}
    compute, send, receive = (Staging(memory, copiers[lane]) for lane in WorkerLane)
    files = StateFiles(OpenFile(options.exchange))
    scratch = ScratchFile(OpenFile(options.scratch), options.scratch_bytes)
    engine = Engine(chosen, compute, files, MakeRules(update=rule_of, outer=outer_of), scratch)
    executors: dict[WorkerLane, Executor] = {
        WorkerLane.SEND: Encoder(send),
        WorkerLane.RECEIVE: Decoder(receive),
        WorkerLane.COMPUTE: engine,  # last: threads that torch starts by itself later are like this one
    }

    def begin(lane: WorkerLane) -> None:
        # torch gives each thread of ours a team of as many threads. Teams of lanes that only code bundles
        # would take the cores from the microbatch that is computed, which waits for its slowest thread.
        torch.get_num_threads()  # the thread would otherwise ask for the process's number later
        coding = lane is not WorkerLane.COMPUTE and chosen.type == "cpu"
        torch.set_num_threads(1 if coding else options.threads)

    lanes = {lane: copiers[lane].lane(executor.execute) for lane, executor in executors.items()}
    with socket.socket(fileno=options.socket) as connection:
        try:
            serve(connection, lanes, begin)
        except torch.AcceleratorError as error:
            print(error, file=sys.stderr, flush=True)
            os.abort()  # the GPU's context is lost, and a worker that ends by a signal is replaced
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
