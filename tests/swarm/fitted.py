"""A run of tests/authors/fitted.py: all gradients are rounding noise."""

from pathlib import Path

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings, TrustSettings
from tests.authors import fitted

STEPS = 4


def fitted_run(folder: Path, *, stages: int) -> RunDirectory:
    """The run directory, with everything checked by spot checks; learning leads nowhere."""
    module = fitted.__file__
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
