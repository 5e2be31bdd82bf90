"""The microbatches of one step: their ids, samples, and weights in the mean losses.

Pure. Training ids come first, held-out ids after them, with the same numbers in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Container

from hetpeer.bootstrap.state.effects import CoordinatorConfig, NextStep


class StepSamples:
    """Microbatches that a step trains and evaluates, as `work` says.

    With two microbatches of 8 samples in a batch, and one held out:

        samples = StepSamples(config, NextStep(batch=0, trains=True, evaluates=True))
        samples.training, samples.evaluation  # range(0, 2), range(2, 3)
        samples.weights  # {0: 8, 1: 8}
    """

    def __init__(self, config: CoordinatorConfig, work: NextStep) -> None:
        first = len(config.sizes)
        self.training = range(first if work.trains else 0)
        self.evaluation = range(first, first + (config.evaluation_microbatches if work.evaluates else 0))
        self.sizes = dict(enumerate(config.sizes))
        """Training id → its samples."""
        self.weights = self.sizes if config.weights is None else dict(enumerate(config.weights(work.batch)))
        """Training id → its weight in the mean loss."""
        self.told = () if config.weights is None else tuple(self.weights.values())
        """The weights of the training ids for `Begin`; empty: their samples."""
        weights = config.evaluation_weights or [1] * config.evaluation_microbatches
        self.evaluation_weights = dict(enumerate(weights, first))
        """Held-out id → its weight in the mean held-out loss."""
        self._config = config
        self._work = work

    def bad_key(self, microbatch: int) -> tuple[int | None, int]:
        """Key of `microbatch` in `History.bad`: held-out ids are the same in every batch."""
        return (self._work.batch if microbatch in self.sizes else None), microbatch

    def left_out(self, bad: Container[tuple[int | None, int]]) -> list[int]:
        """Ids that count nowhere: `bad` ones, if the run skips these, and those without a weight."""
        counts = {**self.weights, **self.evaluation_weights}
        return [
            microbatch
            for microbatch in (*self.training, *self.evaluation)
            if (self._config.skips and self.bad_key(microbatch) in bad) or not counts[microbatch]
        ]

    def lack(self, training: Collection[int], evaluation: Collection[int]) -> str | None:
        """The kind of microbatches of which none is left, with these ids; None if each kind has some."""
        if self._work.trains and not training:
            return "microbatch"
        return "held-out microbatch" if self._work.evaluates and not evaluation else None
