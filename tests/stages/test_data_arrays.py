"""Samples of the author's in, shards on disk, each sample once; what cannot be trained on is refused by
name.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data import array_shards
from hetpeer.stages.data.array_shards import write_samples
from hetpeer.stages.data.shards import CODES, DTYPES, ArraySpec, ShardFile
from tests.amounts import examples


def numbered(count: int) -> Iterator[dict[str, Any]]:
    """Sample i holds i in each of its arrays."""
    for number in range(count):
        yield {"image": np.full((2, 3), number, dtype=np.float32), "label": number}


def labels(folder: Path, shards: list[ShardFile]) -> list[int]:
    return [int(label) for shard in shards for label in load_file(folder / shard.name)["label"]]


def test_every_sample_is_in_one_shard_with_all_of_its_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_shards, "SHARD_BYTES", 7 * (24 + 8))
    sample, train, heldout = write_samples(numbered(100), tmp_path, 0.1, seed=3)
    assert sample == {
        "image": ArraySpec(dtype="float32", shape=(2, 3)),
        "label": ArraySpec(dtype="int64", shape=()),
    }
    assert sorted(labels(tmp_path, train) + labels(tmp_path, heldout)) == list(range(100))
    assert sum(shard.samples for shard in heldout) == 10
    assert max(shard.samples for shard in train) <= 7
    for shard in [*train, *heldout]:
        tensors = load_file(tmp_path / shard.name)
        assert tensors["image"].shape == (shard.samples, 2, 3)
        assert (tensors["image"] == tensors["label"][:, np.newaxis, np.newaxis]).all()
        assert (tmp_path / shard.name).stat().st_size == shard.bytes
    assert len(list(tmp_path.iterdir())) == len({shard.name for shard in [*train, *heldout]})


def test_the_shuffle_is_the_seeds_and_shards_are_named_by_content(tmp_path: Path) -> None:
    made = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        made.append(write_samples(numbered(40), tmp_path / folder, 0.1, seed))
    assert made[0] == made[1]
    assert made[0] != made[2]
    held_out = labels(tmp_path / "a", made[0][2])
    assert held_out != [36, 37, 38, 39]  # not simply the author's last ones


def test_transposed_images_come_back_as_they_were(tmp_path: Path) -> None:
    """Samples are strided views twice over; safetensors 0.8 writes such arrays in wrong order, silently."""
    images = [np.arange(number, number + 24.0).reshape(4, 3, 2).transpose(2, 1, 0) for number in range(20)]
    samples = ({"image": image, "label": number} for number, image in enumerate(images))
    _, train, heldout = write_samples(samples, tmp_path, 0.2, seed=0)
    for shard in [*train, *heldout]:
        tensors = load_file(tmp_path / shard.name)
        for image, label in zip(tensors["image"], tensors["label"], strict=True):
            assert np.array_equal(image, images[int(label)])


@examples(30)
@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(1, 3), max_size=3), count=st.integers(2, 30))
def test_every_dtype_and_shape_comes_back(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], count: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    values = np.arange(count * math.prod(shape)).reshape(count, *shape).astype(dtype)
    samples = ({"x": value, "number": np.int32(number)} for number, value in enumerate(values))
    sample, train, heldout = write_samples(samples, folder, 0.3, seed=0)
    assert sample["x"] == ArraySpec(dtype=dtype, shape=tuple(shape))
    for shard in [*train, *heldout]:
        tensors = load_file(folder / shard.name)
        assert tensors["x"].dtype == dtype
        assert (tensors["x"] == values[tensors["number"]]).all()
    assert set(DTYPES) <= set(CODES.values())


def test_a_sample_larger_than_a_shard_has_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_shards, "SHARD_BYTES", 10)
    _, train, heldout = write_samples(numbered(5), tmp_path, 0.1, seed=0)
    assert [shard.samples for shard in [*train, *heldout]] == [1] * 5


def test_another_byte_order_is_the_same_data(tmp_path: Path) -> None:
    samples = [{"x": np.array([1, 2], dtype=">i4")}, {"x": np.array([3, 4], dtype="<i4")}]
    sample, train, heldout = write_samples(samples, tmp_path, 0.5, seed=0)
    assert sample == {"x": ArraySpec(dtype="int32", shape=(2,))}
    found = {tuple(load_file(tmp_path / shard.name)["x"][0].tolist()) for shard in [*train, *heldout]}
    assert found == {(1, 2), (3, 4)}


GOOD: dict[str, Any] = {"x": np.zeros(2, dtype=np.float32), "y": 1}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            {"x": np.zeros(3, dtype=np.float32), "y": 1},
            "'x' is float32 [3], and in the first one float32 [2]",
        ),
        ({"x": np.zeros(2), "y": 1}, "'x' is float64 [2], and in the first one float32 [2]"),
        ({"x": np.zeros(2, dtype=np.float32)}, "it has x, and the first one has x, y"),
        ({**GOOD, "z": 1}, "it has x, y, z, and the first one has x, y"),
        ({**GOOD, "x": np.array([0, np.nan], dtype=np.float32)}, "'x' holds NaN or infinity"),
        ({**GOOD, "x": np.array([np.inf, 0], dtype=np.float32)}, "'x' holds NaN or infinity"),
        ({**GOOD, "y": None}, "'y' is of dtype object"),
        ({**GOOD, "y": "seven"}, "'y' is of dtype str"),
        ({**GOOD, "y": np.complex64(1)}, "'y' is of dtype complex64"),
        ({**GOOD, "y": np.uint32(1)}, "'y' is of dtype uint32"),
        ({**GOOD, "y": [[1], [2, 3]]}, "'y' is no array"),
        ({**GOOD, "y": np.zeros((2, 0), dtype=np.int64)}, "'y' has the shape (2, 0)"),
        ({**GOOD, "y": np.zeros((1,) * 16, dtype=np.int64)}, "'y' has the shape"),
        ({**GOOD, 7: 1}, "7 is no name"),
        ({**GOOD, "a/b": 1}, "'a/b' is no name"),
        ({**GOOD, "__metadata__": 1}, "'__metadata__' is no name"),
        ((1, 2), "it is a tuple"),
        ({}, "it is a dict"),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(tmp_path: Path, bad: Any, why: str) -> None:
    for samples, number in (([GOOD, GOOD, bad, GOOD], 2), ([bad, GOOD], 0)):
        with pytest.raises(LocalError) as caught:
            write_samples(samples, tmp_path, 0.1, seed=0)
        assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-005", ExitCode.CONFIG)
        if number:
            assert "sample 2 " in caught.value.what
            assert why in caught.value.why
        assert caught.value.fix
        assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_samples(tmp_path: Path, count: int) -> None:
    with pytest.raises(LocalError, match=f"yields {count} samples, at least 2") as caught:
        write_samples(numbered(count), tmp_path, 0.1, seed=0)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-003", ExitCode.CONFIG)
