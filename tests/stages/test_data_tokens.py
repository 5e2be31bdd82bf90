"""Text in, shards on disk, the same text out in windows; damage is named and refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file

from hetpeer.dht.errors import ExitCode, LocalError
from hetpeer.stages.data import tokens
from hetpeer.stages.data.tokens import TokenShards, python_standard_library_paths, write_shards


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


def test_text_becomes_shards_and_batches(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "SHARD_TOKENS", 50)  # many borders to cross
    train, heldout = write_shards([corpus], tmp_path, 0.2)
    assert len(train) > 3
    assert sum(shard.tokens for shard in heldout) == len(EXPECTED) // 5
    text = b"".join(load_file(tmp_path / shard.name)["tokens"].tobytes() for shard in [*train, *heldout])
    assert text == EXPECTED
    shards = TokenShards.open(tmp_path, train)
    population = shards.population(120)
    assert population == shards.tokens - 120
    offsets = range(population)
    inputs, targets = shards.batch(offsets, 120)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.shape == targets.shape == (population, 120)
    for offset in offsets:
        assert inputs[offset].astype(np.uint8).tobytes() == EXPECTED[offset : offset + 120]
        assert targets[offset].astype(np.uint8).tobytes() == EXPECTED[offset + 1 : offset + 121]


def test_shards_are_named_by_content_and_written_the_same_twice(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first, _ = write_shards([corpus], tmp_path, 0.0)
    again, _ = write_shards([corpus], tmp_path / "again", 0.0)
    assert first == again
    data = (tmp_path / first[0].name).read_bytes()
    assert first[0].name == blake3(data).hexdigest()[:32] + ".safetensors"


def test_a_full_shard_stays_below_8_mib(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(b"x" * (9 * 2**20))
    train, _ = write_shards([tmp_path / "big.txt"], tmp_path, 0.0)
    assert [shard.bytes <= 8 * 2**20 for shard in train] == [True, True]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "tokens"])
def test_damaged_shard_is_named(corpus: Path, tmp_path: Path, damage: str) -> None:
    (shard,), _ = write_shards([corpus], tmp_path, 0.0)
    path = tmp_path / shard.name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-9] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        shard = replace(shard, tokens=shard.tokens + 1)
    with pytest.raises(LocalError, match=shard.name) as caught:
        TokenShards.open(tmp_path, [shard])
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-002", ExitCode.VERSION)


@pytest.mark.parametrize("name", ["missing", "empty", "binary"])
def test_no_text_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0\0")
    with pytest.raises(LocalError) as caught:
        write_shards([tmp_path / name], tmp_path, 0.1)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-001", ExitCode.CONFIG)


def test_too_little_text_for_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("123456789")
    train, _ = write_shards([tmp_path / "small.txt"], tmp_path, 0.0)
    shards = TokenShards.open(tmp_path, train)
    assert shards.population(9) == 1
    with pytest.raises(LocalError) as caught:
        shards.population(10)
    assert caught.value.code == "HP-DATA-003"


@pytest.mark.parametrize("offset", [-1, 2])
def test_a_window_outside_of_the_text_is_refused(tmp_path: Path, offset: int) -> None:
    (tmp_path / "small.txt").write_text("123456789")
    train, _ = write_shards([tmp_path / "small.txt"], tmp_path, 0.0)
    with pytest.raises(ValueError, match="outside"):
        TokenShards.open(tmp_path, train).batch([offset], 8)


def test_standard_library_is_the_same_text_each_time() -> None:
    paths = python_standard_library_paths()
    assert paths == python_standard_library_paths()
    assert 1_000_000 < sum(path.stat().st_size for path in paths) <= tokens.DEMO_BYTES
    assert all(path.suffix == ".py" for path in paths)
