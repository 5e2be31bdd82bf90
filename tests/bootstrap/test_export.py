"""What the author takes home is what was trained, under the author's names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.record_log import Log, read_log
from hetpeer.bootstrap.results import export as exporting
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.results.generate import BYTES, _logits, generate
from hetpeer.bootstrap.run.run_directory import Author, RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from tests.bootstrap.engine import make_complex_run, make_frozen_run, rewrite_log

pytestmark = pytest.mark.xdist_group("trained run")


def test_weights_load_into_the_authors_model(trained: RunDirectory, tmp_path: Path) -> None:
    exported = export(trained.path, tmp_path / "out" / "weights.safetensors")
    assert (exported.version, exported.steps) == (4, 4)
    model = build_model(trained.author().model, seed=99)
    model.load_state_dict(load_file(exported.weights), strict=True)
    batch = {name: torch.from_numpy(array) for name, array in trained.batches().microbatch(0, 4).items()}
    untrained = build_model(trained.author().model, seed=3)
    with torch.no_grad():
        assert model(**batch) < untrained(**batch)
    with safe_open(exported.weights, "np") as file:
        assert json.loads(file.metadata()["run"]) == {"name": "run", "id": trained.run_id, "version": 4}


def test_metrics_tell_the_surviving_curve(trained: RunDirectory, tmp_path: Path) -> None:
    exported = export(trained.path, tmp_path / "weights.safetensors")
    assert exported.metrics == tmp_path / f"{exported.weights.stem}.metrics.jsonl"
    lines = [json.loads(line) for line in exported.metrics.read_text().splitlines()]
    order = [(line["kind"], line["step"]) for line in lines]
    expected = [("evaluation", 0), ("step", 0), ("step", 1), ("evaluation", 2), ("step", 2), ("step", 3)]
    assert order == [*expected, ("evaluation", 4)]
    commits = [record for record in read_log(trained.log_path) if record["kind"] == "commit"]
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [
        commits[i]["loss"] for i in (0, 1, 3, 4)
    ]
    assert next(line for line in lines if line == lines[4])["view"] == 1


def test_the_best_checkpoint_is_exported(trained: RunDirectory, tmp_path: Path) -> None:
    """Checkpoint 2 rather than 4, once its held-out loss is lower."""
    assert export(trained.path, tmp_path / "best.safetensors", best=True).version == 4

    def lower(records: list[dict[str, Any]]) -> None:
        for record in records:
            if record["kind"] == "evaluation":
                record["loss"] = {0: 0.1, 2: 1.0, 4: 2.0}[record["step"]]

    rewrite_log(trained, lower)
    best = export(trained.path, tmp_path / "best.safetensors", best=True)
    assert best.version == 2
    newest = export(trained.path, tmp_path / "newest.safetensors")
    assert newest.version == 4
    assert load_file(best.weights).keys() == load_file(newest.weights).keys()
    assert best.weights.read_bytes() != newest.weights.read_bytes()


def test_without_an_evaluation_no_checkpoint_is_the_best(fresh: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="HP-CKPT-002") as caught:
        export(fresh.path, tmp_path / "best.safetensors", best=True)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert [*tmp_path.glob("best*")] == []


def test_untrained_run_exports_its_initial_state(fresh: RunDirectory, tmp_path: Path) -> None:
    exported = export(fresh.path, tmp_path / "weights.safetensors")
    assert exported.version == 0
    model = build_model(fresh.author().model, seed=3)
    for name, tensor in load_file(exported.weights).items():
        assert torch.equal(tensor, model.get_parameter(name))


def test_constants_in_bfloat16_come_home(tmp_path: Path) -> None:
    run = make_frozen_run(tmp_path)
    weights = load_file(export(run.path, tmp_path / "weights.safetensors").weights)
    model = build_model(run.author().model, seed=0)
    model.load_state_dict(weights, strict=True)
    assert weights["embed.weight"].dtype == weights["unused"].dtype == torch.bfloat16
    assert torch.equal(weights["again.weight"], weights["head.weight"])
    assert len(b"".join(generate(run.path, "a", tokens=2, temperature=0, seed=0))) == 2


def test_a_complex_table_comes_home_as_it_was(tmp_path: Path) -> None:
    run = make_complex_run(tmp_path)
    weights = load_file(export(run.path, tmp_path / "weights.safetensors").weights)
    model = build_model(run.author().model, seed=0)
    before = model.get_buffer("freqs_cis").clone()
    model.load_state_dict(weights, strict=True)
    assert torch.equal(weights["freqs_cis"], before)
    assert weights["freqs_cis"].is_complex()


def test_damaged_checkpoint_is_not_exported(trained: RunDirectory, tmp_path: Path) -> None:
    path = max(trained.checkpoints.iterdir())  # of the last version
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(LocalError, match="HP-CKPT-001"):
        export(trained.path, tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


def test_files_that_a_newer_checkpoint_replaces_meanwhile(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on seals a checkpoint and drops the older one, just as that one is read."""
    *_, newest = (record for record in read_log(trained.log_path) if record["kind"] == "checkpoint")
    rewrite_log(trained, lambda records: records.remove(newest))
    before = History.of(read_log(trained.log_path)).checkpoint_version
    older = trained.state_path(trained.manifest.blocks[0])
    if before:
        older = next(trained.checkpoints.glob(f"v{before:08}-block-000-*"))
    read = exporting._weights
    versions: list[int] = []

    def at_a_bad_moment(run: RunDirectory, record: Any) -> Any:
        versions.append(record["version"])
        if older.exists():
            older.unlink()
            log = Log.open(run.log_path)
            log.append(newest)
            log.close()
        return read(run, record)

    monkeypatch.setattr(exporting, "_weights", at_a_bad_moment)
    assert export(trained.path, tmp_path / "weights.safetensors").version == 4
    assert versions == [before, 4]


def test_generation_is_the_models(trained: RunDirectory) -> None:
    greedy = b"".join(generate(trained.path, "7 squared", tokens=24, temperature=0, seed=0))
    model = build_model(trained.author().model, seed=0)
    checkpoint = export(trained.path, trained.path / "weights.safetensors").weights
    model.load_state_dict(load_file(checkpoint))
    text = b"7 squared"
    for _ in range(24):  # longer than the context of 16
        logits = model(torch.tensor([list(text[-16:])]))
        text += bytes([int(logits[0, -1].argmax())])
    assert greedy == text[9:]


def test_same_seed_same_text(trained: RunDirectory) -> None:
    draws = [
        b"".join(generate(trained.path, "", tokens=20, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0]) == 20


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        ("super().forward(tokens).no_such_thing", "AttributeError"),
        ("super().forward(tokens)[0]", "[] numbers"),
        ("super().forward(tokens) * float('nan')", "NaN"),
    ],
)
def test_a_model_that_gives_no_logits_writes_no_text(
    trained: RunDirectory, tmp_path: Path, returned: str, why: str
) -> None:
    module = Path(trained.author().model.rpartition(":")[0])
    shutil.copytree(module.parent, tmp_path / "changed")
    (tmp_path / "changed" / "odd.py").write_text(
        "from gpt import GPT\nfrom tiny import build as build_tiny\n\nclass Odd(GPT):\n"
        f"    def forward(self, tokens, targets=None):\n        return {returned}\n\n"
        "def build():\n    model = build_tiny()\n    model.__class__ = Odd\n    return model\n"
    )
    author = Author(model=f"{tmp_path / 'changed' / 'odd.py'}:build", data=())
    (trained.path / "author.json").write_text(author.model_dump_json())
    with pytest.raises(LocalError) as caught:
        next(generate(trained.path, "a", tokens=1, temperature=1.0, seed=0))
    assert (caught.value.code, caught.value.exit_code) == ("HP-MODEL-010", ExitCode.CONFIG)
    assert why in caught.value.why


def test_a_model_with_more_outputs_than_text_has_values_writes_bytes() -> None:
    def model(window: torch.Tensor) -> torch.Tensor:
        return torch.arange(50_257.0).expand(1, window.shape[1], -1)

    assert int(_logits(model, torch.tensor([[7]]), BYTES).argmax()) == 255


def test_changed_model_is_refused(trained: RunDirectory, tmp_path: Path) -> None:
    module = Path(trained.author().model.rpartition(":")[0])
    shutil.copytree(module.parent, tmp_path / "changed")
    changed = tmp_path / "changed" / "tiny.py"
    author = Author(model=f"{changed}:build", data=())
    (trained.path / "author.json").write_text(author.model_dump_json())
    for before, after in (("width=32", "width=64"), ("layers=2", "layers=1")):
        changed.write_text(module.read_text().replace(before, after))
        with pytest.raises(LocalError) as caught:
            next(generate(trained.path, "a", tokens=1, temperature=0, seed=0))
        assert caught.value.code == "HP-MODEL-007"
