"""The oracle: the same run on one machine, by the author's eager module and torch's own AdamW and clipping.

It shares nothing with the engine but the data order: no graph, no blocks, no slots, no update rule of ours. Whatever
the swarm did must equal what comes out here. `python -m hetpeer.bootstrap.reference DIR --out FILE.json`
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor, nn

from hetpeer.bootstrap.author import build_model
from hetpeer.bootstrap.rundir import RunDirectory
from hetpeer.dht.errors import HetpeerError
from hetpeer.stages.data.order import Stream, sample_offsets


def train(run: RunDirectory, steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Train for `steps` steps; returns the records and the final state.

    Records: mean training loss and 2-norm of the gradient before clipping of each step, and the mean held-out loss
    by the number of updates before it. State: parameters and moments under the names of a block's state file.
    """
    settings, length = run.manifest.training, run.manifest.data.sequence_length
    shards = {"train": run.manifest.data.train, "evaluation": run.manifest.data.heldout}
    texts = {s: np.concatenate([load_file(run.data / f.name)["tokens"] for f in shards[s]]) for s in shards}
    model = build_model(run.author().model, run.manifest.seed).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )

    def loss_of(stream: Stream, step: int, microbatch: int) -> Tensor:
        count, population = settings.microbatch_size, len(texts[stream]) - length
        offsets = sample_offsets(run.manifest.seed, stream, step, microbatch, count, population)
        windows = torch.tensor(np.stack([texts[stream][at : at + length + 1] for at in offsets])).long()
        loss: Tensor = model(tokens=windows[:, :-1], targets=windows[:, 1:])
        return loss

    losses, norms, evaluations = [], [], {}
    for step in range(steps + 1):
        if step % settings.eval_every == 0 or step == steps:
            with torch.no_grad():
                held_out = [loss_of("evaluation", step, m).item() for m in range(settings.eval_microbatches)]
            evaluations[step] = statistics.fmean(held_out)
        if step < steps:
            optimizer.zero_grad()
            parts: list[float] = []
            for microbatch in range(settings.microbatches):
                loss = loss_of("train", step, microbatch)
                (loss / settings.microbatches).backward()  # type: ignore[no-untyped-call]
                parts.append(loss.item())
            losses.append(statistics.fmean(parts))
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or torch.inf).item())
            optimizer.step()

    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})
        state |= {f"{key}:{name}": moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments}
    return {"losses": losses, "norms": norms, "evaluations": evaluations}, state


def main() -> None:
    parser = argparse.ArgumentParser(description="train a run on one machine, with nothing but torch")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="records as JSON; the state goes beside it")
    parser.add_argument("--steps", type=int, help="train only so many steps")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        run = RunDirectory.open(arguments.directory)
        steps = run.manifest.training.steps if arguments.steps is None else arguments.steps
        records, state = train(run, steps)
    except HetpeerError as error:
        sys.exit(error.line())
    save_file(state, arguments.out.with_suffix(".safetensors"))
    arguments.out.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
