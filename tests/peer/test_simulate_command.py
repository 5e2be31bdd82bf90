"""`hetpeer simulate`: scenarios in virtual time, with the real planner and protocol."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.peer.planning.model_workload import work_of
from hetpeer.peer.simulate.scenario import read_scenario
from hetpeer.peer.simulate.scenario_run import ScenarioOutcome, play
from hetpeer.stages.planning.swarms.plan_inputs import Averaging
from tests.amounts import mostly_proof
from tests.bootstrap.engine import TRAINING, make_author
from tests.peer.test_cli_main import hetpeer

HEAD = 'model = "gpt2"\nmicrobatches = 16\nsteps = 6\nseconds = 60.0\n'
DEVICES = "".join(
    f'[[device]]\nname = "d{number}"\ntflops = {tflops}\nmemory_gib = 8\nup_mbps = {up}\n'
    for number, (tflops, up) in enumerate(((4, 200), (2, 100), (2, 100), (1, 50)))
)


def scenario(folder: Path, head: str = HEAD, more: str = "") -> Path:
    path = folder / "scenario.toml"
    path.write_text(head + more + DEVICES)
    return path


def played(folder: Path, head: str = HEAD, more: str = "") -> ScenarioOutcome:
    return play(read_scenario(scenario(folder, head, more)))


EQUAL = HEAD + 'plan = "equal"\nstages = 4\n'


def test_steps_take_about_what_the_planner_predicts(tmp_path: Path) -> None:
    outcome = played(tmp_path, EQUAL)
    assert outcome.goodput == 1.0
    assert (outcome.departures, outcome.rollbacks) == (0, 0)
    assert 0.9 <= outcome.median_s / outcome.places.step_s <= 1.2


def test_devices_of_whom_only_the_pairs_are_known_are_simulated_too(tmp_path: Path) -> None:
    pairs = "bandwidth_gbit_s = [" + ", ".join(["[1, 1, 1, 1]"] * 4) + "]\n"
    path = tmp_path / "pairs.toml"
    path.write_text(EQUAL + pairs + re.sub("up_mbps = .*\n", "", DEVICES))
    outcome = play(read_scenario(path))
    assert 0.9 <= outcome.median_s / outcome.places.step_s <= 1.2


def test_a_searched_plan_is_faster_than_equal_parts_in_the_simulation_too(tmp_path: Path) -> None:
    head = HEAD.replace("60.0", "1e-9")  # beginnings alone: the same on any machine
    assert played(tmp_path, head).median_s < 0.8 * played(tmp_path, EQUAL).median_s


def test_slow_lines_that_may_compress_are_hidden_behind_computing(tmp_path: Path) -> None:
    slow = DEVICES.replace("00\n", "0\n").replace("50\n", "5\n")  # a tenth of what they carry
    path = tmp_path / "slow.toml"
    steps = []
    for more in ("", "ratio = 100.0\n"):
        path.write_text(EQUAL + more + slow)
        outcome = play(read_scenario(path))
        steps.append(outcome.median_s)
        assert 0.9 <= outcome.median_s / outcome.places.step_s <= 1.2
    assert steps[1] < 0.3 * steps[0]


def test_gradients_and_weights_on_the_way_between_gpu_and_main_memory_take_their_time(
    tmp_path: Path,
) -> None:
    """As the planner predicts: a gradient after each microbatch, the new weights after each update."""
    path = tmp_path / "offload.toml"
    beside = 'host_gib = 8\noffload = "host"\npcie_gb_s = '
    steps = []
    for rate in (1e6, 0.2):
        path.write_text(EQUAL + DEVICES.replace("memory_gib = 8\n", f"memory_gib = 4\n{beside}{rate}\n"))
        outcome = play(read_scenario(path))
        steps.append(outcome.median_s)
        assert 0.9 <= outcome.median_s / outcome.places.step_s <= 1.35
    assert steps[1] > 1.5 * steps[0]


@pytest.mark.parametrize("more", ['dtype = "bf16"\n', "recompute = true\n"])
def test_how_a_run_is_trained_is_said_by_its_manifest_alone(tmp_path: Path, more: str) -> None:
    with pytest.raises(LocalError, match="is not a scenario") as caught:
        read_scenario(scenario(tmp_path, run_of(tmp_path), more))
    assert "the manifest of a run says them" in caught.value.why
    assert read_scenario(scenario(tmp_path, HEAD, more)).work.microbatches == 16


def test_stragglers_and_churn_cost_what_they_cost_and_nothing_is_lost(tmp_path: Path) -> None:
    still = played(tmp_path, EQUAL)
    slow = played(tmp_path, EQUAL, "[stragglers]\nchance = 1.0\nsleep_s = 60.0\n")
    assert slow.median_s > still.median_s + 30.0
    churned = played(
        tmp_path, EQUAL.replace("steps = 6", "steps = 12"), "[churn]\nmtbf_minutes = 10\naway_s = 20\n"
    )
    assert churned.departures > 0
    assert churned.goodput < 1.0
    assert churned.seconds > still.seconds
    assert churned.document()["steps_an_hour"] == 3600.0 * churned.steps / churned.counted_s


@pytest.mark.parametrize("steps", mostly_proof([3, 6, 12], [3]))
def test_as_many_steps_an_hour_as_their_time_says(tmp_path: Path, steps: int) -> None:
    """Joining is left out of both, and so are the steps in which windows are learned: eight, or half of
    all.
    """
    outcome = played(tmp_path, EQUAL.replace("steps = 6", f"steps = {steps}"))
    assert outcome.steps == len(outcome.step_s) == steps - min(8, steps // 2)
    assert outcome.document()["steps_an_hour"] == pytest.approx(3600.0 / outcome.median_s, rel=0.05)
    assert outcome.seconds > outcome.counted_s


def run_of(folder: Path, **settings: Any) -> str:
    """The first line of a scenario of such a run."""
    model = make_author(folder / "author")
    data = [folder / "author" / "text.txt"]
    run = create_run(folder / "run", model=model, data=data, seed=3, sequence_length=16, **settings)
    return f'model = "{run.path}"\nsteps = 12\nmicrobatches = 4\nplan = "equal"\nstages = 4\n'


@pytest.mark.proof
def test_steps_of_a_run_overlap_in_the_simulation_as_they_do_in_it(tmp_path: Path) -> None:
    steps = []
    slow = re.sub(r"tflops = (\d)", r"tflops = \1e-6", DEVICES)  # the model is small
    for staleness in (0, 1):
        folder = tmp_path / str(staleness)
        folder.mkdir()
        training = TRAINING.model_copy(update={"staleness": staleness})
        path = folder / "scenario.toml"
        path.write_text(run_of(folder, training=training) + slow)
        outcome = play(read_scenario(path))
        assert 0.9 <= outcome.median_s / outcome.places.step_s <= 1.2
        steps.append(outcome.median_s)
    assert steps[1] < 0.8 * steps[0]


def test_a_run_of_pipelines_that_average_is_not_taken_for_an_exact_one(tmp_path: Path) -> None:
    head = run_of(tmp_path, averaging=AveragingSettings(interval=3))
    with pytest.raises(LocalError, match="mode grouped") as caught:
        read_scenario(scenario(tmp_path, head))
    assert (caught.value.code, caught.value.exit_code) == ("HP-SIM-003", ExitCode.CONFIG)
    work = work_of(head.split('"')[1], None)
    assert (work.staleness, work.averaging) == (0, Averaging(interval=3))


def test_what_does_not_fit_is_told_with_what_would_be_enough(tmp_path: Path) -> None:
    head = HEAD.replace("gpt2", "gpt3-1.3b").replace("60.0", "1.0")
    small = DEVICES.replace("memory_gib = 8", "memory_gib = 4")
    path = tmp_path / "small.toml"
    path.write_text(head + small)
    with pytest.raises(LocalError) as caught:
        play(read_scenario(path))
    more = float(str(caught.value.fix).split("it needs ")[1].split(" GiB more on d0")[0])
    path.write_text(head + small.replace("memory_gib = 4", f"memory_gib = {4 + more}", 1))
    assert play(read_scenario(path)).median_s > 0


def test_a_scenario_is_its_seed(tmp_path: Path) -> None:
    one, again, other = (played(tmp_path, EQUAL + f"seed = {seed}\n") for seed in (1, 1, 2))
    assert one.document() == again.document()
    assert one.seconds != other.seconds


def test_what_the_weight_of_departures_saves_is_printed(tmp_path: Path) -> None:
    """d0 is the fastest, and alone the fastest pipeline; but it leaves every two minutes."""
    head = HEAD.replace("60.0", "1e-9").replace("steps = 6", "steps = 24") + "away_s = 30\n"
    steady = DEVICES.replace("memory_gib", "leaves_per_hour = 0\nmemory_gib")
    path = tmp_path / "leaving.toml"
    path.write_text(head + steady.replace("per_hour = 0", "per_hour = 30", 1))
    document = json.loads(hetpeer("simulate", str(path), "--json").stdout)
    found = document["reliability"]
    assert (document["departures"], found["expected"]["rollbacks_an_hour"]) == (0, 0.0)
    assert found["saved"]["rollbacks"] == found["without"]["rollbacks"] > 0
    assert found["saved"]["again"] > 0
    printed = hetpeer("simulate", str(path)).stdout
    assert re.search(r"saved +\d+ roll-backs, \d+ microbatches done again; ", printed)


def test_departures_are_given_once(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    path.write_text(EQUAL + "[churn]\nmtbf_minutes = 10\n" + DEVICES + "leaves_per_hour = 1\n")
    with pytest.raises(LocalError, match="give one of both"):
        read_scenario(path)


def test_what_belongs_into_the_file_of_devices_is_named(tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").write_text(DEVICES)
    path = tmp_path / "scenario.toml"
    path.write_text(EQUAL + 'devices = "swarm.toml"\naway_s = 30\n')
    with pytest.raises(LocalError, match=r"away_s: the devices are in swarm\.toml"):
        read_scenario(path)


def test_a_file_of_devices_may_stand_in_the_scenario(tmp_path: Path) -> None:
    status = "latency_ms = 40\nbetween_s = 0.3\naway_s = 30\n"  # the head of hetpeer status --devices
    assert len(read_scenario(scenario(tmp_path, EQUAL, status)).devices.names) == 4


def test_the_command_prints_it(tmp_path: Path) -> None:
    path = scenario(tmp_path, EQUAL)
    document = json.loads(hetpeer("simulate", str(path), "--json").stdout)
    assert document["schema"] == "hetpeer.simulation/1"
    assert [stage["device"] for stage in document["pipelines"][0]] == ["d0", "d1", "d2", "d3"]
    assert "d0 0-2 → d1 3-5" in hetpeer("simulate", str(path)).stdout


@pytest.mark.parametrize(
    ("head", "more", "code", "word"),
    [
        ("steps = 6\n", "", "HP-SIM-001", "model"),
        (HEAD.replace("steps = 6", "steps = 1"), "", "HP-SIM-001", "steps"),
        (HEAD + 'plan = "equal"\n', "", "HP-SIM-001", "stages"),
        (HEAD + 'devices = "other.toml"\n', "", "HP-SIM-001", "one of both"),
        (HEAD + 'devices = "other.toml"\naway_s = 30\n', "", "HP-SIM-001", "one of both"),
        (HEAD + "between = 1\n", "", "HP-SIM-001", "between: nothing of that name is known here"),
        (HEAD, "[churn]\nmtbf_minutes = 0\n", "HP-SIM-001", "churn.mtbf_minutes"),
        (HEAD, "[churn]\nmtbf_minutes = 1e308\n", "HP-SIM-001", "churn.mtbf_minutes"),
        (HEAD, "[churn]\nmtbf_minutes = nan\n", "HP-SIM-001", "churn.mtbf_minutes"),
        (HEAD, "[churn]\nmtbf_minutes = 9\naway_s = inf\n", "HP-SIM-001", "churn.away_s"),
        (HEAD.replace("gpt2", "gpt3-6.7b"), "", "HP-PLAN-005", "memory"),
        (HEAD.replace("gpt2", "nonsense"), "", "HP-PLAN-004", "nonsense"),
        ("model = \n", "", "HP-SIM-001", "Invalid"),
        (HEAD.replace("gpt2", "gpt3-6.7b") + 'plan = "equal"\nstages = 2\n', "", "HP-SIM-001", "equal parts"),
    ],
)
def test_bad_scenarios_are_refused_by_name(
    tmp_path: Path, head: str, more: str, code: str, word: str
) -> None:
    with pytest.raises(LocalError) as caught:
        play(read_scenario(scenario(tmp_path, head, more)))
    assert caught.value.code == code
    assert word in str(caught.value)
    assert caught.value.exit_code in (ExitCode.CONFIG, ExitCode.TOO_SMALL)


@pytest.mark.proof
def test_who_never_comes_to_the_end_is_told_so(tmp_path: Path) -> None:
    """Steps of minutes, and everybody vanishes every few seconds."""
    with pytest.raises(LocalError) as caught:
        played(tmp_path, EQUAL, "[churn]\nmtbf_minutes = 0.1\naway_s = 30\n")
    assert caught.value.code == "HP-SIM-002"
