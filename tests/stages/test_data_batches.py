"""From shards to microbatches: every sample where the order says, and no damaged shard is believed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import save

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data import array_shards
from hetpeer.stages.data.array_shards import write_samples
from hetpeer.stages.data.microbatches import DataPlan, MicrobatchReader
from hetpeer.stages.data.shards import ArraySpec, ShardFile, write_shard
from hetpeer.stages.data.token_shards import sample_of, write_text


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataPlan:
    """40 samples of 12 bytes in shards of at most 7; 4 held out; steps of 10 in microbatches of 4, 4 and
    2.
    """
    monkeypatch.setattr(array_shards, "SHARD_BYTES", 7 * 12)
    samples = ({"x": np.int64(number), "y": np.float32(-number)} for number in range(40))
    sample, train, heldout = write_samples(samples, tmp_path, 0.1, seed=5)
    return DataPlan(
        kind="arrays",
        sample=sample,
        train=tuple(train),
        heldout=tuple(heldout),
        seed=5,
        batch_size=10,
        microbatch_size=4,
        eval_microbatches=2,
    )


def test_an_epoch_of_microbatches_has_every_training_sample_once(plan: DataPlan, tmp_path: Path) -> None:
    batches = MicrobatchReader(tmp_path, plan)
    assert (plan.microbatches, plan.sizes, list(plan.evaluation)) == (3, [4, 4, 2], [3, 4])
    steps = [[batches.microbatch(step, number) for number in range(3)] for step in range(8)]
    assert [len(part["x"]) for part in steps[0]] == plan.sizes
    stream = np.concatenate([part["x"] for step in steps for part in step])
    held_out = batches.microbatch(0, 3)["x"]
    first, second = stream[:36], stream[36:72]
    assert sorted([*first, *held_out]) == sorted([*second, *held_out]) == list(range(40))
    assert first.tolist() != second.tolist()
    for part in steps[0]:
        assert (part["x"] == -part["y"]).all()
        assert (part["x"].dtype, part["y"].dtype) == (np.int64, np.float32)


def test_an_evaluation_of_all_held_out_samples_has_each_once(plan: DataPlan, tmp_path: Path) -> None:
    once = replace(plan, microbatch_size=3, eval_microbatches=2, eval_samples=4)
    batches = MicrobatchReader(tmp_path, once)
    parts = [batches.microbatch(5, number)["x"] for number in once.evaluation]
    stored = [x for shard in plan.heldout for x in batches.open(shard)["x"].tolist()]
    assert (list(map(len, parts)), np.concatenate(parts).tolist()) == ([3, 1], stored)
    assert (once.evaluation_weights, plan.evaluation_weights) == ({4: 3, 5: 1}, {3: 1, 4: 1})


def test_evaluations_take_the_first_held_out_samples_at_every_step(plan: DataPlan, tmp_path: Path) -> None:
    batches = MicrobatchReader(tmp_path, plan)
    stored = [x for shard in plan.heldout for x in batches.open(shard)["x"].tolist()]
    for step in (0, 7):
        assert batches.microbatch(step, 3)["x"].tolist() == stored
        assert batches.microbatch(step, 4)["x"].tolist() == stored  # there are four: it begins again


def test_shards_are_those_that_are_read(plan: DataPlan) -> None:
    for step in range(9):
        whole: list[ShardFile] = []
        for number in range(3):
            read = list(dict.fromkeys(shard for shard, _ in plan.pieces(step, number)))
            assert plan.shards(step, number) == read
            whole += read
        assert plan.shards_of_step(step) == list(dict.fromkeys(whole))


def test_only_the_shards_of_a_microbatch_are_needed(plan: DataPlan, tmp_path: Path) -> None:
    needed = {shard.name for shard in plan.shards(2, 1)}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in needed:
            path.unlink()
    batches = MicrobatchReader(tmp_path, plan)
    assert len(batches.microbatch(2, 1)["x"]) == 4
    missing = next(step for step in range(4) if plan.shards(step, 1)[0].name not in needed)
    with pytest.raises(LocalError, match="HP-DATA-002"):
        batches.microbatch(missing, 1)


def test_the_plan_of_a_manifest(plan: DataPlan) -> None:
    """As msgpack gives it: lists for tuples, and fields that we do not know."""
    shards = [
        {"name": s.name, "blake3": s.blake3, "bytes": s.bytes, "samples": s.samples, "x": 1}
        for s in plan.train
    ]
    held_out = [
        shards[0] | {"name": s.name, "blake3": s.blake3, "bytes": s.bytes, "samples": s.samples}
        for s in plan.heldout
    ]
    sample = {"x": {"dtype": "int64", "shape": [], "more": 1}, "y": {"dtype": "float32", "shape": []}}
    training = {"batch_size": 10, "microbatch_size": 4, "eval_microbatches": 2, "steps": 3}
    data = {"kind": "arrays", "sample": sample, "train": shards, "heldout": held_out}
    assert DataPlan.of({"seed": 5, "data": data, "training": training, "name": "x"}) == plan


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [flipped, lambda content: content[:-1], None])
def test_a_damaged_shard_is_named(
    plan: DataPlan, tmp_path: Path, damage: Callable[[bytes], bytes] | None
) -> None:
    (shard, *_) = plan.train
    path = tmp_path / shard.name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LocalError, match=shard.name) as caught:
        MicrobatchReader(tmp_path, plan).open(shard)
    assert (caught.value.code, caught.value.exit_code) == ("HP-DATA-002", ExitCode.VERSION)


def file_of(folder: Path, content: bytes, samples: int) -> ShardFile:
    """A shard of any content, rightly named."""
    digest = blake3(content).hexdigest()
    (folder / digest[:32]).write_bytes(content)
    return ShardFile(name=digest[:32], blake3=digest, bytes=len(content), samples=samples)


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


ENTRY = {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        bytes(100),
        (2**63).to_bytes(8, "little") + bytes(50),
        (50).to_bytes(8, "little") + b"[" * 50,
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        header(x=7),
        header(x=ENTRY | {"dtype": "BF16"}),
        header(x=ENTRY | {"data_offsets": [0, 17]}),
        header(x=ENTRY | {"data_offsets": [0, "16"]}),
        header(x=ENTRY | {"shape": [3]}),
        header(x=ENTRY, y=ENTRY | {"dtype": "F32", "shape": [2, 2]}),
        save({"x": np.zeros(2, dtype=np.int64)}),
        save({"x": np.zeros(3, dtype=np.int64), "y": np.zeros(3, dtype=np.float32)}),
        save({"x": np.zeros(2, dtype=np.int64), "y": np.zeros(2, dtype=np.float64)}),
        save({"x": np.zeros(2, dtype=np.int64), "y": np.zeros(2, dtype=np.float32), "z": np.zeros(2)}),
    ],
)
def test_what_is_no_shard_of_the_run_is_refused(plan: DataPlan, tmp_path: Path, content: bytes) -> None:
    """Even if the manifest's author signed it."""
    shard = file_of(tmp_path, content, samples=2)
    with pytest.raises(LocalError) as caught:
        MicrobatchReader(tmp_path, plan).open(shard)
    assert caught.value.code == "HP-DATA-002"


def test_a_text_shard_must_hold_as_many_samples_as_it_says(plan: DataPlan, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 100)
    (shard,), _ = write_text([tmp_path / "text.txt"], tmp_path, 0.2, 10)
    text = replace(plan, kind="text", sample=sample_of(10))
    assert MicrobatchReader(tmp_path, text).open(shard)["tokens"].shape == (81,)
    for wrong in (
        replace(shard, samples=shard.samples + 1),
        write_shard(tmp_path, {"tokens": np.zeros((2, 41), dtype=np.uint8)}, 8),
        write_shard(tmp_path, {"tokens": np.zeros(81, dtype=np.int8)}, 8),
        write_shard(tmp_path, {"text": np.zeros(81, dtype=np.uint8)}, 8),
    ):
        with pytest.raises(LocalError, match="HP-DATA-002"):
            MicrobatchReader(tmp_path, text).open(wrong)


def test_samples_are_read_the_same_whatever_was_read_before(plan: DataPlan, tmp_path: Path) -> None:
    used, fresh = MicrobatchReader(tmp_path, plan), MicrobatchReader(tmp_path, plan)
    for step in (5, 2, 9, 0):
        used.microbatch(step, 1)
    assert used.microbatch(4, 2)["x"].tolist() == fresh.microbatch(4, 2)["x"].tolist()
    assert plan.sample == {"x": ArraySpec(dtype="int64", shape=()), "y": ArraySpec(dtype="float32", shape=())}


def test_a_microbatch_weighs_what_its_samples_weigh(plan: DataPlan, tmp_path: Path) -> None:
    batches = MicrobatchReader(tmp_path, plan)
    stored = [x for shard in (*plan.train, *plan.heldout) for x in batches.open(shard)["x"].tolist()]
    of = {tuple(x) if isinstance(x, list) else x: 0.1 * (number + 1) for number, x in enumerate(stored)}
    weighted = replace(plan, weights=np.array(list(of.values()), dtype=np.float32))
    for step in (0, 3, 8):
        for number, weight in enumerate(weighted.training_weights(step)):
            samples = batches.microbatch(step, number)["x"].tolist()
            assert weight == pytest.approx(sum(of[x] for x in samples))
    for number, weight in weighted.evaluation_weights.items():
        assert weight == pytest.approx(sum(of[x] for x in batches.microbatch(0, number)["x"].tolist()))
    assert plan.training_weights(3) == tuple(plan.sizes)
