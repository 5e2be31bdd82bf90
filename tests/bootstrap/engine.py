"""A tiny run and a plain trainer for it: the blocks' interpreter, two signing volunteers, torch's AdamW, no
network.

It sums gradients slot by slot, as the swarm does and the reference does not, and writes what the swarm would
leave behind: the coordinator's log, the volunteers' signed logs and a final checkpoint.
"""

import atexit
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors.torch import load_file

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.log.credit import written
from hetpeer.bootstrap.log.record_log import Log, read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.dht.base.runtime import process_folder
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.training.evidence_log import EventLog
from hetpeer.stages.block import block_state, state_file
from hetpeer.stages.block.block import Block, flat_views, run_range
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw

EXAMPLES = Path(__file__).parents[2] / "hetpeer" / "examples"
MODEL = """
from gpt import build as build_gpt

def build():
    return build_gpt(width=32, layers=2, heads=2, context=16)
"""
SLOTS = ((0, 1), (2, 3))
TRAINING = TrainingSettings(
    steps=4, batch_size=8, microbatch_size=2, slot_size=2, eval_every=2, eval_microbatches=2, clip_norm=None
)
DIGITS = f"{EXAMPLES / 'digits.py'}"


def make_author(folder: Path) -> str:
    """A model module with a neighbour and some text; returns the model's reference."""
    folder.mkdir()
    shutil.copy(EXAMPLES / "gpt.py", folder)
    (folder / "tiny.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    return f"{folder / 'tiny.py'}:build"


def make_run(folder: Path) -> RunDirectory:
    """A run in `folder / "run"`, and its author's files beside it."""
    shutil.copytree(_template(), folder, dirs_exist_ok=True)
    return RunDirectory.open(folder / "run")


@cache
def _template() -> Path:
    """A template, made once in a process: tracing takes seconds."""
    made = process_folder("tests")
    atexit.register(made.cleanup)
    folder = Path(made.name)
    model = make_author(folder / "author")
    data = [folder / "author" / "text.txt"]
    create_run(
        folder / "run", model=model, data=data, seed=3, sequence_length=16, stages=[2, 1], training=TRAINING
    )
    return folder


def make_digits_run(folder: Path) -> RunDirectory:
    """Images and a loss outside of the model; the last of a step's four microbatches is smaller."""
    return create_run(
        folder / "digits",
        model=f"{DIGITS}:build",
        loss=f"{DIGITS}:loss",
        data=[f"{DIGITS}:data"],
        seed=3,
        training=TRAINING.model_copy(update={"batch_size": 23, "microbatch_size": 7}),
    )


FROZEN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8).bfloat16().requires_grad_(False)
        self.head = nn.Linear(8, 256)
        self.again = self.head
        self.register_buffer("unused", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, tokens, targets=None):
        logits = self.again(self.embed(tokens).float())
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def make_frozen_run(folder: Path) -> RunDirectory:
    """A run of a model whose constants are in bfloat16, which numpy does not know; a layer has two names."""
    (folder / "frozen.py").write_text(FROZEN)
    (folder / "text.txt").write_text("text " * 1000)
    return create_run(
        folder / "run", model=f"{folder / 'frozen.py'}:Model", data=[folder / "text.txt"], training=TRAINING
    )


COMPLEX = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(16, 4), torch.arange(64.0).view(16, 4)))

    def forward(self, tokens, targets):
        x = torch.view_as_complex(self.embed(tokens).unflatten(-1, (4, 2)))
        logits = self.head(torch.view_as_real(x * self.freqs_cis).flatten(-2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def make_complex_run(folder: Path) -> RunDirectory:
    """A run of a model with a table of complex numbers, as in Meta's reference Llama."""
    (folder / "turned.py").write_text(COMPLEX)
    (folder / "text.txt").write_text("text " * 1000)
    return create_run(
        folder / "run",
        model=f"{folder / 'turned.py'}:Model",
        data=[folder / "text.txt"],
        sequence_length=16,
        training=TRAINING,
    )


def rewrite_log(run: RunDirectory, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the coordinator's log."""
    records = list(read_log(run.log_path))
    change(records)
    run.log_path.unlink()
    log = Log.open(run.log_path)
    for record in records:
        log.append(record)
    log.close()


@dataclass
class Engine:
    """Trains one run of four microbatches a step; every volunteer holds every block."""

    run: RunDirectory
    volunteers: Sequence[Identity]
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.specs = [self.run.block_spec(block) for block in self.run.manifest.blocks]
        self.layouts = self.run.layouts()
        paths = [self.run.state_path(block) for block in self.run.manifest.blocks]
        initial = [state_file.load(path.read_bytes(), b, self.layouts[b], ()) for b, path in enumerate(paths)]
        self.flats = [torch.from_numpy(block.parameters) for block in initial]
        self.views = [flat_views(spec, flat) for spec, flat in zip(self.specs, self.flats, strict=True)]
        for view in (view for views in self.views for view in views.values()):
            view.requires_grad_()
        buffers = [self.run.buffers_path(block) for block in self.run.manifest.blocks]
        constants = [load_file(path) if path is not None else {} for path in buffers]
        self.blocks = [
            Block(spec, views, constant, {}, torch.device("cpu"))
            for spec, views, constant in zip(self.specs, self.views, constants, strict=True)
        ]
        settings = self.run.manifest.training
        self.batches = self.run.batches()
        self.optimizer = torch.optim.AdamW(
            self.flats,
            lr=settings.learning_rate,
            betas=settings.optimizer.betas,
            eps=settings.optimizer.eps,
            weight_decay=settings.weight_decay,
        )

    def train(self) -> None:
        """Train four steps; step 2 is done twice, with a roll-back between."""
        log = Log.open(self.run.log_path)
        log.append({"kind": "reign", "term": 1})
        size_of = self.batches.plan.size_of
        work = {
            v.peer_id: sum(map(size_of, ids)) * len(self.blocks)
            for v, ids in zip(self.volunteers, SLOTS, strict=True)
        }
        numbers: dict[str, int] = {}
        logs = [EventLog(self.run.volunteers / f"{v.peer_id}.jsonl", v) for v in self.volunteers]
        for step, view in ((0, 0), (1, 0), (2, 0), (2, 1), (3, 1)):
            if (step, view) == (2, 1):
                log.append({"kind": "rollback", "term": 1, "view": 1, "to_version": 2, "why": "test"})
            if (step, view) == (2, 0):
                log.append(self.checkpoint(2))
            if step % 2 == 0 and view == 0:
                log.append({"kind": "evaluation", "step": step, "batch": step, "loss": self.evaluate()})
            loss = self.backward(step)
            gradients = [blake3(flat.grad.numpy().tobytes()).hexdigest() for flat in self.flats]
            norm = float(torch.cat([flat.grad for flat in self.flats]).double().norm())
            line = {"term": 1, "view": view, "step": step, "plan": 5}
            log.append(
                {
                    "kind": "commit",
                    **line,
                    "batch": step,
                    "loss": loss,
                    "norm": norm,
                    "coefficient": 1.0,
                    "gradients": dict(enumerate(gradients)),
                    **written(work, numbers),
                }
            )
            numbers = {peer: number for number, peer in enumerate(sorted(work))}
            if (step, view) == (2, 0):  # decided, but the run rolled back before anybody applied it
                continue
            self.optimizer.step()
            digests = [self.state(block, step + 1).digest() for block in range(len(self.blocks))]
            for events in logs:
                self.report(events, line, gradients, digests)
        log.append({"kind": "evaluation", "step": 4, "batch": 4, "loss": self.evaluate()})
        log.append(self.checkpoint(4))
        for opened in (log, *logs):
            opened.close()

    def loss(self, step: int, microbatch: int) -> torch.Tensor:
        plan = self.batches.plan
        arrays = self.batches.microbatch(step, microbatch)
        data = {name: torch.from_numpy(array) for name, array in arrays.items()}
        held_out = microbatch >= plan.microbatches
        draw = None if held_out else Draw(plan.seed, step, microbatch, plan.microbatches)
        out = run_range(self.blocks, {}, data, plan.size_of(microbatch), Pass(draw))
        return out[self.specs[-1].loss]

    @torch.no_grad()
    def evaluate(self) -> float:
        weights = self.batches.plan.evaluation_weights
        losses = [self.loss(0, microbatch).item() for microbatch in weights]
        return float(np.average(losses, weights=list(weights.values())))

    def backward(self, step: int) -> float:
        """Compute the step's gradient slot by slot. Returns the mean loss."""
        losses = []
        slots = []
        plan = self.batches.plan
        for slot in SLOTS:
            for microbatch in slot:
                loss = self.loss(step, microbatch)
                loss.backward(torch.tensor(plan.size_of(microbatch) / plan.batch_size))
                losses.append(loss.item())
            slots.append([self.take_gradient(views) for views in self.views])
        for flat, *parts in zip(self.flats, *slots, strict=True):
            flat.grad = sum(parts) * self.gradient_scale
        return float(np.average(losses, weights=plan.sizes))

    @staticmethod
    def take_gradient(views: dict[str, torch.Tensor]) -> torch.Tensor:
        gradient = torch.cat([torch.zeros(0), *(view.grad.flatten() for view in views.values())])
        for view in views.values():
            view.grad = None
        return gradient

    def state(self, block: int, version: int) -> block_state.BlockState:
        flat = self.flats[block]
        moments = self.optimizer.state[flat]
        return block_state.BlockState(
            version=version,
            parameters=flat.detach().numpy(),
            optimizer={name: moments[name].numpy() for name in self.run.manifest.optimizer_state},
        )

    def report(self, log: EventLog, line: dict[str, int], gradients: list[str], states: list[str]) -> None:
        cover = [[v.peer_id, list(ids)] for v, ids in zip(self.volunteers, SLOTS, strict=True)]
        for block, (gradient, digest) in enumerate(zip(gradients, states, strict=True)):
            record = {"kind": "applied", "run": self.run.run_id, "peer": log.path.stem, "incarnation": 1}
            record |= {"block": block, "cover": cover, "gradient": gradient, "state": digest}
            log.append(record | line)

    def checkpoint(self, version: int) -> dict[str, Any]:
        store = CheckpointStore(self.run, self.layouts)
        store.begin(version)
        for block, layout in enumerate(self.layouts):
            current = self.state(block, version)
            keep_state(store, version, block, state_file.dump(current, block, layout), current.digest())
        return dict(store.seal(version))


def keep_state(store: CheckpointStore, version: int, block: int, data: bytes, digest: str) -> None:
    """Give `store` a state file as if it had been fetched. Raises as `CheckpointStore.put`."""
    with store.incoming() as state:
        state.begin(len(data))
        state.write(0, data)
        store.put(version, block, state, digest)
