"""`hetpeer plan --out` and what `hetpeer bootstrap --plan` says of files that it cannot enact."""

import json
from pathlib import Path

import pytest
import typer

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.seat_plan import PlannedModel, PlannedSeat, SeatPlan, model_digest
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.cli.swarm.device_plans import GridQuestion, SwarmQuestion, plan_grid, plan_swarm
from hetpeer.peer.cli.swarm.plan_command import plan
from hetpeer.peer.planning.model_workload import USUAL, planned_model
from hetpeer.peer.planning.plan_files import check_fits, read_plan, write_plan
from tests.bootstrap.engine import make_run
from tests.peer.test_device_plans import HOMES, written

MATRICES = {
    "names": ["ada", "bob", "eve", "zoe"],
    "latency_ms": [[0 if a == b else 5 + a + b for a in range(4)] for b in range(4)],
    "bandwidth_gbit_s": [[0 if a == b else 1.0 for a in range(4)] for b in range(4)],
}
SEAT = PlannedSeat(device="attic", blocks=(0, 4))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of four blocks."""
    return make_run(tmp_path_factory.mktemp("plans"))


def swarm_question(devices: Path, model: str, out: Path) -> SwarmQuestion:
    return SwarmQuestion(
        devices=devices,
        model=model,
        microbatches=None,
        ratio=None,
        seconds=0.0,
        seed=0,
        choices=USUAL,
        out=out,
    )


def grid_question(folder: Path, document: object, **facts: object) -> GridQuestion:
    path = folder / "matrices.json"
    path.write_text(json.dumps(document))
    sizes = {"stages": 2, "replicas": 2, "model": "gpt2", "out": folder / "grid.json"} | facts
    return GridQuestion(matrices=path, activation_gb=0.5, gradient_gb=0.5, seconds=0.0, seed=0, **sizes)


def test_a_plan_for_devices_is_written_and_fits_its_run(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_peer = HOMES.replace('name = "office"', 'name = "office"\npeer = "QmOffice"')
    out = tmp_path / "plan.json"
    plan_swarm(swarm_question(written(tmp_path, with_peer), str(run.path), out), as_json=False)
    assert f"hetpeer bootstrap DIR --plan {out}" in capsys.readouterr().out
    found = read_plan(out)
    check_fits(found, run.manifest)
    assert found.model == PlannedModel(blocks=len(run.manifest.blocks), digest=model_digest(run.manifest))
    assert found.step_s is not None
    assert {seat.device: seat.peer for _, seat in found.seats()}.items() <= {
        "attic": "",
        "office": "QmOffice",
    }.items()


def test_a_grid_is_written_with_names_and_equal_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = grid_question(tmp_path, MATRICES)
    plan_grid(asked, as_json=False)
    shown = capsys.readouterr().out
    found = read_plan(tmp_path / "grid.json")
    assert {seat.device for _, seat in found.seats()} == set(MATRICES["names"])
    first, second = found.layouts
    assert first == second
    assert found.fault(12) is None
    assert found.cost == "dt-fm"
    for pipeline in found.pipelines:
        assert " → ".join(seat.device for seat in pipeline) in shown


def test_devices_of_matrices_without_names_are_numbers(tmp_path: Path) -> None:
    plan_grid(grid_question(tmp_path, {**MATRICES, "names": None}), as_json=True)
    found = read_plan(tmp_path / "grid.json")
    assert sorted(seat.device for _, seat in found.seats()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("names", [["ada"], ["ada", "ada", "bob", "eve"], [1, 2, 3, 4], "adabobevezoe"])
def test_wrong_names_of_matrices(tmp_path: Path, names: object) -> None:
    with pytest.raises(LocalError) as refused:
        plan_grid(grid_question(tmp_path, {**MATRICES, "names": names}), as_json=True)
    assert refused.value.code == "HP-PLAN-002"


def test_a_grid_of_more_stages_than_blocks(run: RunDirectory, tmp_path: Path) -> None:
    eight = range(8)
    many = {
        "latency_ms": [[0 if a == b else 5 for a in eight] for b in eight],
        "bandwidth_gbit_s": [[0 if a == b else 1 for a in eight] for b in eight],
    }
    with pytest.raises(LocalError) as refused:
        plan_grid(grid_question(tmp_path, many, stages=8, replicas=1, model=str(run.path)), as_json=True)
    assert refused.value.code == "HP-PLAN-007"
    assert not (tmp_path / "grid.json").exists()


def test_a_grid_to_be_enacted_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--matrices with --out needs --model"):
        plan(matrices=tmp_path / "m.json", out=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("[1, 2]", "its schema is not hetpeer.plan/1"),
        ('{"schema": "hetpeer.assignment/1", "pipelines": []}', "its schema is not hetpeer.plan/1"),
        ('{"schema": "hetpeer.plan/2", "pipelines": []}', "and this version reads hetpeer.plan/1"),
        ('{"schema": "hetpeer.plan/1"}', "pipelines: Field required"),
        ('{"schema": "hetpeer.plan/1", "pipelines": []}', "pipelines: "),
        ('{"schema": "hetpeer.plan/1", "pipelines": [[{"device": "a"}]]}', "pipelines.0.0.blocks: "),
        ('{"schema": "hetpeer.plan/1", "pipelines": [[{"device": "", "blocks": [0, 1]}]]}', "pipelines.0.0"),
        ('{"schema": "hetpeer.plan/1", "pipelines": [[{"device": "a", "blocks": [0, -1]}]]}', "blocks.1"),
        (
            '{"schema": "hetpeer.plan/1", "more": 1, "pipelines": [[{"device": "a", "blocks": [0, 1]}]]}',
            "more",
        ),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(LocalError, match="is no plan that can be enacted") as refused:
        read_plan(path)
    assert (refused.value.code, why in str(refused.value)) == ("HP-PLAN-006", True), str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="No such file"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            SeatPlan(pipelines=((SEAT,),), model=PlannedModel(blocks=7)),
            "a model of 7 blocks, and this run's has 4",
        ),
        (
            SeatPlan(pipelines=((SEAT,),), model=PlannedModel(blocks=4, digest="ab")),
            "another model of 4 blocks",
        ),
        (SeatPlan(pipelines=((SEAT, SEAT),)), "attic has the blocks [0, 4), and block 4 comes next"),
        (SeatPlan(pipelines=((SEAT,), (SEAT,))), "attic has 2 places"),
    ],
)
def test_a_plan_of_another_model_or_with_wrong_cuts(run: RunDirectory, given: SeatPlan, why: str) -> None:
    with pytest.raises(LocalError, match="the plan does not fit this run") as refused:
        check_fits(given, run.manifest)
    assert (refused.value.code, why in str(refused.value)) == ("HP-PLAN-007", True), str(refused.value)


def test_a_grouped_run_cuts_itself(run: RunDirectory) -> None:
    grouped = run.manifest.model_copy(update={"averaging": AveragingSettings()})
    with pytest.raises(LocalError, match="mode grouped"):
        check_fits(SeatPlan(pipelines=((SEAT,),)), grouped)


def test_a_plan_is_written_whole_and_one_seat_a_line(run: RunDirectory, tmp_path: Path) -> None:
    seats = (SEAT.model_copy(update={"blocks": (0, 2)}), PlannedSeat(device="shed", blocks=(2, 4)))
    given = SeatPlan(pipelines=(seats,), model=planned_model(str(run.path)), step_s=1.5)
    path = tmp_path / "plan.json"
    path.write_text("old")
    write_plan(path, given)
    assert read_plan(path) == given
    assert '  [{"device": "attic", "blocks": [0, 2]},' in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
