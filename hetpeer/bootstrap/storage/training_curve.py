"""The training curve of a run: the records of the log that are in it, and what each says as a point.

Pure. A point is a JSON object; `metrics.jsonl` and `hetpeer export` write one a line (docs/watching.md). A
curve holds eight bytes for each point: the number of its record in the log.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

from hetpeer.averaging.optim.learning_rate import factor
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.manifest_files import DataSettings
from hetpeer.bootstrap.run.settings import TrainingSettings

KINDS: Final = {"commit": "step", "evaluation": "evaluation"}
"""Kind of record → kind of point."""
FIELDS: Final = ("step", "cluster", "batch", "loss", "norm", "seconds", "term", "view", "plan")
"""Fields of a record that go into its point, if the record has them."""
PREDICTED: Final = (("tokens", "targets"), ("input_ids", "labels"))
"""Arrays of samples in which each token has a target."""
LARGEST_LOSS: Final = 700.0
"""Loss in nats whose perplexity is still a float."""


OTHERS: Final = "others"
"""Name of the parameters that no group's pattern matches."""


def learning_rate(training: TrainingSettings, batch: int) -> float:
    """The learning rate of the update that is made with batch number `batch`, counted from 0."""
    return training.learning_rate * factor(training.schedule, batch + 1)


def tokens_in_sample(data: DataSettings) -> int | None:
    """Tokens of a sample, padding included, if each has a target; None for other samples.

    With targets for all tokens e^loss is a perplexity.
    """
    shapes = {name: array.shape for name, array in data.sample.items()}
    for tokens, targets in PREDICTED:
        if len(shapes.get(tokens, ())) == 1 and shapes[tokens] == shapes.get(targets):
            return shapes[tokens][0]
    return None


def group_norms(training: TrainingSettings, record: Record) -> dict[str, float]:
    """Pattern of each parameter group → 2-norm of its gradient in a commit; OTHERS: all other parameters.

    Empty without groups, or if the commit does not have their norms.
    """
    names = [*(group.pattern for group in training.groups), OTHERS]
    squares = record.get("group_squares", ())
    if len(squares) != len(names) or len(names) == 1:
        return {}
    return {name: math.sqrt(square) for name, square in zip(names, squares, strict=True)}


class CurvePoints:
    """Makes points of records; learning rate, speed and perplexity follow from the run's manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._training = manifest.training
        self._tokens = tokens_in_sample(manifest.data)
        self._speed = "samples_per_second" if self._tokens is None else "tokens_per_second"

    def of(self, record: Record) -> dict[str, Any]:
        """The point of a commit or of an evaluation."""
        further = self._of_commit if record["kind"] == "commit" else self._of_evaluation
        known = {name: record[name] for name in FIELDS if name in record}
        return {"kind": KINDS[record["kind"]], **known, **further(record)}

    def _of_commit(self, record: Record) -> dict[str, Any]:
        batch = record.get("batch", record["step"])
        found: dict[str, Any] = {"learning_rate": learning_rate(self._training, batch)}
        if record.get("seconds"):
            skipped = sum(map(self._training.samples_of, record.get("skipped", ())))
            samples = self._training.batch_size - skipped
            found[self._speed] = samples * (self._tokens or 1) / record["seconds"]
        if "squares" in record:
            found["block_norms"] = [_norm(square) for square in record["squares"]]
        if groups := group_norms(self._training, record):
            found["group_norms"] = {name: _norm(norm * norm) for name, norm in groups.items()}
        return found

    def _of_evaluation(self, record: Record) -> dict[str, Any]:
        found = {}
        if self._tokens is not None and record["loss"] < LARGEST_LOSS:
            found["perplexity"] = math.exp(record["loss"])
        if "hits" in record:
            right, counted = record["hits"]
            found["accuracy"] = right / counted
        return found


def _norm(square: float) -> float:
    """The norm to six digits."""
    return float(f"{math.sqrt(square):.6g}")


class ExactCurve:
    """Curve of an exact run. A roll-back to version v takes out the steps from v on and later evaluations.

    A version that is evaluated again is in the curve once, with the later loss.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self.numbers = array("Q")
        """Numbers of the records in the curve, in log order."""
        self._version = 0
        self._evaluated = -1
        """Newest version with an evaluation in the curve."""

    def add(self, number: int, record: Record) -> bool:
        """Fold record `number`. Returns whether points were taken out; otherwise some were added, or none."""
        taken = False
        match record["kind"]:
            case "commit":
                step = int(record["step"])
                taken = step != self._version and self._back_to(step)
                self._version = step + 1
                self.numbers.append(number)
            case "evaluation":
                step = int(record["step"])
                taken = step <= self._evaluated and self._take_out(
                    step, lambda one: one["kind"] == "evaluation" and one["step"] == step
                )
                self._evaluated = max(step, self._evaluated)
                self.numbers.append(number)
            case "rollback":
                self._version = int(record["to_version"])
                taken = self._back_to(self._version)
            case _:
                pass
        return taken

    def _back_to(self, version: int) -> bool:
        self._evaluated = min(self._evaluated, version)
        return self._take_out(version, lambda one: one["kind"] == "commit" or one["step"] > version)

    def _take_out(self, step: int, is_void: Callable[[Record], bool]) -> bool:
        """Take out what `is_void` among the points after the last step before `step`."""
        begin, kept = len(self.numbers), array("Q")
        while begin:
            record = self._records[self.numbers[begin - 1]]
            if record["kind"] == "commit" and record["step"] < step:
                break
            begin -= 1
            if not is_void(record):
                kept.append(self.numbers[begin])
        taken = len(self.numbers) - begin > len(kept)
        del self.numbers[begin:]
        self.numbers.extend(reversed(kept))
        return taken


class GroupedCurve:
    """Curve of a grouped run of `batches` batches: the commits in the result, and all evaluations."""

    def __init__(self, batches: int) -> None:
        self._lineage = BatchLineage(batches)
        self._commits = array("Q")
        self._evaluations: dict[int, int] = {}
        """Batch → number of the record of its last evaluation."""
        self.numbers = array("Q")
        """Numbers of the records in the curve, in log order."""

    def add(self, number: int, record: Record) -> bool:
        """Fold record `number`. Returns whether points were taken out or put in between others."""
        self._lineage.add(record)
        match record["kind"]:
            case "commit":
                self._commits.append(number)
                self.numbers.append(number)
            case "evaluation":
                again = record["batch"] in self._evaluations
                self._evaluations[record["batch"]] = number
                self.numbers.append(number)
                return again and self._look_again()
            case "rollback" | "reign" | "founded" | "dissolved":
                return self._look_again()
            case _:
                pass
        return False

    def _look_again(self) -> bool:
        counting = (self._commits[commit - 1] for commit in self._lineage.commits())
        before, self.numbers = self.numbers, array("Q", sorted([*counting, *self._evaluations.values()]))
        return self.numbers[: len(before)] != before


def curve_of(manifest: Manifest, records: Sequence[Record]) -> ExactCurve | GroupedCurve:
    """An empty curve for the log `records`, to which its records are added in order."""
    if manifest.averaging is None:
        return ExactCurve(records)
    return GroupedCurve(manifest.training.steps)


def curve_points(manifest: Manifest, records: Sequence[Record]) -> list[dict[str, Any]]:
    """All points of the surviving curve.

    Exact runs: by version, an evaluation before the step that begins with its version. Grouped: in log order.
    """
    curve, points = curve_of(manifest, records), CurvePoints(manifest)
    for number, record in enumerate(records):
        curve.add(number, record)
    found = [points.of(records[number]) for number in curve.numbers]
    if manifest.averaging is None:
        found.sort(key=lambda point: (point["step"], point["kind"] == "step"))
    return found
