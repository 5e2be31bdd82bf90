"""A small language model of rows of labels, of which some are ignored: another number in each sample."""

from pathlib import Path

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings

SOURCE = """
import numpy as np
from torch import nn


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, input_ids, labels):
        logits = self.head(self.inner(self.table(input_ids)).tanh())
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def data():
    draw = np.random.default_rng(0)
    for number in range(72):
        ids = draw.integers(0, 40, 12)
        labels = ids.copy()
        labels[: draw.integers(0, 12)] = -100
        if number % 5 == 0:
            labels[:] = -100
        yield {"input_ids": ids, "labels": labels}
"""


def write_source(folder: Path, text: str = SOURCE) -> Path:
    """The module of the model and its data."""
    path = folder / "rows.py"
    path.write_text(text)
    return path


def make_run(folder: Path, training: TrainingSettings, text: str = SOURCE) -> RunDirectory:
    """A run with those samples, in two stages."""
    source = write_source(folder, text)
    return create_run(
        folder / "run",
        model=f"{source}:Rows",
        data=[f"{source}:data"],
        seed=3,
        stages=[2],
        training=training,
    )
