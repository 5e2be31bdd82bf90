"""A trained model of transformers comes back as a folder that the library loads, and as nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.log.record_log import Log
from hetpeer.bootstrap.pretrained.formats import Dtype, Format
from hetpeer.bootstrap.results.export import current_model, export
from hetpeer.bootstrap.results.follow_run import checkpoints
from hetpeer.bootstrap.results.generate import Writer, generate
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.cli.author import export_command
from hetpeer.peer.cli.author.generate_command import chat
from tests.bootstrap.engine import TRAINING, Engine
from tests.bootstrap.pretrained_models import llama, samples_for, t5
from tests.bootstrap.written_data import CHATS, TEXTS, written

pytestmark = pytest.mark.xdist_group("trained by name")
chat_app = typer.Typer()
chat_app.command()(chat)
export_app = typer.Typer()
export_app.command()(export_command.export)
IDS = torch.arange(3, 19).unsqueeze(0)


@pytest.fixture(scope="module")
def trained_by_name(volunteers: list[Identity], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four updates of a model by name on chats; the model's folder is gone."""
    folder = tmp_path_factory.mktemp("named")
    run = create_run(
        folder / "run",
        model=f"hf:{llama(folder / 'model', torch.bfloat16, tie_word_embeddings=False)}",
        data=[written(folder / "a.jsonl", CHATS, "messages")],
        sequence_length=64,
        training=TRAINING,
    )
    Engine(run, volunteers).train()
    shutil.rmtree(folder / "model")
    return run


def loaded(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """The model that users get: each weight must come from the folder."""
    model, found = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model


def test_from_pretrained_gives_the_trained_models_outputs(
    trained_by_name: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exported = export(trained_by_name.path, out)
    assert (exported.version, exported.steps, exported.weights) == (4, 4, out)
    model = loaded(out)
    weights = load_file(export(trained_by_name.path, tmp_path / "a.safetensors").weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    untrained = current_model(trained_by_name)
    assert torch.equal(model(IDS).logits, untrained(IDS).logits)
    assert {path.name for path in out.iterdir()} >= {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer_config.json", "chat_template.jinja", "README.md", "hetpeer.json", "metrics.jsonl"),
    }
    own = transformers.AutoTokenizer.from_pretrained(out)
    assert own.apply_chat_template(CHATS[0], tokenize=False).startswith("<|user|>where is fox 0?")
    assert model.config.use_cache


def test_the_card_names_run_data_and_credit(trained_by_name: RunDirectory, tmp_path: Path) -> None:
    export(trained_by_name.path, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    facts = json.loads((tmp_path / "out" / "hetpeer.json").read_text())
    assert trained_by_name.run_id in card
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert facts["shards"] == [shard.blake3 for shard in trained_by_name.manifest.data.train]
    assert len(facts["credit"]) == 2
    assert all(f"| `{peer}` |" in card for peer in facts["credit"])
    assert str(tmp_path.parent.parent) not in card


@pytest.mark.parametrize(("dtype", "name"), [(Dtype.BF16, "bfloat16"), (Dtype.FP16, "float16")])
def test_a_dtype_of_choice(trained_by_name: RunDirectory, tmp_path: Path, dtype: Dtype, name: str) -> None:
    export(trained_by_name.path, tmp_path / "out", dtype=dtype)
    model = loaded(tmp_path / "out")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {f"torch.{name}"}
    file = export(trained_by_name.path, tmp_path / "a.safetensors", dtype=dtype).weights
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, load_file(file)[key])


def test_a_folder_is_replaced_only_by_the_same_run(trained_by_name: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(trained_by_name.path, out)
    (out / "stale").write_text("of the export before")
    export(trained_by_name.path, out)
    assert not (out / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "hetpeer.json").write_text('{"id": "another"}')
    with pytest.raises(LocalError, match="HP-DISK-003"):
        export(trained_by_name.path, out)


WRAPPED = """
from torch import nn
from transformers import AutoModelForCausalLM

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = AutoModelForCausalLM.from_pretrained("{folder}")
        self.scale = nn.Parameter(self.lm.model.norm.weight[:1].detach().clone())

    def forward(self, input_ids, attention_mask, labels):
        out = self.lm(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return out.loss * self.scale.sum()
"""


def test_no_export_of_a_wrapper_loads_at_random(tmp_path: Path) -> None:
    """Under the wrapper's names `from_pretrained` would find nothing, say little, and begin at random."""
    folder = llama(tmp_path / "model")
    (tmp_path / "own.py").write_text(WRAPPED.replace("{folder}", str(folder)))
    run = create_run(
        tmp_path / "run",
        model=f"{tmp_path / 'own.py'}:Model",
        data=[written(tmp_path / "a.jsonl", TEXTS)],
        reading=DataOptions(tokenizer=folder),
        sequence_length=32,
        training=TRAINING,
    )
    original = loaded(folder)(IDS).logits
    exported = export(run.path, tmp_path / "out")
    assert (exported.part, exported.left_out) == ("lm", ("scale",))
    model = loaded(tmp_path / "out")
    assert torch.equal(model(IDS).logits, original)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")

    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    shutil.copy(folder / "config.json", by_hand)
    export(run.path, by_hand / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(by_hand)
    assert torch.equal(model(IDS).logits, original)


def test_a_module_of_ones_own_is_no_folder_of_transformers(fresh: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"HP-MODEL-014.*a module of your own"):
        export(fresh.path, tmp_path / "out", Format.HF)
    assert export(fresh.path, tmp_path / "out").weights.is_file()


def test_generation_answers_a_chat(trained_by_name: RunDirectory, tmp_path: Path) -> None:
    export(trained_by_name.path, tmp_path / "out")
    model, own = loaded(tmp_path / "out"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    said = b"".join(generate(trained_by_name.path, "where?", tokens=12, temperature=0, seed=0)).decode()
    messages = [{"role": "user", "content": "where?"}]
    ids = own.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True)["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert said == own.decode(expected, skip_special_tokens=True)
    writer = Writer(trained_by_name.path)
    asked = CliRunner().invoke(
        chat_app, [str(trained_by_name.path), "--temperature", "0"], input="where?\n\n"
    )
    assert asked.exit_code == 0, asked.output
    assert asked.stdout.startswith(said)
    drawn = [b"".join(writer.answer(messages, 12, 1.5, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_checkpoints_are_followed_while_the_run_is_served(
    trained_by_name: RunDirectory, tmp_path: Path
) -> None:
    assert [*checkpoints(trained_by_name.path, 100)] == [4]
    shutil.copytree(trained_by_name.path, tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    log = Log.open(run.log_path)
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            log.close()

    assert [*checkpoints(run.path, 2, pause)] == [4]
    assert len(waited) == 2
    done = CliRunner().invoke(export_app, [str(run.path), str(tmp_path / "all"), "--every", "2"])
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["checkpoint-4"]
    loaded(tmp_path / "all" / "checkpoint-4")


def test_an_encoder_decoder_comes_home(tmp_path: Path) -> None:
    folder = t5(tmp_path / "model")
    run = create_run(
        tmp_path / "run",
        model=f"hf:{folder}",
        data=[samples_for("seq2seq", tmp_path)],
        training=TRAINING,
    )
    export(run.path, tmp_path / "out")
    kind = transformers.AutoModelForSeq2SeqLM
    ids = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert torch.equal(loaded(tmp_path / "out", kind)(**ids).logits, loaded(folder, kind)(**ids).logits)
    assert b"".join(generate(run.path, "the quick", tokens=3, temperature=0, seed=0)) is not None
