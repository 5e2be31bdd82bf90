"""The author's model with its loss on the author's samples: looked at first, then all of them written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.bootstrap.authoring.author_model import AuthorModel
from hetpeer.bootstrap.authoring.run_data import DataOptions, is_function, source_of
from hetpeer.bootstrap.authoring.sample_weigher import SampleWeigher, Weigh
from hetpeer.bootstrap.authoring.user_code import weights_by_loss, with_loss
from hetpeer.bootstrap.model_checks.data_fit import (
    check_borders,
    check_extremes,
    check_vocabulary,
    telling_example,
)
from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.run.run_directory import Author
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.samples.source import Fields, Source, Wanted
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.data.extremes import Extremes
from hetpeer.stages.data.shards import Arrays

if TYPE_CHECKING:
    from torch import nn

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnData:
    """A module that takes a batch by its arrays' names and returns the loss, and the samples for it."""

    module: nn.Module
    source: Source
    example: Arrays
    """The first microbatch whose loss is finite."""
    given: Weigh | None
    """Weights of samples as the loss function returns them; None: it returns none."""

    @classmethod
    def of(
        cls,
        own: AuthorModel,
        author: Author,
        options: DataOptions,
        wanted: Wanted,
        training: TrainingSettings,
    ) -> ModelOnData:
        """Read the first samples, and add the loss to the author's module.

        Raises `LocalError` HP-DATA-* if the data cannot be read or does not fit the model, HP-MODEL-* for a
        loss that cannot be used.
        """
        source = source_of(author, options, wanted, own.tokenizer, own.module, own.task, training, own.images)
        example = source.example(training.microbatch_size)
        given = weights_by_loss(own.module, author.loss, example)
        module = with_loss(own.module, author.loss, example)
        example = telling_example(module, source, training.microbatch_size)
        if own.tokenizer and not is_function(author.data):
            check_vocabulary(module, example, own.tokenizer.vocabulary, own.tokenizer.path)
        if options.packed:
            check_borders(module, example)
        return cls(module=module, source=source, example=example, given=given)

    def compare_batch(
        self,
        weigher: SampleWeigher,
        training: TrainingSettings,
        blocks: Sequence[Mapping[str, int]],
        tell: Tell,
    ) -> None:
        """Say so if a batch is not the same as its microbatches; `blocks` are those of the manifest.

        Batches that do not fit into the free memory are not compared, which is said.
        """
        from hetpeer.bootstrap.model_checks.whole_batch import MOST, compare_split, small_last_part
        from hetpeer.stages.block.device import survey

        sizes = [training.samples_of(number) for number in range(training.microbatches)]
        if warning := small_last_part(self.module, sizes):
            tell(warning)
        takes = sum(2 * block["parameter_bytes"] + MOST * block["activation_bytes"] for block in blocks)
        if training.microbatches == 1:
            return
        if takes > survey().ram_free_bytes:
            tell("a batch is not compared with its microbatches: there is no memory for that")
            return
        tell("comparing a batch with its microbatches")
        batch = self.source.example(min(training.batch_size, MOST * training.microbatch_size))
        split = compare_split(self.module, batch, training.microbatch_size, weigher.of(batch))
        if split is not None and not split.is_same:
            tell(str(split))

    def write(self, folder: Path, weigher: SampleWeigher, on_bad_sample: str, tell: Tell) -> Fields:
        """Write all samples and their weights into `folder`; returns fields of `DataSettings`.

        The model is tried on the extremes. Raises `LocalError` HP-DATA-*, HP-DISK-*.
        """
        extremes = Extremes()
        with disk_errors(folder):
            written = self.source.write(folder, [extremes.look, weigher.look])
            written["weights"] = weigher.write(folder)
        try:
            check_extremes(self.module, self.example, extremes.found())
        except LocalError as error:
            if on_bad_sample != "skip":
                raise
            tell(f"such samples will be skipped (--on-bad-sample skip): {error.what}; {error.why}")
        return written
