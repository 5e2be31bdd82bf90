"""Eager training by torch alone: `python -m tests.reference.eager_training DIR OUT.json [0,…] {"p":0,…}`."""

import functools
import inspect
import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from hetpeer.bootstrap.model_checks.drawn_dropout import DrawnDropout
from hetpeer.stages.data.microbatches import DataPlan, MicrobatchReader
from hetpeer.stages.operators.random_draws import Draw
from tests.reference.delayed_parameters import DelayedParameters
from tests.reference.torch_optimizer import clip_gradients, optimizer_of


def train(directory: Path, behind: list[int], most: dict[str, int]) -> tuple[Any, dict[str, Tensor]]:
    """Losses, norms, held-out losses; final state. `behind`: staleness of steps; `most`: of parameters."""
    manifest = msgpack.unpackb(msgpack.unpackb((directory / "manifest.hetpeer").read_bytes())["manifest"])
    settings, plan = manifest["training"], DataPlan.of(manifest)
    if file := manifest["data"].get("weights"):
        plan = replace(plan, weights=np.fromfile(directory / "data" / file["name"], "<f4"))
    data, clip = MicrobatchReader(directory / "data", plan), settings["clip_norm"] or torch.inf
    author, run = json.loads((directory / "author.json").read_text()), functools.cache(runpy.run_path)
    names = [author[part].rpartition(":") for part in ("model", "loss") if author[part]]
    sys.path[:0] = [str(Path(module).parent) for module, _, _ in names]
    build, *outside = [run(module)[name] for module, _, name in names]
    torch.manual_seed(manifest["seed"])
    model = build()
    optimizer, rate = optimizer_of(model, settings)
    named, steps = inspect.signature(model.forward).parameters, len(behind)

    def loss_of(step: int, number: int) -> Tensor:
        batch = {name: torch.from_numpy(array) for name, array in data.microbatch(step, number).items()}
        outputs = model(**{name: tensor for name, tensor in batch.items() if name in named})
        loss = outside[0](outputs, batch) if outside else getattr(outputs, "loss", outputs)
        return loss if isinstance(loss, Tensor) else loss["loss" if isinstance(loss, dict) else 0]

    delayed = DelayedParameters(model, behind, settings.get("head_start"), most)
    losses, norms, evaluations = [], [], {}
    held_out = {number: weight for number, weight in plan.evaluation_weights.items() if weight}
    for step in range(steps + 1):
        if step % settings["eval_every"] == 0 or step == steps:
            model.eval()
            with torch.no_grad():
                evaluations[step] = fmean([loss_of(step, i).item() for i in held_out], held_out.values())
        if step < steps:
            model.train().zero_grad()
            parts, weights = {}, plan.training_weights(step)
            for number, weight in enumerate(weights):
                delayed.back(behind[step], number)
                with DrawnDropout(Draw(manifest["seed"], step, number, plan.microbatches)):
                    parts[number] = loss_of(step, number) if weight else torch.zeros((), requires_grad=True)
                    torch.autograd.backward(parts[number] * (weight / sum(weights)))
            losses.append(fmean([part.item() for part in parts.values()], weights))
            norms.append(clip_gradients(model, clip).item())
            delayed.forth(settings.get("compensation", 0.0))
            optimizer.step()
            rate.step()
    state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    for name, parameter in model.named_parameters():
        state |= {f"{k}:{name}": v for k, v in optimizer.state.get(parameter, {}).items() if k != "step"}
    return {"losses": losses, "norms": norms, "evaluations": evaluations}, state


if __name__ == "__main__":
    torch.set_num_threads(2)
    (records, final), out = train(Path(sys.argv[1]), *map(json.loads, sys.argv[3:])), Path(sys.argv[2])
    save_file(final, out.with_suffix(".safetensors"))
    out.write_text(json.dumps(records))
