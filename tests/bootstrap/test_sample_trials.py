"""A microbatch that volunteers cannot compute is computed by a process of the reliable peer: real blocks,
real data, the real sandbox.
"""

import shutil
from pathlib import Path

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.service.sample_trials import NAMED, SampleTrials, named
from hetpeer.bootstrap.state.effects import BadSample, TryMicrobatch
from hetpeer.bootstrap.storage.checkpoints import initial_record
from tests.bootstrap.bad_data import make_run

TRAINING = TrainingSettings(
    steps=6, batch_size=9, microbatch_size=3, slot_size=1, eval_every=3, eval_microbatches=2
)
MASKED, BEYOND = tuple(range(20, 50)), (52,)
"""Some microbatches have masked samples alone; one has a word beyond the embedding."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("bad"), TRAINING, masked=MASKED, beyond=BEYOND)


def microbatches(run: RunDirectory):
    """(batch, id) → its labels and words."""
    reader = run.batches()
    return {(b, i): reader.microbatch(b, i) for b in range(6) for i in range(3)}


async def found(run: RunDirectory, batch: int, number: int) -> BadSample | None:
    trial = TryMicrobatch(0, batch, number)
    return await SampleTrials(run).find(trial, initial_record(run.manifest))


async def test_a_microbatch_without_a_label_is_found_with_all_its_samples(run):
    masked = [key for key, arrays in microbatches(run).items() if (arrays["label"] == -100).all()]
    bad = await found(run, *masked[0])
    assert bad is not None
    assert "is not finite" in bad.why
    assert bad.where.startswith("samples ")
    assert len(bad.where.split(" of ")[0].split(",")) == 3


async def test_the_sample_with_an_id_beyond_the_embedding_is_named(run):
    key, arrays = next((k, a) for k, a in microbatches(run).items() if (a["word"] == 190).any())
    bad = await found(run, *key)
    assert bad is not None
    assert "aten.embedding.default cannot compute" in bad.why
    ((shard, piece),) = run.manifest.data_plan.pieces(*key)
    row = int(piece.samples[(arrays["word"] == 300).any(1).argmax()])
    assert bad.where == f"sample {row} of shard {shard.name}"


async def test_a_microbatch_that_can_be_computed_is_found_to_be_sound(run):
    key = next(
        k
        for k, a in microbatches(run).items()
        if (a["label"] == -100).any() and not (a["label"] == -100).all() and (a["word"] != 190).all()
    )
    assert await found(run, *key) is None


async def test_where_the_data_is_missing_volunteers_decide(run, tmp_path: Path, caplog):
    shutil.copytree(run.path, tmp_path / "copy")
    for shard in (tmp_path / "copy" / "data").iterdir():
        shard.unlink()
    assert await found(RunDirectory.open(tmp_path / "copy"), 0, 0) is None
    assert "cannot be tried here, so volunteers decide" in caplog.text


def test_many_samples_are_counted():
    assert named([("a", 3)]) == "sample 3 of shard a"
    assert named([("a", 3), ("b", 4), ("a", 5)]) == "samples 3, 5 of shard a, 4 of shard b"
    assert named([("a", number) for number in range(NAMED + 2)]).endswith("6, 7 of shard a and 2 more")
