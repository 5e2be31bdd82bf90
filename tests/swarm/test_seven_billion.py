"""benchmarks/seven_billion.py on a small model: authored, fetched, and trained in workers; and its plan."""

from pathlib import Path

import pytest

from benchmarks.seven_billion import GIB, author, parsed, planned, train, write_model
from hetpeer.bootstrap.run.run_directory import RunDirectory

SMALL = (
    *("--layers=2", "--width=64", "--hidden=128", "--heads=2", "--vocabulary=512", "--context=16"),
    *("--stages=2", "--threads=1"),
)


@pytest.mark.swarm
async def test_each_stage_of_a_small_model_is_fetched_and_trained(tmp_path: Path) -> None:
    options = parsed([*SMALL])
    made = author(write_model(tmp_path, options), tmp_path, options)
    assert 0 < made["memory_gib"] < 2
    run = RunDirectory.open(tmp_path / "run")
    figures = await train(run, tmp_path, options)
    assert [one["block"] for one in figures] == [0, len(run.manifest.blocks) - 1], "embedding and head"
    assert all(one["begun_as_signed"] and one["updated"] for one in figures)
    assert figures[0]["loss"] is None
    assert 5 < figures[1]["loss"] < 8, "of 512 tokens about ln 512"
    assert all(0 < one["planned_bytes"] < one["worker_bytes"] < GIB / 2 for one in figures)


@pytest.mark.proof
def test_eight_volunteers_with_small_gpus_hold_seven_billion_parameters(tmp_path: Path) -> None:
    options = parsed(["--planned-context=128"])
    plan = planned(write_model(tmp_path, options), options)
    assert plan["parameters"] == 6_738_415_616, "Llama's"
    assert len(plan["stages"]) == 8
    assert all(stage["fits"] for stage in plan["stages"])
    options = parsed(["--planned-context=128", "--stages=2"])
    assert not any(stage["fits"] for stage in planned(write_model(tmp_path, options), options)["stages"])
