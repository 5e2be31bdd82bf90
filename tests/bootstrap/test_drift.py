"""One machine's run equals the blocks' run, and a trainer that is off by a thousandth is found out."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetpeer.bootstrap.log.record_log import Log, read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.identity.peer_identity import Identity
from tests.bootstrap.drift import GRADIENT_GATE, LOSS_GATE, PARAMETER_GATE, compare
from tests.bootstrap.engine import Engine, make_frozen_run
from tests.reference import eager_training, reference_run
from tests.reference.reference_run import ReferenceRun, run_reference
from tests.swarm.forkserver import ForkServer

pytestmark = [pytest.mark.xdist_group("trained run"), pytest.mark.usefixtures("forked_replay")]


@pytest.fixture(scope="module")
def one_machine(fresh_template: RunDirectory, server: ForkServer) -> Iterator[ReferenceRun]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_run, "run_child", server.run_child)
        yield run_reference(fresh_template.path, 4)


def append(run: RunDirectory, *records: dict[str, Any]) -> None:
    log = Log.open(run.log_path)
    for record in records:
        log.append(record)
    log.close()


def test_plain_trainer_equals_the_reference(trained: RunDirectory, one_machine: ReferenceRun) -> None:
    comparison = compare(trained.path, one_machine)
    assert comparison.problems == []
    assert comparison.ok
    assert comparison.steps == 4
    assert 0 <= comparison.max_relative_loss_difference <= LOSS_GATE
    assert comparison.relative_moment_difference is not None
    assert comparison.relative_parameter_difference is not None
    assert comparison.relative_moment_difference <= GRADIENT_GATE / 10  # the gates have room
    assert comparison.relative_parameter_difference <= PARAMETER_GATE / 10


def test_gradient_off_by_a_thousandth_is_found(
    fresh: RunDirectory, volunteers: list[Identity], one_machine: ReferenceRun
) -> None:
    Engine(fresh, volunteers, gradient_scale=1.001).train()
    comparison = compare(fresh.path, one_machine)
    assert not comparison.ok
    # AdamW divides the scale out again: the losses alone would not have told.
    assert comparison.max_relative_loss_difference <= LOSS_GATE
    assert comparison.max_relative_norm_difference > GRADIENT_GATE
    assert comparison.relative_moment_difference is not None
    assert comparison.relative_moment_difference > GRADIENT_GATE


def test_parameters_off_by_two_thousandths_are_found(
    fresh: RunDirectory, volunteers: list[Identity], one_machine: ReferenceRun
) -> None:
    engine = Engine(fresh, volunteers)
    engine.train()
    for flat in engine.flats:
        flat.mul_(1.002)
    append(fresh, engine.checkpoint(4))
    assert compare(fresh.path, one_machine).problems[0].startswith("final parameters differ")


@pytest.mark.parametrize(("kind", "number"), [("commit", 2), ("evaluation", 1)])
@pytest.mark.parametrize("factor", [1 + 3e-6, float("nan")])
def test_loss_off_by_three_millionths_is_found(
    trained: RunDirectory, one_machine: ReferenceRun, kind: str, number: int, factor: float
) -> None:
    records = list(read_log(trained.log_path))
    [record for record in records if record["kind"] == kind][-number]["loss"] *= factor
    trained.log_path.unlink()
    append(trained, *records)
    comparison = compare(trained.path, one_machine)
    assert comparison.problems[0].startswith("losses differ")


def test_reference_evaluates_before_every_second_step_and_at_the_end(one_machine: ReferenceRun) -> None:
    assert list(one_machine.records["evaluations"]) == ["0", "2", "4"]
    assert len(one_machine.records["losses"]) == len(one_machine.records["norms"]) == 4


def test_constants_in_bfloat16_are_no_obstacle(tmp_path: Path) -> None:
    run = make_frozen_run(tmp_path)
    assert run_reference(run.path, 1).state["head.weight"].dtype == np.float32


def test_reference_needs_the_author(fresh: RunDirectory) -> None:
    (fresh.path / "author.json").unlink()
    with pytest.raises(RuntimeError, match=r"author\.json"):
        run_reference(fresh.path, 1)


def test_reference_shares_nothing_with_the_engine_but_the_data_order() -> None:
    tree = ast.parse(Path(eager_training.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    ours = {module for module in modules if module.startswith("hetpeer")}
    assert ours == {
        "hetpeer.bootstrap.model_checks.drawn_dropout",
        "hetpeer.stages.data.microbatches",
        "hetpeer.stages.operators.random_draws",
    }


def test_reference_is_short_enough_to_be_read_at_once() -> None:
    assert len(Path(eager_training.__file__).read_text().splitlines()) <= 80
