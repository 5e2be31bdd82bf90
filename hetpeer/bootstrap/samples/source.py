"""The samples of a run: what `--data` names, looked at before it is read, then written as shards.

source = TextSource(files, length=64, ...) or SampleSource(samples, ...)
example = source.example(8)        # the first eight samples; nothing is written yet
fields = source.write(folder, [Extremes().look])  # fields of `DataSettings`
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetpeer.bootstrap.samples.documents import documents, records, texts
from hetpeer.bootstrap.samples.formats import DataFile, Format
from hetpeer.bootstrap.samples.image_folder import ImageFolder
from hetpeer.bootstrap.samples.image_samples import ImageData, image_samples
from hetpeer.bootstrap.samples.labelled import Labels, labelled
from hetpeer.bootstrap.samples.masking import hidden
from hetpeer.bootstrap.samples.packing import packed, padded, pieces, shifted
from hetpeer.bootstrap.samples.record import Progress
from hetpeer.bootstrap.samples.tokenizer import Tokenizer
from hetpeer.stages.data.array_shards import Look, example_of, write_samples
from hetpeer.stages.data.microbatches import windows
from hetpeer.stages.data.shards import Arrays
from hetpeer.stages.data.token_shards import readable_texts, sample_of, write_text

HELDOUT_FRACTION = 0.1
READ_AT_LEAST = 2**28
"""Bytes of samples of a data function that are read although the steps need fewer."""

Fields = dict[str, Any]


class Source(Protocol):
    """Samples that can be looked at before all of them are read."""

    def example(self, count: int) -> Arrays:
        """The first `count` samples, repeated if there are fewer. Raises `LocalError` HP-DATA-*."""

    def write(self, folder: Path, looks: Sequence[Look]) -> Fields:
        """Write the shards into `folder`; returns fields of `DataSettings`. Raises HP-DATA-*, OSError.

        `looks` get all samples but those of text.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How samples are made: tokens of one, at most so many of them, and the seed of their order."""

    length: int
    most: int | None
    seed: int
    tell: Callable[[str], None]
    heldout: float = HELDOUT_FRACTION
    """Share of the samples that is held out: 0 for training data with evaluation data beside it, which has 1.
    """


class TextSource:
    """Text whose bytes are the tokens."""

    def __init__(self, files: Sequence[DataFile], field: str | None, wanted: Wanted) -> None:
        self._files, self._field, self._wanted = files, field, wanted

    def example(self, count: int) -> Arrays:
        """See `Source`."""
        size = count * self._wanted.length + 1
        head = bytearray()
        for chunk in self._chunks(Progress(_quietly)):
            head += chunk[: size - len(head)]
            if len(head) == size:
                break
        found = np.frombuffer(bytes(head) or b"\n", dtype=np.uint8)
        return windows(np.resize(found, size), range(count), self._wanted.length)

    def write(self, folder: Path, looks: Sequence[Look]) -> Fields:  # noqa: ARG002 - all bytes are alike
        """See `Source`."""
        length, most = self._wanted.length, self._wanted.most
        limit = None if most is None else most * length + 1
        if self._plain:
            paths = [file.path for file in self._files]
            train, heldout = write_text(paths, folder, self._wanted.heldout, length, limit)
        else:
            spool = folder / "text.spool"
            progress = Progress(self._wanted.tell, total=sum(file.bytes for file in self._files))
            _spool(spool, self._chunks(progress), length, limit, progress)
            train, heldout = write_text([spool], folder, self._wanted.heldout, length, limit)
            spool.unlink()
        return _fields("text", sample_of(length), train, heldout)

    @property
    def _plain(self) -> bool:
        return all(file.format is Format.TEXT for file in self._files)

    def _chunks(self, progress: Progress) -> Iterator[bytes]:
        if self._plain:
            return readable_texts([file.path for file in self._files])
        return texts(records(self._files, self._field, progress))


class SampleSource:
    """Samples that a function yields, or that a tokenizer makes of documents."""

    def __init__(self, samples: Iterable[Any], maker: str, wanted: Wanted, progress: Progress) -> None:
        self._samples: Iterator[Any] = itertools.islice(samples, wanted.most)
        self._maker, self._wanted, self._progress = maker, wanted, progress

    def example(self, count: int) -> Arrays:
        """See `Source`."""
        head = [*itertools.islice(self._samples, count)]
        self._samples = itertools.chain(head, self._samples)
        return example_of(head, count, self._maker)

    def write(self, folder: Path, looks: Sequence[Look]) -> Fields:
        """See `Source`."""
        samples = self._progress.count(self._samples)
        wanted = self._wanted
        made = write_samples(samples, folder, wanted.heldout, wanted.seed, self._maker, looks)
        return _fields("arrays", *made)


def tokenized(
    files: Sequence[DataFile],
    field: str | None,
    tokenizer: Tokenizer,
    wanted: Wanted,
    *,
    pack: bool,
    masked: bool,
    takes: Callable[[str], bool],
) -> SampleSource:
    """Samples of `wanted.length` tokens. `takes(name)`: whether the model takes an array of that name.

    A model that takes `input_ids` gets transformers' arrays, another one `tokens` and `targets`. `masked`:
    for a masked language model, whose targets are hidden tokens.
    """
    progress = Progress(wanted.tell, total=sum(file.bytes for file in files))
    parts = pieces(documents(records(files, field, progress), tokenizer), wanted.length)
    samples = (packed if pack else padded)(parts, wanted.length, tokenizer.pad)
    if masked:
        samples = hidden(
            samples,
            mask=tokenizer.mask,
            special=tokenizer.special,
            vocabulary=tokenizer.vocabulary,
            seed=wanted.seed,
        )
    if not takes("input_ids"):
        samples = map(shifted, samples)
    needed = {"input_ids", "labels", "tokens", "targets"}
    kept = ({n: a for n, a in sample.items() if n in needed or takes(n)} for sample in samples)
    return SampleSource(kept, "the data makes", wanted, progress)


def with_labels(
    files: Sequence[DataFile],
    fields: tuple[str | None, str],
    tokenizer: Tokenizer,
    wanted: Wanted,
    labels: Labels,
) -> SampleSource:
    """One sample for each record that has a text and a label; `fields`: their names."""
    progress = Progress(wanted.tell, total=sum(file.bytes for file in files))
    samples = labelled(records(files, fields[0], progress, fields[1]), tokenizer, wanted.length, labels)
    return SampleSource(samples, "the data makes", wanted, progress)


def of_images(folder: ImageFolder, data: ImageData, wanted: Wanted) -> SampleSource:
    """One sample for each image of `folder`."""
    progress = Progress(wanted.tell)
    files = folder.labelled(data.ids)
    samples = image_samples(files, data.preparation, wanted.seed, wanted.most, progress)
    return SampleSource(samples, "the folders have", wanted, progress)


def enough(
    samples: Iterable[Any], needed: int, tell: Callable[[str], None], option: str = "--max-samples"
) -> Iterator[Any]:
    """`samples`, until there are `needed` ones of READ_AT_LEAST bytes in all: a function may be endless.

    `option` bounds them in another way.
    """
    size = 0
    for number, sample in enumerate(samples):
        if number >= needed and size >= READ_AT_LEAST:
            tell(f"{number:,} samples are read, more than the steps need: {option} N reads more or fewer")
            return
        if isinstance(sample, Mapping):
            size += sum(getattr(array, "nbytes", 0) for array in sample.values())
        yield sample


def _spool(path: Path, chunks: Iterable[bytes], length: int, limit: int | None, progress: Progress) -> None:
    """Write the text of all records to a file, up to `limit` bytes."""
    left = limit
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            progress.add(len(chunk) / length)
            left = None if left is None else left - len(chunk)
            if left is not None and left <= 0:
                return


def _fields(kind: str, sample: Mapping[str, Any], train: Iterable[Any], heldout: Iterable[Any]) -> Fields:
    return {
        "kind": kind,
        "sample": {name: asdict(spec) for name, spec in sample.items()},
        "train": [asdict(shard) for shard in train],
        "heldout": [asdict(shard) for shard in heldout],
    }


def _quietly(_line: str) -> None:
    """Ignore a line."""
