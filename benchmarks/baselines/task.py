"""The task that all ways of training get: a run directory's model, data and optimizer, read without
hetpeer's engine.
"""

from __future__ import annotations

import json
import runpy
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import msgpack
import torch
from torch import Tensor, nn

from hetpeer.stages.data.microbatches import DataPlan, MicrobatchReader


class Task:
    """Text, one group of parameters, no dropout."""

    def __init__(self, run: Path) -> None:
        manifest = msgpack.unpackb(msgpack.unpackb((run / "manifest.hetpeer").read_bytes())["manifest"])
        self.training: dict[str, Any] = manifest["training"]
        self.plan = DataPlan.of(manifest)
        self.clip: float = self.training["clip_norm"] or torch.inf
        self._seed: int = manifest["seed"]
        self._data = MicrobatchReader(run / "data", self.plan)
        self._author = json.loads((run / "author.json").read_text())["model"]

    def model(self) -> nn.Module:
        """With the parameters that every way starts from."""
        path, _, function = self._author.rpartition(":")
        torch.manual_seed(self._seed)
        model: nn.Module = runpy.run_path(path)[function]()
        return model

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        settings = self.training
        return torch.optim.AdamW(
            parameters,
            lr=settings["learning_rate"],
            betas=settings["optimizer"]["betas"],
            eps=settings["optimizer"]["eps"],
            weight_decay=settings["weight_decay"],
        )

    def microbatch(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [samples, sequence]."""
        batch = self._data.microbatch(step, number)
        return torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """All microbatches of a step, one after the other."""
        parts = [self.microbatch(step, number) for number in range(self.plan.microbatches)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])

    def evaluation(self, model: nn.Module) -> float:
        """The loss on the held-out microbatches."""
        with torch.no_grad():
            losses = [float(model(*self.microbatch(0, number))) for number in self.plan.evaluation]
            return fmean(losses, self.plan.evaluation_weights.values())


def tell(**figures: Any) -> None:
    """One line for the benchmark that started us."""
    print(json.dumps(figures | {"at": time.monotonic()}), flush=True)
