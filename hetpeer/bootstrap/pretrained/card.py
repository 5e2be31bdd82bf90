"""The model card of an export: what was trained, from what, on which data, and by whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpeer.bootstrap.pretrained.tasks import Task

PIPELINES: Mapping[Task, str] = {
    Task.CAUSAL_LM: "text-generation",
    Task.MASKED_LM: "fill-mask",
    Task.SEQ2SEQ: "text2text-generation",
    Task.SEQUENCE_CLASSIFICATION: "text-classification",
    Task.TOKEN_CLASSIFICATION: "token-classification",
    Task.IMAGE_CLASSIFICATION: "image-classification",
}
"""Task → the hub's name for it."""
MOST = 50
"""Most volunteers that the table of credit names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts of an export."""

    name: str
    run_id: str
    base: str
    """Id on the hub or name of the folder of the model that the training began with; empty: unknown."""
    on_hub: bool
    """Whether `base` is an id of the hub."""
    task: Task
    version: int
    """Updates of the parameters."""
    steps: int
    """Steps of the whole run."""
    loss: float | None
    """Training loss of the last step; None: nothing is trained."""
    evaluation: float | None
    """Held-out loss."""
    accuracy: float | None
    """Share of the held-out targets that are predicted right; None: none are counted."""
    samples: int
    shards: Sequence[str]
    """Blake3 of each shard of the training data."""
    data: str
    """Blake3 of all those hashes, one after the other."""
    credit: Mapping[str, int]
    """Volunteer → credit (docs/credit.md)."""
    library: str = "transformers"
    """The library that loads the export."""

    def text(self) -> str:
        """The card as Markdown with the hub's metadata."""
        head = [
            f"library_name: {self.library}",
            f"pipeline_tag: {PIPELINES[self.task]}",
            "tags:",
            "- hetpeer",
        ]
        if self.on_hub:
            head.append(f"base_model: {self.base}")
        rows = [
            ("run", f"{self.name}, `{self.run_id}`"),
            ("began with", self.base or "a module of the author's"),
            ("updates", f"{self.version} of {self.steps}"),
            ("training loss", "" if self.loss is None else f"{self.loss:.4f}"),
            ("held-out loss", "" if self.evaluation is None else f"{self.evaluation:.4f}"),
            ("held-out accuracy", "" if self.accuracy is None else f"{self.accuracy:.2%}"),
            ("training data", f"{self.samples:,} samples in {len(self.shards)} shards, blake3 `{self.data}`"),
        ]
        lines = ["---", *head, "---", "", f"# {self.name}", ""]
        lines += [
            "Volunteers trained this model together with hetpeer, from home, each on a part of the work.",
            "`hetpeer.json` beside this file has the same facts for programs.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {label} | {text} |" for label, text in rows if text),
        ]
        if self.credit:
            lines += [
                "",
                "## Credit",
                "",
                "| volunteer | share of the work |",
                "| --- | --- |",
                *self._shares(),
            ]
        return "\n".join(lines) + "\n"

    def facts(self) -> dict[str, object]:
        """The same for `hetpeer.json`."""
        return {
            "schema": "hetpeer.export/1",
            "run": self.name,
            "id": self.run_id,
            "base": self.base,
            "task": self.task,
            "version": self.version,
            "steps": self.steps,
            "loss": self.loss,
            "evaluation": self.evaluation,
            "accuracy": self.accuracy,
            "samples": self.samples,
            "shards": list(self.shards),
            "credit": dict(self.credit),
        }

    def _shares(self) -> list[str]:
        whole = sum(self.credit.values())
        most = sorted(self.credit.items(), key=lambda entry: (-entry[1], entry[0]))
        rows = [f"| `{peer}` | {work / whole:.1%} |" for peer, work in most[:MOST]]
        return rows + ([f"| {len(most) - MOST} more | |"] if len(most) > MOST else [])
