"""Scores of checkpoints by a function of the author's, on the held-out samples (docs/watching.md, "Scores").

The author's machine computes them with the author's own module, so the function may be any Python. Volunteers
know nothing of it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from hetpeer.bootstrap.authoring.user_code import SCORE, absolute_reference, author_scores
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.results.export import newest_model
from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

Point = Mapping[str, Any]
"""A line of the file: `kind` score, `step` (updates), `scores` (name → mean), `samples`, `time`, `by`."""


class Scores:
    """Scores of a run's checkpoints by the function `module.py:function`, kept in its `scores.jsonl`.

    scores = Scores(RunDirectory.open(Path("my_run")), "my.py:exact_match")
    scores.points  # those that were computed before
    scores.look()  # that of the newest checkpoint, if it is not among them
    """

    def __init__(self, run: RunDirectory, reference: str) -> None:
        """Load the function and earlier scores by it. Raises `LocalError` HP-MODEL-017, HP-DISK-*."""
        self._run, self._reference = run, absolute_reference(reference, SCORE)
        self._function = author_scores(self._reference)
        self._path = run.path / "scores.jsonl"
        source, _, name = self._reference.rpartition(":")
        self._by = blake3(Path(source).read_bytes() + name.encode()).hexdigest()[:16]
        with disk_errors(self._path):
            self.points = [point for point in _lines(self._path) if point.get("by") == self._by]
        self._stopped = False

    @property
    def newest(self) -> int:
        """Updates of the newest checkpoint with a score; 0: there is none."""
        return max((int(point["step"]) for point in self.points), default=0)

    def stop(self) -> None:
        """Let a `look` in another thread end after its batch, without a score."""
        self._stopped = True

    def look(self) -> Point | None:
        """Compute and keep the score of the newest checkpoint; None if there is none without.

        Raises `LocalError` HP-MODEL-017 if the function fails, HP-MODEL-006, HP-MODEL-007, HP-CKPT-001,
        HP-DATA-002, HP-DISK-*.
        """
        version = History.of(read_log(self._run.log_path), whole=False).checkpoint_version
        if version <= self.newest:
            return None
        version, model = newest_model(self._run)
        scores = self._of(model)
        if scores is None:
            return None
        samples = sum(map(self._run.manifest.data_plan.size_of, self._run.manifest.data_plan.evaluation))
        point = {
            "kind": "score",
            "step": version,
            "scores": scores,
            "samples": samples,
            "time": time.time(),
            "by": self._by,
        }
        with disk_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps(point) + "\n")
        self.points.append(point)
        return point

    def _of(self, model: Any) -> dict[str, float] | None:
        """Means over the held-out samples; None if `stop` was called."""
        import torch

        batches, plan = self._run.batches(), self._run.manifest.data_plan
        totals: dict[str, float] = {}
        samples = 0
        for number in plan.evaluation:
            if self._stopped:
                return None
            batch = {name: torch.from_numpy(array) for name, array in batches.microbatch(0, number).items()}
            size = plan.size_of(number)
            with torch.no_grad():
                found = self._function(model, batch)
            means = self._means(found, size)
            if samples and means.keys() != totals.keys():
                raise SCORE.error(self._reference, "it returns other names for other batches")
            totals = {name: totals.get(name, 0.0) + size * mean for name, mean in means.items()}
            samples += size
        return {name: total / samples for name, total in totals.items()}

    def _means(self, found: Any, samples: int) -> dict[str, float]:
        """Name → mean over a batch. Raises `LocalError` HP-MODEL-017 if anything else was returned."""
        if not isinstance(found, Mapping) or not found:
            raise SCORE.error(self._reference, f"it returned a {type(found).__name__}, not names and numbers")
        means = {str(name): _mean(value, samples) for name, value in found.items()}
        for name, mean in means.items():
            if mean is None or not math.isfinite(mean):
                why = f"its {name!r} is neither a finite number nor one for each of the {samples} samples"
                raise SCORE.error(self._reference, why)
        return {name: mean for name, mean in means.items() if mean is not None}


def _mean(value: Any, samples: int) -> float | None:
    """A number, or the mean of one for each sample; None for anything else."""
    import torch

    try:
        tensor: Tensor = torch.as_tensor(value).detach().double()
    except (TypeError, ValueError, RuntimeError):
        return None
    return float(tensor.mean()) if tensor.shape in ((), (samples,)) else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The points of the file's whole lines; none if there is no file."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            point = json.loads(line)
        except ValueError:
            continue  # the process ended while it was written
        if isinstance(point, dict):
            yield point
