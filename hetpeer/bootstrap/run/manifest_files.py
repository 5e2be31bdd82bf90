"""Files that a manifest names, and the samples that are in those of the data."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hetpeer.bootstrap.run.durable_files import FILE_NAME
from hetpeer.bootstrap.run.owner_signature import Count, ManifestPart, Positive
from hetpeer.stages.data.array_shards import MAX_DIMENSIONS, NAME
from hetpeer.stages.data.sample_weights import NUMBER
from hetpeer.stages.data.shards import DTYPES, TARGETS, TOKENS
from hetpeer.stages.graph.block_spec import ITEM_BYTES

Name = Annotated[str, Field(pattern=FILE_NAME)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileRef(ManifestPart):
    """A file by name, blake3 (64 hex digits) and size; `name` is relative to its kind's folder of the run."""

    name: Name
    blake3: Digest
    bytes: Count


class ShardRef(FileRef):
    """A data shard: a file and the number of samples in it."""

    samples: Positive


class ArrayRef(ManifestPart):
    """One array of a sample, without the dimension of the samples."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: Annotated[tuple[Positive, ...], Field(max_length=MAX_DIMENSIONS)]

    @property
    def nbytes(self) -> int:
        """Bytes in one sample."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class DataSettings(ManifestPart):
    """Arrays of a sample, and the shards that hold the samples (stages/data)."""

    LATER = frozenset({"weights"})

    kind: Literal["text", "arrays"]
    """`text`: a shard holds bytes, cut into windows of tokens and targets; `arrays`: a tensor per name."""
    sample: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], ArrayRef], Field(min_length=1, max_length=256)
    ]
    train: Annotated[tuple[ShardRef, ...], Field(min_length=1)]
    heldout: Annotated[tuple[ShardRef, ...], Field(min_length=1)]
    weights: FileRef | None = None
    """Weight of each sample (stages/data/sample_weights.py); None: samples count alike."""

    @model_validator(mode="after")
    def _samples_fit(self) -> DataSettings:
        """Refuse samples that are not of the stated kind, or that do not fit into their shards."""
        shapes = {name: (array.dtype, len(array.shape)) for name, array in self.sample.items()}
        if self.kind == "text":
            if (
                shapes != dict.fromkeys((TOKENS, TARGETS), ("int64", 1))
                or len(set(self.sample.values())) != 1
            ):
                raise ValueError("data.sample is not that of text")
            nbytes = self.tokens_per_sample
        else:
            nbytes = sum(array.nbytes for array in self.sample.values())
        for field, shards in (("train", self.train), ("heldout", self.heldout)):
            for number, shard in enumerate(shards):
                if shard.samples * nbytes > shard.bytes:
                    raise ValueError(
                        f"data.{field}.{number} has {shard.bytes} bytes, too few for {shard.samples} samples "
                        f"of {nbytes}"
                    )
        samples = sum(shard.samples for shard in (*self.train, *self.heldout))
        if self.weights is not None and self.weights.bytes != NUMBER.itemsize * samples:
            raise ValueError(f"data.weights has {self.weights.bytes} bytes, not those of {samples} samples")
        return self

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in a sample of text; 1 for other data, so that speeds are in samples."""
        return self.sample[TOKENS].shape[0] if self.kind == "text" else 1

    @property
    def unit(self) -> str:
        """Unit of speeds, for display."""
        return "tok" if self.kind == "text" else "samples"
