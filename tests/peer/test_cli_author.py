"""The author's commands, as typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hetpeer.averaging.optim.adam import AdamW
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import (
    AdmissionSettings,
    AveragingSettings,
    LinkSettings,
    Outer,
    checked_share,
    widest_codec,
)
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.cli.author.audit_command import audit
from hetpeer.peer.cli.author.export_command import export
from hetpeer.peer.cli.author.generate_command import generate
from hetpeer.peer.cli.author.init_command import init
from hetpeer.peer.cli.author.init_summary import summary
from hetpeer.peer.cli.author.settings_text import settings_lines
from hetpeer.peer.cli.author.watch_command import watch
from hetpeer.peer.watching.curve_reader import PlacedPoint
from hetpeer.peer.watching.follow_curve import _line
from tests.amounts import mostly_proof
from tests.bootstrap.engine import DIGITS, Engine, make_author

app = typer.Typer()
for command in (init, audit, export, generate, watch):
    app.command()(command)


def run_command(*arguments: object, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if isinstance(done.exception, LocalError):
        raise done.exception
    assert done.exit_code == exit_code, done.output
    return done.stdout


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run made by the command line and trained."""
    folder = tmp_path_factory.mktemp("author")
    model = make_author(folder / "author")
    options = "--steps 4 --batch-size 8 --microbatch-size 2 --sequence-length 16 --eval-every 2 --seed 3"
    more = "--eval-samples 3 --checkpoint-every 2 --learning-rate 0.002 --clip-norm 0 --stages 2 --stages 1"
    text = folder / "author" / "text.txt"
    output = run_command(
        "init", folder / "run", "--model", model, "--data", text, *options.split(), *more.split()
    )
    assert f"next: hetpeer bootstrap {folder / 'run'}" in output
    assert "everybody who has the invite may take part; 5% of their work is computed a second time" in output
    run = RunDirectory.open(folder / "run")
    Engine(run, [Identity.create(folder / name) for name in ("a", "b")]).train()
    return run.path


def test_options_reach_the_manifest(run_path: Path) -> None:
    manifest = RunDirectory.open(run_path).manifest
    training = manifest.training
    assert (training.steps, training.batch_size, training.microbatch_size, training.slot_size) == (4, 8, 2, 4)
    assert (training.eval_every, training.checkpoint_every) == (2, 2)
    assert (training.eval_samples, training.eval_microbatches) == (3, 2)
    assert (training.learning_rate, training.clip_norm) == (0.002, None)
    assert manifest.trust.spot_checks == 0.05
    assert (manifest.seed, manifest.data.tokens_per_sample, manifest.name) == (3, 16, "run")
    assert [len(layout) for layout in manifest.layouts] == [2, 1]


def test_bad_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="learning_rate") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", "--learning-rate", -1)
    assert caught.value.code == "HP-RUN-001"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [60, 200])
def test_a_learning_rate_that_would_never_fall_is_refused(tmp_path: Path, schedule: str, warmup: int) -> None:
    """Without --steps there are 60."""
    options = ("--schedule", schedule, "--warmup-steps", warmup)
    with pytest.raises(LocalError, match=f"rises for {warmup} steps, and the run has 60") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", *options)
    assert caught.value.code == "HP-RUN-001"


def test_options_of_a_grouped_run_reach_the_manifest(tmp_path: Path) -> None:
    model = make_author(tmp_path / "author")
    options = (
        "--batch-size 8 --microbatch-size 2 --sequence-length 16 --mode grouped --span 3 --window all "
        "--delayed --robust --unchecked"
    )
    more = (
        "--interval 5 --outer nesterov --outer-momentum 0.8 --optimizer SGD --momentum 0.5 "
        "--staleness 1 --warmup-steps 7"
    )
    text = tmp_path / "author" / "text.txt"
    run_command("init", tmp_path / "run", "--model", model, "--data", text, *options.split(), *more.split())
    run = RunDirectory.open(tmp_path / "run")
    *_, trust = summary(run, of_library=False, adapters=False)
    assert trust.endswith("their work is not checked (nobody can check a grouped run)")
    manifest = run.manifest
    assert manifest.averaging == AveragingSettings(
        span=3,
        window_s="all",
        interval=5,
        delayed=True,
        robust=True,
        outer=Outer(learning_rate=0.7, momentum=0.8),
    )
    assert manifest.optimizer_state == ("momentum_buffer", "outer_anchor", "outer_momentum")
    adamw = manifest.training.model_copy(update={"optimizer": AdamW()})
    both = manifest.model_copy(update={"averaging": AveragingSettings(corrected=True), "training": adamw})
    assert both.optimizer_state == ("exp_avg", "exp_avg_sq", "exp_avg_beta2")
    usual = manifest.model_copy(update={"averaging": AveragingSettings(), "training": adamw})
    assert (both.upkeep.kept, both.upkeep.in_state) == (usual.upkeep.kept + 1, usual.upkeep.in_state + 1)
    assert (manifest.training.staleness, manifest.training.fresh_steps) == (1, 7)


@pytest.mark.parametrize(
    ("options", "fresh_steps"),
    mostly_proof(
        [
            ("--staleness 1 --warmup-steps 7", 7),
            ("--staleness 1 --warmup-steps 7 --fresh-steps 0", 0),
            ("--warmup-steps 7", 0),
            ("--staleness 1 --last-staleness 0 --warmup-steps 7", 7),
        ],
        [("--staleness 1 --warmup-steps 7", 7)],
    ),
)
def test_steps_overlap_once_the_rate_has_risen_unless_said_otherwise(
    tmp_path: Path, options: str, fresh_steps: int
) -> None:
    model = make_author(tmp_path / "author")
    text = tmp_path / "author" / "text.txt"
    usual = "--batch-size 8 --microbatch-size 2 --sequence-length 16"
    run_command("init", tmp_path / "run", "--model", model, "--data", text, *usual.split(), *options.split())
    manifest = RunDirectory.open(tmp_path / "run").manifest
    assert manifest.training.fresh_steps == fresh_steps
    told = dict(settings_lines(manifest)).get("staleness", "")
    assert ("at most 1, 0 steps old, stage by stage" in told) == ("--last-staleness" in options)


def test_a_staleness_that_no_stage_would_have_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    options = "--staleness 2 --last-staleness 0 --fresh-steps 0"
    with pytest.raises(LocalError, match="staleness 2 is more than 1") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", *options.split())
    assert caught.value.code == "HP-RUN-001"


SPARSE = "--batch-size 8 --microbatch-size 2 --sequence-length 16 --unchecked --reduce-codec topk2"
GROUPED = f"{SPARSE} --mode grouped --outer nesterov"


def test_a_run_of_sparse_updates_keeps_an_anchor_and_waits_for_all(tmp_path: Path) -> None:
    model, text = make_author(tmp_path / "author"), tmp_path / "author" / "text.txt"
    options = [*GROUPED.split(), "--interval", "30"]
    run_command("init", tmp_path / "run", "--model", model, "--data", text, *options)
    manifest = RunDirectory.open(tmp_path / "run").manifest
    outer = Outer(learning_rate=1.0, momentum=0.0)
    assert manifest.averaging == AveragingSettings(window_s="all", interval=30, outer=outer)
    assert manifest.optimizer_state[-2:] == ("outer_anchor", "outer_momentum")
    assert manifest.outer_rule == {"learning_rate": 1.0, "momentum": 0.0, "sparse": True}
    dense = manifest.model_copy(update={"links": LinkSettings()})
    assert manifest.upkeep.kept == dense.upkeep.kept, "nothing is kept of what is rounded"
    assert dict(settings_lines(manifest))["links"].endswith(
        "pipelines send the largest of what they have moved"
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (SPARSE, "only an outer optimizer has movements to send"),
        (f"{SPARSE} --mode grouped", "only an outer optimizer has movements to send"),
        (f"{GROUPED} --window 3", "all clusters must be in every averaging"),
        (f"{GROUPED} --delayed", "a mean must be installed at once by all clusters"),
        (f"{GROUPED} --robust", "of most numbers nothing is sent"),
    ],
)
def test_what_does_not_go_with_sparse_updates_is_named(tmp_path: Path, options: str, why: str) -> None:
    with pytest.raises(LocalError, match=why) as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", *options.split())
    assert caught.value.code == "HP-RUN-001"


def test_settings_of_an_outer_optimizer_are_not_ignored_without_it() -> None:
    options = ["--mode", "grouped", "--unchecked", "--outer-momentum", "0.8"]
    with pytest.raises(LocalError, match="no effect without an outer optimizer") as caught:
        run_command("init", "run", "--model", "m.py:f", *options)
    assert caught.value.code == "HP-RUN-001"


def test_a_correction_of_second_moments_is_not_ignored_without_them() -> None:
    options = ["--mode", "grouped", "--unchecked", "--corrected", "--optimizer", "SGD"]
    with pytest.raises(LocalError, match="--corrected has no effect with --optimizer SGD") as caught:
        run_command("init", "run", "--model", "m.py:f", *options)
    assert caught.value.code == "HP-RUN-001"


def test_options_of_a_grouped_run_are_not_ignored_in_an_exact_one(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no effect in an exact run") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", "--interval", 5)
    assert caught.value.code == "HP-RUN-001"


@pytest.mark.parametrize("window", [-1, "nan", "inf", "1h", "none"])
def test_a_wrong_window_is_named(tmp_path: Path, window: object) -> None:
    options = ("--mode", "grouped", "--unchecked", "--window", window)
    with pytest.raises(LocalError, match=f"--window {window} is no time to wait") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", *options)
    assert (caught.value.code, caught.value.why) == (
        "HP-RUN-001",
        "it is a number of seconds from 0 on, adaptive or all",
    )
    assert not (tmp_path / "run").exists()


def test_a_grouped_run_promises_no_spot_checks(tmp_path: Path) -> None:
    options = ("--mode", "grouped", "--spot-checks", 0.05)
    with pytest.raises(LocalError, match="a grouped run cannot have --spot-checks") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", *options)
    assert caught.value.code == "HP-RUN-001"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("asked", "policy", "grouped", "share"),
    [
        ((None, False), "open", False, 0.05),
        ((0.2, False), "open", False, 0.2),
        ((None, True), "open", False, 0.0),
        ((0.0, True), "open", True, 0.0),
        ((None, False), "invited", False, 0.0),
        ((0.1, False), "listed", False, 0.1),
        ((None, False), "listed", True, 0.0),
    ],
)
def test_strangers_are_checked_unless_their_author_says_otherwise(
    asked: tuple[float | None, bool], policy: str, grouped: bool, share: float
) -> None:
    spot_checks, unchecked = asked
    admission = AdmissionSettings(policy=policy)
    assert (
        checked_share(spot_checks, admission, LinkSettings(), unchecked=unchecked, grouped=grouped) == share
    )


@pytest.mark.parametrize(
    ("asked", "policy", "grouped", "codec"),
    [
        ((None, False), "open", False, "int8"),
        ((None, True), "open", False, "topk-int4"),
        ((None, False), "invited", False, "topk-int4"),
        ((0.1, False), "invited", False, "int8"),
        ((None, True), "open", True, "topk-int4"),
    ],
)
def test_an_automatic_codec_is_the_strongest_that_checks_allow(
    asked: tuple[float | None, bool], policy: str, grouped: bool, codec: str
) -> None:
    spot_checks, unchecked = asked
    admission = AdmissionSettings(policy=policy)
    found = widest_codec(admission, spot_checks, unchecked=unchecked, grouped=grouped)
    assert found == codec
    checked_share(spot_checks, admission, LinkSettings(codec=found), unchecked=unchecked, grouped=grouped)


def test_an_automatic_codec_is_not_the_same_everywhere(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="--uniform") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", "--codec", "auto", "--uniform")
    assert caught.value.code == "HP-RUN-001"


def test_an_automatic_codec_stands_in_the_manifest_by_its_name(tmp_path: Path) -> None:
    model, text = make_author(tmp_path / "author"), tmp_path / "author" / "text.txt"
    options = "--batch-size 8 --microbatch-size 2 --sequence-length 16 --unchecked --codec auto --ratio 20"
    run_command("init", tmp_path / "run", "--model", model, "--data", text, *options.split())
    links = RunDirectory.open(tmp_path / "run").manifest.links
    assert (links.codec, links.ratio, links.adaptive) == ("topk-int4", 20.0, True)


@pytest.mark.parametrize(
    "options",
    [
        "--spot-checks 0",
        "--mode grouped",
        "--codec topk-int8",
        "--codec int4",
        "--backward-codec int4",
        "--unchecked --spot-checks 0.05",
    ],
)
def test_an_open_run_without_checks_must_be_asked_for(tmp_path: Path, options: str) -> None:
    with pytest.raises(LocalError, match="--unchecked") as caught:
        run_command("init", tmp_path / "run", "--model", "m.py:f", *options.split())
    assert caught.value.code == "HP-RUN-001"
    assert not (tmp_path / "run").exists()


def test_audit_prints_one_verdict(run_path: Path) -> None:
    text = run_command("audit", run_path)
    assert "16 of 16 counted exactly once, 0 lost, 0 duplicated" in text
    assert text.splitlines()[-1].split(maxsplit=1) == ["verdict", "exactly once"]
    first, second = [line.split(maxsplit=3) for line in text.splitlines() if line.startswith("credit")]
    assert (first[1], first[3], second[1]) == ("1.", "1,024 tok x blocks (50.0%)", "2.")
    document = json.loads(run_command("audit", run_path, "--json"))
    assert (document["schema"], document["ok"], document["counted"]) == ("hetpeer.audit/1", True, 16)


def test_broken_history_fails_the_command(run_path: Path) -> None:
    log = min((run_path / "volunteers").iterdir())
    content = log.read_text()
    log.write_text(content.replace('"step":1', '"step":2', 1))
    try:
        assert "BROKEN" in run_command("audit", run_path, exit_code=1)
        assert json.loads(run_command("audit", run_path, "--json", exit_code=1))["ok"] is False
    finally:
        log.write_text(content)


def test_export_and_generate(run_path: Path, tmp_path: Path) -> None:
    output = run_command("export", run_path, tmp_path / "weights.safetensors")
    assert "the parameters after 4 of 4 committed steps" in output
    assert (tmp_path / "weights.safetensors").exists()
    text = run_command("generate", run_path, "--prompt", "7 squared", "--tokens", 5)
    assert text.startswith("7 squared")


def test_import_loads_nothing_heavy() -> None:
    code = """
import sys
import hetpeer.peer.cli.author.init_command
import hetpeer.peer.cli.author.amend_command
import hetpeer.peer.cli.author.audit_command
import hetpeer.peer.cli.author.export_command
print(sorted({"torch", "numpy", "hivemind", "pydantic", "cryptography"}.intersection(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert result.stdout.strip() == "[]"


def test_a_run_of_arrays(tmp_path: Path) -> None:
    functions = ["--model", f"{DIGITS}:build", "--loss", f"{DIGITS}:loss", "--data", f"{DIGITS}:data"]
    sizes = ["--batch-size", 40, "--microbatch-size", 20, "--steps", 2]
    output = run_command("init", tmp_path / "run", *functions, *sizes)
    assert "1,618 training samples, 2 steps" in output
    manifest = RunDirectory.open(tmp_path / "run").manifest
    assert (manifest.training.microbatches, manifest.training.slot_size) == (2, 2)
    with pytest.raises(LocalError, match="not trained on text"):
        run_command("generate", tmp_path / "run", "--prompt", "7")


def test_watch_says_what_is_predicted_right_and_the_norms_of_groups() -> None:
    fields = {"kind": "evaluation", "step": 4, "loss": 1.0, "perplexity": 2.718}
    assert _line(PlacedPoint(4, fields)) == "step 4  held-out loss 1.0000  perplexity 2.72"
    assert _line(PlacedPoint(4, fields | {"accuracy": 0.25})).endswith("  perplexity 2.72  accuracy 25.00%")
    step = {"kind": "step", "step": 4, "loss": 1.0, "norm": 0.5, "learning_rate": 1e-3}
    assert "  gradient norm 0.5  learning" in _line(PlacedPoint(5, step))
    groups = {"group_norms": {"*.bias": 0.3, "others": 0.4}}
    assert "  gradient norm 0.5, *.bias 0.3, others 0.4  learning" in _line(PlacedPoint(5, step | groups))


def test_watch_shows_the_curve_of_a_finished_run_and_ends(run_path: Path, tmp_path: Path) -> None:
    """Also of a run that an earlier version has served, which wrote no metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert not (run_path / "metrics.jsonl").exists()
    assert run_command("watch", run_path, "--tensorboard", tmp_path) == f"tensorboard --logdir {tmp_path}\n"
    points = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    steps = {point["step"] + 1: point["loss"] for point in points if point["kind"] == "step"}
    assert steps.keys() == {1, 2, 3, 4}
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {one.step: one.value for one in events.Scalars("train/loss")} == pytest.approx(steps)
    evaluated = [point["perplexity"] for point in points if point["kind"] == "evaluation"]
    assert [one.value for one in events.Scalars("eval/perplexity")] == pytest.approx(evaluated)


def test_watch_scores_checkpoints_by_a_function_of_the_author(run_path: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "scoring.py").write_text("def scores(model, batch):\n    return {'seven': 7.0}\n")
    score = ("--score", f"{tmp_path / 'scoring.py'}:scores")
    for _ in range(2):  # the second time the score is there
        run_command("watch", run_path, "--tensorboard", tmp_path, *score)
        events = EventAccumulator(str(tmp_path / "run")).Reload()
        assert [(one.step, one.value) for one in events.Scalars("eval/seven")] == [(4, 7.0)]
    assert len((run_path / "scores.jsonl").read_text().splitlines()) == 1


def test_only_a_run_can_be_watched(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="HP-RUN-00"):
        run_command("watch", tmp_path)
