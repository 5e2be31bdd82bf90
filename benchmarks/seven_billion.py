"""Seven billion parameters on a machine that cannot hold them: planned, authored, fetched, trained in parts.

The model is transformers' Llama with random weights, 32 layers of width 4,096 without arguments: 27 GB in
float32. `hetpeer init` makes a run of eight stages, in a process that may allocate `--most-memory`. A
reliable peer serves it, and for each stage a volunteer fetches one block (graph, data, initial state) and
trains it for a step in a worker of its own: the embedding, the head, and otherwise the largest. Planned and
measured memory are compared. For the plan of eight volunteers the model is also traced without weights, at
`--planned-context` tokens in bfloat16.

    python -m benchmarks.seven_billion
    python -m benchmarks.seven_billion --layers 2 --width 256 --hidden 512 --heads 4 --stages 2
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.one_block import Volunteer
from benchmarks.swarm import START_S, Site
from hetpeer.bootstrap.authoring.model_costs import inspect_run, plan_model
from hetpeer.bootstrap.run.durable_files import leave_room
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.peer.limits.amounts import share_or_bytes
from hetpeer.peer.process.hetpeer_children import COMMAND, Child, end_all
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Offered, choose, kinds_of

GIB = 1 << 30
HOME_GPU = Offered(device=8 * GIB, host=16 * GIB, disk=64 * GIB, kinds=kinds_of("auto"))
"""A volunteer of the plan."""
NEAR = 0.1
"""Largest accepted excess of measured memory, relative to what was planned."""
PROCESS_BYTES = 160 << 20
"""Bytes that a worker takes besides: libraries that its first block loads, buffers of pieces."""
EVERY_S = 0.2
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

from hetpeer.examples.transformers_models import LanguageModel


def build():
    return LanguageModel(LlamaForCausalLM(LlamaConfig(**{config!r})))
"""


def write_model(folder: Path, options: Any) -> str:
    """The author's file; returns the reference to its function."""
    config = {
        "vocab_size": options.vocabulary,
        "hidden_size": options.width,
        "intermediate_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "max_position_embeddings": max(options.context, options.planned_context),
    }
    path = folder / "model.py"
    path.write_text(MODEL.format(config=config))
    return f"{path}:build"


def planned(model: str, options: Any) -> dict[str, Any]:
    """Each stage at a volunteer with a small GPU, for a run in bfloat16 that recomputes."""
    costs = plan_model(
        model,
        batch=1,
        sequence_length=options.planned_context,
        stages=[options.stages],
        training=TrainingSettings(dtype="bf16", recompute=True),
    )
    stages = []
    for stage in costs.layouts[0]:
        choice = choose(stage.memory.demand, HOME_GPU)
        room = choice.room
        stages.append(
            {
                "blocks": [stage.begin, stage.end],
                "parameters": stage.memory.demand.numbers,
                "offload": choice.kind.value,
                "device_gib": round(room.device / GIB, 2),
                "host_gib": round(room.host / GIB, 2),
                "disk_gib": round(room.disk / GIB, 2),
                "fits": choice.fits,
            }
        )
    return {"parameters": costs.parameters, "context": options.planned_context, "stages": stages}


def author(model: str, folder: Path, options: Any) -> dict[str, Any]:
    """Make the run; seconds, the most memory and the most disk of it."""
    before = shutil.disk_usage(folder).free
    limit = int(share_or_bytes(options.most_memory))
    command = (
        *(*COMMAND, "init", str(folder / "run"), f"--model={model}", "--steps=1", "--batch-size=1"),
        *("--microbatch-size=1", f"--sequence-length={options.context}", f"--stages={options.stages}"),
        *("--eval-every=1", "--eval-samples=1", f"--seed={options.seed}", f"--dtype={options.dtype}"),
        f"--max-samples={options.samples}",
    )
    began = time.perf_counter()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_WAIT_POLICY": "PASSIVE",  # others may compute on this machine, too
    }
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (limit, limit))
    memory, disk = 0, 0
    while process.poll() is None:
        memory = max(memory, _anonymous(process.pid))
        disk = max(disk, before - shutil.disk_usage(folder).free)
        time.sleep(EVERY_S)
    if process.returncode:
        raise SystemExit(f"hetpeer init ended with {process.returncode}")
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "memory_gib": round(memory / GIB, 2),
        "disk_gib": round(disk / GIB, 2),
        "run_gib": round(sum(file.stat().st_size for file in (folder / "run").rglob("*.*")) / GIB, 2),
    }


def _anonymous(pid: int) -> int:
    """Bytes of a process that are not those of files, which the system may drop at any moment."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


async def train(run: RunDirectory, folder: Path, options: Any) -> list[dict[str, Any]]:
    """For each stage a volunteer that fetches and trains one block."""
    vectors = [block.vector_count for block in run.manifest.blocks]
    where = Site().listening(0)
    arguments = ("bootstrap", str(run.path), *where)
    server = await Child.start("bootstrap", arguments, home=run.path, log=folder / "bootstrap.log")
    figures = []
    try:
        address = (await server.next_line(START_S)).split()[-1]
        for number, (begin, end) in enumerate(run.manifest.layouts[0]):
            ends = {0: begin, len(run.manifest.layouts[0]) - 1: end - 1}
            block = ends.get(number, max(range(begin, end), key=vectors.__getitem__))
            home = folder / f"volunteer-{number}"
            async with Volunteer.at(address, home) as volunteer:
                found = await volunteer.train(
                    block, Offload(options.offload), threads=options.threads, seed=options.seed
                )
            shutil.rmtree(home)
            print(f"stage {number + 1}: {found}", file=sys.stderr, flush=True)
            figures.append({"stage": number + 1, **found})
    finally:
        await end_all([server])
    return figures


def measure(folder: Path, options: Any) -> dict[str, Any]:
    """The plan, the run and its blocks."""
    model = write_model(folder, options)
    plan = planned(model, options)
    leave_room(folder, 4 * plan["parameters"] * 3 // 2)
    figures: dict[str, Any] = {"planned": plan, "init": author(model, folder, options)}
    run = RunDirectory.open(folder / "run")
    costs = inspect_run(run.path)
    figures["parameters"], figures["blocks_in_all"] = costs.parameters, len(costs.specs)
    figures["blocks"] = asyncio.run(train(run, folder, options))
    figures["goals"] = {
        "eight volunteers of 8 GiB GPU and 16 GiB of main memory hold it": all(
            stage["fits"] for stage in plan["stages"]
        ),
        "the author's process stayed below the model's size": figures["init"]["memory_gib"] * GIB
        < max(4 * costs.parameters, GIB),
        "the disk never held the parameters twice": figures["init"]["disk_gib"] * GIB
        < max(1.5 * 4 * costs.parameters, GIB),
        "each block began with the signed state and was updated": all(
            one["begun_as_signed"] and one["updated"] for one in figures["blocks"]
        ),
        f"workers took at most {NEAR:.0%} more than planned": all(
            one["worker_bytes"] <= (1 + NEAR) * one["planned_bytes"] + PROCESS_BYTES
            for one in figures["blocks"]
        ),
    }
    return figures | {"met": all(figures["goals"].values())}


def parsed(arguments: list[str] | None = None) -> Any:
    """The options."""
    parser = report.parser(__doc__ or "")
    for name, default in (
        *(("layers", 32), ("width", 4096), ("hidden", 11008), ("heads", 32), ("vocabulary", 32000)),
        *(("stages", 8), ("context", 64), ("planned-context", 1024), ("samples", 64), ("threads", 1)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--offload", default="disk", choices=[kind.value for kind in Offload])
    parser.add_argument("--most-memory", default="14GiB", help="what `hetpeer init` may allocate")
    parser.add_argument("--folder", type=Path, default=None, help="where the run is made, and removed again")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, keep and show the figures."""
    options = parsed()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options)
    sizes = ("layers", "width", "hidden", "heads", "vocabulary", "context", "dtype", "offload", "threads")
    figures["sizes"] = {name: getattr(options, name) for name in sizes}
    return report.finish("seven-billion", figures, options, show)


def show(figures: dict[str, Any]) -> None:
    """The figures in words."""
    plan, made = figures["planned"], figures["init"]
    for number, stage in enumerate(plan["stages"], 1):
        print(
            f"plan of stage {number}: {stage['parameters'] / 1e6:.0f} M parameters, offload "
            f"{stage['offload']}: {stage['device_gib']} GiB of GPU memory, {stage['host_gib']} of main "
            f"memory, {stage['disk_gib']} of disk"
        )
    print(
        f"{figures['parameters'] / 1e9:.2f} G parameters in {figures['blocks_in_all']} blocks: init took "
        f"{made['seconds']:.0f} s, {made['memory_gib']} GiB of memory and {made['disk_gib']} GiB of disk"
    )
    for one in figures["blocks"]:
        print(
            f"stage {one['stage']}, block {one['block']}: {one['parameters'] / 1e6:.0f} M parameters; state "
            f"in {one['state_s']:.1f} s, microbatch {one['microbatch_s']:.1f} s, update "
            f"{one['update_s']:.1f} s; {one['planned_bytes'] / GIB:.2f} GiB planned, "
            f"{one['worker_bytes'] / GIB:.2f} measured, daemon {one['daemon_bytes'] / GIB:.2f}"
        )
    report.show_goals(figures["goals"])


if __name__ == "__main__":
    sys.exit(main())
