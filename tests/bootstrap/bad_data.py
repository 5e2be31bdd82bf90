"""A small classifier of words, and 60 samples of which some cannot be computed."""

from pathlib import Path

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings

SOURCE = """
import numpy as np
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, word):
        rows = self.table(word + word[:, :1])
        return self.head(self.norm(self.inner(rows).flatten(0, 1)).unflatten(0, (-1, 4)))


def loss(outputs, batch):
    labels = batch["label"].flatten()
    each = nn.functional.cross_entropy(outputs.flatten(0, 1), labels, ignore_index=-100, reduction="none")
    return each.sum() / (labels != -100).sum()  # a mean of our own: `init` knows no weights of it


def data():
    draw = np.random.default_rng(0)
    for number in range(60):
        word, label = draw.integers(0, 100, 4), draw.integers(0, 10, 4)
        if number == 0:
            word[1] = 200  # the largest one, so that `init` finds no fault in the others
        if number in MASKED:
            label[:] = -100
        if number in BEYOND:
            word[0] = 190
        yield {"word": word, "label": label}
"""


def write_source(folder: Path, masked: tuple[int, ...] = (), beyond: tuple[int, ...] = ()) -> Path:
    """The module of the model, the loss and the data: no label of `masked` samples is left, and `beyond` have
    a word whose row is beyond the embedding. No single number tells, so `init` takes them.
    """
    path = folder / "words.py"
    path.write_text(f"{SOURCE}\n\nMASKED, BEYOND = {masked}, {beyond}\n")
    return path


def make_run(folder: Path, training: TrainingSettings, **bad: tuple[int, ...]) -> RunDirectory:
    """A run with those samples, in two stages."""
    source = write_source(folder, **bad)
    return create_run(
        folder / "run",
        model=f"{source}:Words",
        loss=f"{source}:loss",
        data=[f"{source}:data"],
        seed=3,
        stages=[2],
        training=training,
    )
