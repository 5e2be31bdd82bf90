"""What a run's places take, from its manifest: all who count have the same numbers."""

import numpy as np
import pytest

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.manifest import Manifest
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.step_workload import demand_of, of_manifest
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.parameter_reads import cast_count
from hetpeer.stages.pipeline.place_memory import PlaceDemand
from tests.bootstrap.engine import TRAINING, make_author, make_run


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("workload")
    return create_run(
        folder / "run",
        model=make_author(folder / "author"),
        data=[folder / "author" / "text.txt"],
        sequence_length=16,
        training=TRAINING.model_copy(update={"dtype": "bf16"}),
    )


def changed(manifest: Manifest, **training: object) -> Manifest:
    return manifest.model_copy(update={"training": manifest.training.model_copy(update=training)})


def test_coordinator_and_planner_count_the_same(bf16: RunDirectory) -> None:
    manifest = changed(bf16.manifest, staleness=1)
    demands = [demand_of(manifest, block) for block in manifest.blocks]
    work = of_manifest(manifest, 8)
    whole = work.place(0, len(work))
    assert whole == PlaceDemand.of_all(demands)
    for kind in Offload:
        for apart in (False, True):
            room = PlaceDemand.of_all(demands).room(kind, apart=apart)
            assert whole.room(kind, apart=apart) == room
            assert room.total > 0
    assert [cost.memory for cost in coordinator_config(bf16).costs] == [
        demand_of(bf16.manifest, block) for block in bf16.manifest.blocks
    ]
    assert np.array_equal(work.elements, [block.vector_count for block in manifest.blocks])


def test_a_manifest_says_how_much_of_a_block_bfloat16_halves(bf16: RunDirectory) -> None:
    """The count is of the graph; corrections of stale gradients need all bits, and then nothing is halved."""
    counts = [cast_count(bf16.block_spec(block)) for block in bf16.manifest.blocks]
    assert [block.cast_count for block in bf16.manifest.blocks] == counts
    assert sum(counts) > 0
    demands = [demand_of(bf16.manifest, block) for block in bf16.manifest.blocks]
    assert [demand.halved for demand in demands] == counts
    assert all(demand.copies <= demand.activations for demand in demands)
    corrected = changed(bf16.manifest, staleness=1, compensation=0.5)
    assert {demand_of(corrected, block).halved for block in corrected.blocks} == {0}


def test_a_run_in_float32_is_read_by_versions_that_know_no_such_count(tmp_path) -> None:
    run = make_run(tmp_path)
    assert {block.cast_count for block in run.manifest.blocks} == {0}
    assert all("cast_count" not in block.model_dump() for block in run.manifest.blocks)
