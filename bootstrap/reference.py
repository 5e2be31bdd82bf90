"""The oracle: the same run on one machine, by the author's eager module and torch's own AdamW and clipping.

It shares nothing with the engine but the data order: no graph, no blocks, no slots, no update rule of ours. Whatever
the swarm did must equal what comes out here. `python -m hetpeer.bootstrap.reference DIR --out FILE.json --steps N`
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor, nn

from hetpeer.stages.data.order import Stream, sample_offsets


def train(directory: Path, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Losses and gradient norms by step, held-out losses by version, and the final state by its file's names."""
    manifest = msgpack.unpackb(msgpack.unpackb((directory / "manifest.hetpeer").read_bytes())["manifest"])
    settings, length, seed = manifest["training"], manifest["data"]["sequence_length"], manifest["seed"]
    shards = {"train": manifest["data"]["train"], "evaluation": manifest["data"]["heldout"]}
    data = directory / "data"
    texts = {s: np.concatenate([load_file(data / f["name"])["tokens"] for f in shards[s]]) for s in shards}
    module, _, build = json.loads((directory / "author.json").read_text())["model"].rpartition(":")
    sys.path.insert(0, str(Path(module).parent))
    torch.manual_seed(seed)
    model = runpy.run_path(module)[build]().train()
    rule = {"betas": settings["betas"], "eps": settings["epsilon"], "weight_decay": settings["weight_decay"]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], **rule)
    clip, total = settings["clip_norm"] or torch.inf, settings["microbatches"]

    def loss_of(stream: Stream, step: int, number: int) -> Tensor:
        count, population = settings["microbatch_size"], len(texts[stream]) - length
        offsets = sample_offsets(seed, stream, step, number, count, population)
        windows = torch.tensor(np.stack([texts[stream][at : at + length + 1] for at in offsets])).long()
        loss: Tensor = model(tokens=windows[:, :-1], targets=windows[:, 1:])
        return loss

    losses, norms, evaluations = [], [], {}
    for step in range(steps + 1):
        if step % settings["eval_every"] == 0 or step == steps:
            with torch.no_grad():
                held_out = [loss_of("evaluation", step, n) for n in range(settings["eval_microbatches"])]
            evaluations[step] = fmean(loss.item() for loss in held_out)
        if step < steps:
            optimizer.zero_grad()
            parts: list[Tensor] = []
            for number in range(total):
                parts.append(loss_of("train", step, number))
                (parts[-1] / total).backward()
            losses.append(fmean(part.item() for part in parts))
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"{k}:{name}": v for k, v in optimizer.state.get(parameter, {}).items() if k != "step"}
    return {"losses": losses, "norms": norms, "evaluations": evaluations}, state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train a run on one machine, with nothing but torch")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="records as JSON; the state goes beside it")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    records, final = train(arguments.directory, arguments.steps)
    save_file(final, arguments.out.with_suffix(".safetensors"))
    arguments.out.write_text(json.dumps(records))
