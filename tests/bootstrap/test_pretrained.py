"""Models of transformers by name: what they are trained from, what is kept of them, what is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from pyarrow.parquet import write_table
from safetensors.torch import load_file, save_file

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.model_checks.data_fit import check_positions
from hetpeer.bootstrap.pretrained.kept import FOLDER, KeptFiles
from hetpeer.bootstrap.pretrained.source import ModelSource
from hetpeer.bootstrap.pretrained.tasks import Task
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.data.extremes import IGNORED
from tests.bootstrap.engine import TRAINING
from tests.bootstrap.pretrained_models import LLAMA, bert, llama, samples_for, t5, vit
from tests.bootstrap.test_create import assert_fails
from tests.bootstrap.test_run_data import arrays_of
from tests.bootstrap.written_data import CHATS, TEXTS, VOCABULARY, tokenizer_folder, written


def made(tmp_path: Path, model: Path, data: Path | str, **options: Any) -> RunDirectory:
    arguments: dict[str, Any] = {"sequence_length": 64, "training": TRAINING, **options}
    return create_run(tmp_path / "run", model=f"hf:{model}", data=[data], **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.proof)])
def test_any_stored_dtype_becomes_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, said = llama(tmp_path / "model", dtype), list[str]()
    run = made(tmp_path, folder, written(tmp_path / "a.parquet", CHATS, "messages"), tell=said.append)
    name = str(dtype).removeprefix("torch.")
    assert f"the checkpoint is stored as {name}; it is trained as float32" in said
    stored = load_file(folder / "model.safetensors")
    weights = load_file(export(run.path, tmp_path / "weights.safetensors").weights)
    assert weights.keys() - stored.keys() == {"lm_head.weight"}  # tied
    for name, tensor in stored.items():
        assert tensor.dtype == dtype
        assert torch.equal(weights[name], tensor.float())
    assert sorted(arrays_of(run)) == ["attention_mask", "input_ids", "labels"]


def test_it_is_trained_by_its_own_loss_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    data = written(tmp_path / "a.parquet", CHATS, "messages")
    run = made(tmp_path, folder, data, sequence_length=128)
    arrays = arrays_of(run)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    said = sorted(own.decode(row[row != IGNORED]) for row in arrays["labels"])
    assert said == sorted(f"{text}no more" for text in TEXTS)
    assert run.author().model == f"hf:{folder}"
    assert not run.manifest.training.recompute


def test_what_export_and_generate_need_stays_though_the_source_goes(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    template = transformers.AutoTokenizer.from_pretrained(folder).chat_template
    run = made(tmp_path, folder, written(tmp_path / "a.jsonl", TEXTS))
    shutil.rmtree(folder)
    kept = KeptFiles(run.path / FOLDER)
    assert sum(path.stat().st_size for path in kept.folder.iterdir()) < 100_000
    model = kept.model()
    model.load_state_dict(own.state_dict())
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(model.eval()(ids).logits, own(ids).logits)
    assert model.config.use_cache
    assert kept.tokenizer().template == template


def test_a_masked_language_model_learns_what_is_hidden(tmp_path: Path) -> None:
    run = made(tmp_path, bert(tmp_path / "model"), written(tmp_path / "a.jsonl", TEXTS * 4))
    arrays = arrays_of(run)
    ids, labels = arrays["input_ids"], arrays["labels"]
    targets = labels != IGNORED
    tokens = arrays["attention_mask"].astype(bool)
    mask = transformers.AutoTokenizer.from_pretrained(tmp_path / "model").mask_token_id
    assert targets.any(axis=1).all()
    assert (targets <= tokens).all()
    assert 0.1 < targets.sum() / tokens.sum() < 0.25
    assert 0.7 < (ids[targets] == mask).mean() < 0.9
    assert (ids[targets & (ids != mask)] != labels[targets & (ids != mask)]).any()
    assert (ids[~targets] != mask).all()


@pytest.mark.parametrize(
    ("task", "model", "classes"),
    [
        pytest.param("seq2seq", t5, None, marks=pytest.mark.proof),
        pytest.param("sequence-classification", bert, 3, marks=pytest.mark.proof),
        pytest.param("token-classification", bert, 3, marks=pytest.mark.proof),
        ("image-classification", vit, None),
    ],
)
def test_other_tasks_take_their_arrays_from_a_function(
    tmp_path: Path, task: str, model: Any, classes: int | None
) -> None:
    said: list[str] = []
    run = made(
        tmp_path,
        model(tmp_path / "model"),
        samples_for(task, tmp_path),
        task=Task(task),
        classes=classes,
        tell=said.append,
    )
    assert len(run.manifest.blocks) > 1
    config = KeptFiles(run.path / FOLDER).model().config
    if classes:
        assert config.num_labels == classes
        assert any("new, and random at the start" in line for line in said)


@pytest.mark.parametrize("suffix", [".csv", pytest.param(".parquet", marks=pytest.mark.proof)])
def test_texts_with_classes(tmp_path: Path, suffix: str) -> None:
    labels = [number % 3 for number in range(len(TEXTS))]
    run = made(
        tmp_path,
        bert(tmp_path / "model"),
        labelled_texts(tmp_path / f"a{suffix}", "label", labels),
        task=Task.SEQUENCE_CLASSIFICATION,
        classes=3,
        sequence_length=128,
    )
    arrays = arrays_of(run)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = {tuple(own(text)["input_ids"]): label for text, label in zip(TEXTS, labels, strict=True)}
    assert sorted(arrays) == ["attention_mask", "input_ids", "labels"]
    for ids, mask, label in zip(
        *(arrays[name] for name in ("input_ids", "attention_mask", "labels")), strict=True
    ):
        assert expected[tuple(ids[mask == 1])] == label


def test_texts_with_answers(tmp_path: Path) -> None:
    data = labelled_texts(tmp_path / "a.jsonl", "summary", [text.upper() for text in TEXTS])
    reading = DataOptions(label_field="summary")
    run = made(tmp_path, t5(tmp_path / "model"), data, reading=reading, sequence_length=128)
    arrays = arrays_of(run)
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for ids, mask, labels in zip(
        *(arrays[name] for name in ("input_ids", "attention_mask", "labels")), strict=True
    ):
        assert own.decode(ids[mask == 1]).upper() == own.decode(labels[labels != IGNORED])


def labelled_texts(path: Path, field: str, labels: list[Any]) -> Path:
    """TEXTS in a file with a second field."""
    rows = [{"text": text, field: label} for text, label in zip(TEXTS, labels, strict=True)]
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([("text", field), *(row.values() for row in rows)])
        case _:
            write_table(pa.Table.from_pylist(rows), path)
    return path


def test_labels_that_are_missing_or_no_class(tmp_path: Path) -> None:
    folder = bert(tmp_path / "model")
    task: dict[str, Any] = {"task": Task.SEQUENCE_CLASSIFICATION}
    error = refused(tmp_path, "HP-DATA-008", folder, **task)
    assert "it has no field 'label'; its fields: id, text" in error.why
    reading = DataOptions(label_field="text")
    error = refused(tmp_path, "HP-DATA-008", folder, reading=reading, **task)
    assert "is no class" in error.why
    assert "LABEL_0, LABEL_1" in error.fix


def test_texts_are_no_samples_of_every_task(tmp_path: Path) -> None:
    error = refused(tmp_path, "HP-MODEL-013", vit(tmp_path / "model"))
    assert "cannot make samples for image-classification" in error.what
    assert "pixel_values and labels" in error.fix


def refused(tmp_path: Path, code: str, model: Path | str, **arguments: Any) -> LocalError:
    return assert_fails(
        tmp_path,
        code,
        ExitCode.CONFIG,
        model=f"hf:{model}",
        data=[written(tmp_path / "a.jsonl", TEXTS)],
        training=TRAINING,
        **arguments,
    )


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path, "HP-MODEL-012", tmp_path / "empty").why
    assert "there is no folder" in refused(tmp_path, "HP-MODEL-012", tmp_path / "nowhere").why
    assert "it names no model" in refused(tmp_path, "HP-MODEL-012", "").why
    (tmp_path / "config.json").touch()
    error = refused(tmp_path, "HP-MODEL-012", tmp_path / "config.json")
    assert (error.why, error.fix.split()[-1]) == (
        f"{tmp_path / 'config.json'} is a file, no folder",
        "weights",
    )


def changed_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_model_that_brings_code(tmp_path: Path) -> None:
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    folder = changed_config(llama(tmp_path / "model"), model_type="own", auto_map=auto)
    (folder / "own.py").write_text("raise SystemExit('must not run')\n")
    error = refused(tmp_path, "HP-MODEL-012", folder)
    assert "Python code of its own" in error.why
    assert "FILE.PY:FUNCTION" in error.fix


def test_samples_beyond_a_table_of_positions(tmp_path: Path) -> None:
    """Rotary positions have no end; a table has."""
    config = transformers.GPT2Config(vocab_size=300, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    check_positions(model, 8)
    with pytest.raises(LocalError) as caught:
        check_positions(model, 9)
    assert (caught.value.code, caught.value.fix) == ("HP-DATA-010", "give --sequence-length 8, or less")
    sizes = LLAMA | {"max_position_embeddings": 8}
    check_positions(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), 9)
    check_positions(torch.nn.Linear(8, 8), 9)


def test_a_kind_of_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    error = refused(tmp_path, "HP-MODEL-012", changed_config(llama(tmp_path / "model"), model_type="own"))
    assert error.why == f"transformers {transformers.__version__} does not know its model_type"
    assert error.fix.startswith("pip install -U transformers")


def sharded(folder: Path) -> list[Path]:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama(folder))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="8KB")
    return sorted(folder.glob("model-*.safetensors"))


def test_a_checkpoint_with_missing_shards(tmp_path: Path) -> None:
    first, second, *_ = sharded(tmp_path / "model")
    second.unlink()
    error = refused(tmp_path, "HP-MODEL-012", tmp_path / "model")
    assert error.why == f"{second.name} is missing"
    shutil.copy(first, second)  # a shard with other parameters than its own
    error = refused(tmp_path, "HP-MODEL-012", tmp_path / "model")
    assert "they would begin at random" in error.why
    second.write_bytes(first.read_bytes()[:100])
    assert "damaged" in refused(tmp_path, "HP-MODEL-012", tmp_path / "model").why


def test_weights_under_other_names_are_no_checkpoint(tmp_path: Path) -> None:
    path = llama(tmp_path / "model") / "model.safetensors"
    save_file({f"lm.{name}": tensor for name, tensor in load_file(path).items()}, path)
    error = refused(tmp_path, "HP-MODEL-012", tmp_path / "model")
    assert "of the 20 parameters of LlamaForCausalLM" in error.why


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    folder = changed_config(llama(tmp_path / "model"), quantization_config={"quant_method": "fp8"})
    assert "quantized" in refused(tmp_path, "HP-MODEL-012", folder).why


def test_a_task_that_the_model_has_not(tmp_path: Path) -> None:
    error = refused(tmp_path, "HP-MODEL-013", t5(tmp_path / "model"), task=Task.CAUSAL_LM)
    assert "cannot be trained for causal-lm" in error.what
    assert "no such class for t5" in error.why
    assert "seq2seq" in error.fix
    folder = changed_config(llama(tmp_path / "llama"), architectures=["LlamaModel"])
    error = refused(tmp_path, "HP-MODEL-013", folder)
    assert "cannot tell the task" in error.what
    assert "causal-lm or sequence-classification" in error.fix


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(tmp_path, "HP-MODEL-012", "somebody/a-model@main")
    assert error.what == "cannot load the model hf:somebody/a-model@main"
    assert "the hub cannot be reached" in error.why


@pytest.mark.parametrize("revision", [pytest.param("", marks=pytest.mark.proof), "@v1"])
def test_an_id_of_the_hub_that_was_fetched_before(tmp_path: Path, revision: str) -> None:
    """The library's own cache, as a download leaves it: snapshots by commit, and names of commits."""
    cache, commit = tmp_path / "home" / "hub" / "models--somebody--a-model", "1" * 40
    llama(cache / "snapshots" / commit, torch.bfloat16)
    (cache / "refs").mkdir()
    (cache / "refs" / (revision.removeprefix("@") or "main")).write_text(commit)
    written(tmp_path / "a.jsonl", CHATS, "messages")
    model = f"hf:somebody/a-model{revision}"
    done = subprocess.run(
        [sys.executable, "-m", "hetpeer.peer.cli.main", "init", "run", "--model", model, "--data", "a.jsonl"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(tmp_path / "run")
    assert run.author().model == model
    kept = {path.name for path in (run.path / FOLDER).iterdir()}
    assert kept >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    export(run.path, tmp_path / "out")
    own = transformers.AutoModelForCausalLM.from_pretrained(cache / "snapshots" / commit, dtype=torch.float32)
    ids = torch.arange(8).unsqueeze(0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(ids).logits, own(ids).logits)
    assert "base_model: somebody/a-model\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("gpt2", "gpt2", None),
        ("Qwen/Qwen3-0.6B@v1.0", "Qwen/Qwen3-0.6B", "v1.0"),
        ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
    ],
)
def test_names_of_the_hub(text: str, name: str, revision: str | None) -> None:
    source = ModelSource.parse(f"hf:{text}")
    assert (source.name, source.revision, source.folder) == (name, revision, None)
    assert source.reference == f"hf:{text}"


def test_a_folder_is_meant_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "one@two").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert ModelSource.parse("hf:models/one@two").folder == tmp_path / "models" / "one@two"


def test_a_model_without_a_tokenizer_asks_for_one(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", tokenizer=False)
    assert "has none beside it" in refused(tmp_path, "HP-DATA-009", folder).why
    reading = DataOptions(tokenizer=tokenizer_folder(tmp_path / "tokenizer"))
    run = made(tmp_path, folder, tmp_path / "a.jsonl", reading=reading)
    assert KeptFiles(run.path / FOLDER).has_tokenizer


def test_a_tokenizer_of_another_vocabulary_is_told(tmp_path: Path) -> None:
    small = llama(tmp_path / "small", vocab_size=VOCABULARY - 40)
    assert "more ids than the model" in refused(tmp_path, "HP-DATA-009", small).what
    said: list[str] = []
    data = written(tmp_path / "a.jsonl", TEXTS)
    folder = llama(tmp_path / "model", vocab_size=1000)
    made(tmp_path, folder, data, tell=said.append)
    assert any("the model's embedding 1,000 rows: is it the model's own?" in line for line in said)


CHECKPOINTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)
        self.drop = nn.Dropout(0.1)

    def inner(self, x):
        return self.drop(torch.tanh(self.layer(x)))

    def forward(self, tokens, targets):
        x = checkpoint(self.inner, self.embed(tokens), use_reentrant={reentrant})
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
"""
IN_LAYERS = """
from transformers import AutoModelForCausalLM

def build():
    model = AutoModelForCausalLM.from_pretrained("{folder}")
    model.gradient_checkpointing_enable({"use_reentrant": {reentrant}})
    return model
"""


@pytest.mark.parametrize(
    ("own", "reentrant"),
    [(True, True), (True, False), (False, True), pytest.param(False, False, marks=pytest.mark.proof)],
)
def test_gradient_checkpointing_becomes_recompute(tmp_path: Path, reentrant: bool, own: bool) -> None:
    source = CHECKPOINTED if own else IN_LAYERS.replace("{folder}", str(llama(tmp_path / "model")))
    (tmp_path / "own.py").write_text(source.replace("{reentrant}", str(reentrant)))
    said: list[str] = []
    run = create_run(
        tmp_path / "run",
        model=f"{tmp_path / 'own.py'}:{'Model' if own else 'build'}",
        data=[written(tmp_path / "a.jsonl", TEXTS)],
        reading=DataOptions(tokenizer=None if own else tmp_path / "model"),
        sequence_length=32,
        training=TRAINING,
        tell=said.append,
    )
    assert any("uses gradient checkpointing" in line for line in said)
    assert run.manifest.training.recompute
    assert all(run.block_spec(block).recompute for block in run.manifest.blocks)
