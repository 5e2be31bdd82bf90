"""A run whose net fits its data from the first step on: its gradients are rounding noise and nothing else."""

from pathlib import Path

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings, TrustSettings

STEPS = 4
AUTHOR = """
import torch
from torch import nn

WIDTH = 32


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)

    def forward(self, x):
        return self.layers(x)


def build():
    return Model()


def loss(outputs, batch):
    return nn.functional.mse_loss(outputs, batch["y"])


def data():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(48, WIDTH, generator=generator)
    with torch.no_grad():
        outputs = build().double()(inputs.double()).float()
    for x, y in zip(inputs, outputs, strict=True):
        yield {"x": x, "y": y}
"""


def fitted_run(folder: Path, *, stages: int) -> RunDirectory:
    """The run directory, with everything checked by spot checks; learning leads nowhere."""
    folder.mkdir()
    module = folder / "fitted.py"
    module.write_text(AUTHOR)
    return create_run(
        folder / "run",
        model=f"{module}:build",
        loss=f"{module}:loss",
        data=[f"{module}:data"],
        name="fitted",
        seed=3,
        stages=[stages],
        training=TrainingSettings(
            steps=STEPS,
            batch_size=12,
            microbatch_size=2,
            slot_size=2,
            eval_every=STEPS,
            eval_microbatches=1,
            checkpoint_every=2,
            learning_rate=1e-9,
        ),
        trust=TrustSettings(spot_checks=1.0),
    )
