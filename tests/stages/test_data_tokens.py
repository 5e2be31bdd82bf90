"""Text in, shards on disk, the same text out in windows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data import token_shards
from hetpeer.stages.data.microbatches import DataPlan, MicrobatchReader, samples_in, windows
from hetpeer.stages.data.shards import even_parts
from hetpeer.stages.data.token_shards import (
    python_standard_library_paths,
    sample_of,
    write_text,
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("first file äöü")
    (folder / "b" / "inner.txt").write_text("second file " * 40)
    (folder / "c.bin").write_bytes(b"\x00\x01\x02")
    (folder / "d.latin1").write_bytes(b"caf\xe9")
    (folder / "e_cut_short.txt").write_bytes("é".encode()[:1])
    (folder / ".hidden").write_text("hidden")
    (folder / "loop").symlink_to(folder)
    return folder


EXPECTED = b"first file \xc3\xa4\xc3\xb6\xc3\xbc\n" + b"second file " * 40 + b"\n"


def test_text_becomes_shards(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "SHARD_BYTES", 50)
    train, heldout = write_text([corpus], tmp_path, 0.2, 5)
    parts = [load_file(tmp_path / shard.name)["tokens"] for shard in [*train, *heldout]]
    assert b"".join(part.tobytes() for part in parts) == EXPECTED
    assert sum(len(part) for part in parts[len(train) :]) == len(EXPECTED) // 5
    assert {part.dtype for part in parts} == {np.dtype(np.uint8)}
    assert [shard.samples for shard in [*train, *heldout]] == [(len(part) - 1) // 5 for part in parts]
    assert max(map(len, parts)) <= 50


def test_a_microbatch_is_the_text_it_names(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every training window once an epoch; held-out ones in the text's own order."""
    monkeypatch.setattr(token_shards, "SHARD_BYTES", 50)
    train, heldout = write_text([corpus], tmp_path, 0.2, 5)
    total = sum(shard.samples for shard in train)
    plan = DataPlan(
        kind="text",
        sample=sample_of(5),
        train=tuple(train),
        heldout=tuple(heldout),
        seed=1,
        batch_size=total,
        microbatch_size=total,
        eval_microbatches=1,
    )
    batches = MicrobatchReader(tmp_path, plan)
    arrays = batches.microbatch(0, 0)
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == {
        "tokens": ((total, 5), "int64"),
        "targets": ((total, 5), "int64"),
    }
    found = [
        bytes([*row, last]) for row, last in zip(arrays["tokens"], arrays["targets"][:, -1], strict=True)
    ]
    assert (arrays["tokens"][:, 1:] == arrays["targets"][:, :-1]).all()
    texts = [load_file(tmp_path / shard.name)["tokens"].tobytes() for shard in train]
    assert sorted(found) == sorted(text[at : at + 6] for text in texts for at in range(0, len(text) - 5, 5))
    evaluated = batches.microbatch(3, 1)["tokens"].astype(np.uint8)
    first = load_file(tmp_path / heldout[0].name)["tokens"]
    assert evaluated[0].tobytes() == first[:5].tobytes()
    assert evaluated[1].tobytes() == first[5:10].tobytes()


@given(count=st.integers(0, 60), length=st.integers(1, 20))
def test_windows_use_all_of_a_text_but_less_than_one_of_them(count: int, length: int) -> None:
    text = np.arange(count, dtype=np.uint8)
    samples = samples_in(count, length)
    assert samples == len(range(0, count - length, length))
    if samples:
        cut = windows(text, range(samples), length)
        assert cut["tokens"].ravel().tolist() == list(range(samples * length))
        assert cut["targets"].ravel().tolist() == list(range(1, samples * length + 1))


@given(total=st.integers(0, 10_000), largest=st.integers(1, 100))
def test_even_parts(total: int, largest: int) -> None:
    parts = even_parts(total, largest)
    assert sum(parts) == total
    assert len(parts) == -(-total // largest)
    assert max(parts, default=0) - min(parts, default=0) <= 1
    assert max(parts, default=0) <= largest


def test_a_full_shard_stays_below_8_mib(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(b"x" * (9 * 2**20))
    train, _ = write_text([tmp_path / "big.txt"], tmp_path, 0.1, 64)
    assert [shard.bytes <= 8 * 2**20 for shard in train] == [True, True]


@pytest.mark.parametrize("name", ["missing", "empty", "binary"])
def test_no_text_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0\0")
    with pytest.raises(LocalError) as caught:
        write_text([tmp_path / name], tmp_path, 0.1, 8)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-001", ExitCode.CONFIG)


@pytest.mark.parametrize(("length", "what"), [(4, ""), (5, "held-out"), (14, "held-out"), (15, "training")])
def test_too_little_text_for_a_sequence(tmp_path: Path, length: int, what: str) -> None:
    (tmp_path / "small.txt").write_text("x" * 19)  # 15 bytes to train on, 5 held out
    if not what:
        train, heldout = write_text([tmp_path / "small.txt"], tmp_path, 0.25, length)
        assert [shard.samples for shard in [*train, *heldout]] == [3, 1]
        return
    with pytest.raises(LocalError, match=what) as caught:
        write_text([tmp_path / "small.txt"], tmp_path, 0.25, length)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-003", ExitCode.CONFIG)
    assert not list(tmp_path.glob("*.safetensors"))


def test_standard_library_is_the_same_text_each_time() -> None:
    paths = python_standard_library_paths()
    assert paths == python_standard_library_paths()
    assert 1_000_000 < sum(path.stat().st_size for path in paths) <= token_shards.DEMO_BYTES
    assert all(path.suffix == ".py" for path in paths)
