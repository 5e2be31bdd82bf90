"""Samples in a file take few bytes, and come back as they were."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpeer.stages.data import sample_spool
from hetpeer.stages.data.sample_spool import SampleSpool
from hetpeer.stages.data.shards import ArraySpec

IDS = {"ids": ArraySpec(dtype="int64", shape=(8,)), "x": ArraySpec(dtype="float32", shape=())}


def spooled(path: Path, samples: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    spool = SampleSpool(path, IDS)
    for sample in samples:
        spool.add(sample)
    return spool.finish()


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (0, 255, "uint8"),
        (-100, 127, "int8"),
        (0, 256, "uint16"),
        (-100, 8191, "int16"),
        (-100, 40000, "int32"),
        (0, 2**32 - 1, "uint32"),
        (-1, 2**32 - 1, "int64"),
        (-(2**63), 2**63 - 1, "int64"),
    ],
)
def test_integers_take_the_bytes_that_the_largest_needs(
    tmp_path: Path, low: int, high: int, dtype: str
) -> None:
    samples = [{"ids": np.full(8, value, dtype=np.int64), "x": np.float32(0.1)} for value in (low, high)]
    records = spooled(tmp_path / "spool", samples)
    assert records.dtype["ids"].base == dtype
    assert records["ids"][:, 0].astype(np.int64).tolist() == [low, high]
    assert records["x"].tolist() == [np.float32(0.1)] * 2


def test_a_later_sample_that_needs_more_bytes_widens_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_spool, "BLOCK_BYTES", 3 * (8 * 8 + 4))
    values = [1, 2, 3, 4, 300, -5, 70_000, 2**40, 0, -(2**50)]
    samples = [{"ids": np.full(8, value), "x": np.float32(at)} for at, value in enumerate(values)]
    records = spooled(tmp_path / "spool", samples)
    assert [row.tolist() for row in records["ids"]] == [[value] * 8 for value in values]
    assert records["x"].tolist() == [*range(10)]
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_a_buffer_that_is_used_again_is_copied(tmp_path: Path) -> None:
    spool, buffer = SampleSpool(tmp_path / "spool", IDS), np.zeros(8, dtype=np.int64)
    for value in range(5):
        buffer[:] = value
        spool.add({"ids": buffer, "x": np.float32(0)})
    assert spool.finish()["ids"][:, 0].tolist() == [0, 1, 2, 3, 4]
