"""Adapters: the model is frozen, only they are trained, and peft reads what comes home."""

import math
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.pretrained.adapters import LoraSettings, adapt, linear_layers, merged_weights
from hetpeer.bootstrap.pretrained.formats import Format
from hetpeer.bootstrap.pretrained.tasks import Task
from hetpeer.bootstrap.results.export import current_model, export
from hetpeer.bootstrap.results.generate import generate
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.bootstrap.state.core_config import coordinator_config
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.examples.gpt import build, build_tied
from hetpeer.peer.transport.tensor_schema import microbatches_in
from hetpeer.stages.block import block_state, state_file
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.pipeline.place_memory import Offered
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from tests.bootstrap.engine import EXAMPLES, Engine
from tests.bootstrap.engine import TRAINING as ENGINE_TRAINING
from tests.bootstrap.pretrained_models import bert, llama, samples_for
from tests.bootstrap.written_data import CHATS, written

TRAINING = TrainingSettings(steps=2, batch_size=4, microbatch_size=2, slot_size=2, eval_microbatches=1)
LAYERS = "c_attn+c_proj+c_fc"


def make_run(folder: Path, sizes: str, **options: object) -> RunDirectory:
    """A run of a GPT of the given sizes, on eight tokens a sample."""
    folder.mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / "gpt.py", folder)
    (folder / "model.py").write_text(f"import gpt\n\n\ndef build():\n    return gpt.build({sizes})\n")
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(200)))
    return create_run(
        folder / "run",
        model=f"{folder / 'model.py'}:build",
        data=[folder / "text.txt"],
        sequence_length=8,
        training=TRAINING,
        **options,  # type: ignore[arg-type]
    )


SMALL = "width=32, layers=2, heads=2, context=8"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("r=4", LoraSettings(r=4, alpha=8)),
        ("r=16,alpha=32,targets=all-linear,dropout=0.05", LoraSettings(r=16, alpha=32, dropout=0.05)),
        ("targets=q_proj+v_proj, dora", LoraSettings(alpha=32, targets=("q_proj", "v_proj"), dora=True)),
        ("r=1,train=head", LoraSettings(r=1, alpha=2, train=("head",))),
    ],
)
def test_settings_are_read(text: str, settings: LoraSettings) -> None:
    assert LoraSettings.parse(text) == settings


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no setting"),
        ("rank=4", "'rank' is no setting"),
        ("r=4,r=8", "'r' is given twice"),
        ("r", "'r' takes a value"),
        ("dora=yes", "'dora' takes no value"),
        ("r=0", "r cannot be '0'"),
        ("r=four", "r cannot be 'four'"),
        ("alpha=1.5", "alpha cannot be '1.5'"),
        ("dropout=1", "dropout cannot be '1'"),
        ("dropout=nan", "dropout cannot be 'nan'"),
        ("targets=a++b", "targets cannot be 'a++b'"),
    ],
)
def test_other_settings_are_refused(text: str, why: str) -> None:
    with pytest.raises(LocalError) as caught:
        LoraSettings.parse(text)
    assert (caught.value.code, caught.value.exit_code, caught.value.why) == (
        "HP-RUN-001",
        ExitCode.CONFIG,
        why,
    )


def test_only_adapters_are_in_states_checkpoints_and_sums(tmp_path: Path) -> None:
    """LoRA r = 16 of a GPT of width 512 with 8,192 tokens: at most 2 % of full training's bytes."""
    sizes = "width=512, layers=2, heads=4, context=8, vocabulary=8192"
    run = make_run(tmp_path / "author", sizes, lora=f"r=16,targets={LAYERS},dropout=0.05")
    model = build(width=512, layers=2, heads=4, context=8, vocabulary=8192)
    everything = sum(parameter.numel() for parameter in model.parameters())

    names = [name for layout in run.layouts() for name, _ in layout]
    assert names
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    summed = sum(entry.vector_count for entry in run.manifest.blocks)
    assert 0 < summed <= 0.02 * everything

    checkpoint = 0
    for entry, layout in zip(run.manifest.blocks, run.layouts(), strict=True):
        vector = np.ones(entry.vector_count, dtype=np.float32)
        moments = dict.fromkeys(run.manifest.optimizer_state, vector)
        state = block_state.BlockState(version=1, parameters=vector, optimizer=moments)
        checkpoint += len(state_file.dump(state, entry.index, layout))
    assert 12 * summed < checkpoint <= 0.02 * 12 * everything

    constants = sum(entry.buffers.bytes for entry in run.manifest.blocks if entry.buffers)
    assert 4 * everything <= constants <= 4.01 * everything

    # nobody is sent to a place whose constants do not fit into its memory
    config, demand = coordinator_config(run), of_manifest(run.manifest, 2)
    for entry, cost, memory in zip(run.manifest.blocks, config.costs, demand.memory, strict=True):
        assert entry.buffers is not None
        assert min(cost.memory.in_one_memory, memory) >= entry.buffers.bytes
        offered = Offered(device=entry.buffers.bytes)
        assert (
            microbatches_in(offered, cost.memory.room(Offload.NONE, apart=False), [[run.block_spec(entry)]])
            == 0
        )


@pytest.mark.parametrize("lora", ["r=2,alpha=64,dropout=0.1", "r=2,alpha=64,dora"])
def test_what_is_trained_comes_home_as_peft_reads_it(
    tmp_path: Path, lora: str, volunteers: list[Identity]
) -> None:
    """The adapters beside the model, the model with the adapters added, and our own give the same logits."""
    folder = llama(tmp_path / "model")
    run = create_run(
        tmp_path / "run",
        model=f"hf:{folder}",
        data=[written(tmp_path / "a.jsonl", CHATS, "messages")],
        sequence_length=64,
        training=ENGINE_TRAINING,
        lora=lora,
    )
    Engine(run, volunteers).train()
    exported = export(run.path, tmp_path / "adapter", Format.ADAPTER)
    assert exported.version == 4
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        *("adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md", "hetpeer.json"),
    }
    assert (tmp_path / "adapter" / "README.md").read_text().startswith("---\nlibrary_name: peft\n")
    export(run.path, tmp_path / "whole", Format.HF)

    ids = torch.arange(3, 19).unsqueeze(0)
    base = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        plain = base(folder)(ids).logits
        loaded = peft.PeftModel.from_pretrained(base(folder), tmp_path / "adapter").eval()(ids).logits
        named = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(ids).logits
        whole = base(tmp_path / "whole")(ids).logits
        own = current_model(run)(ids).logits
    assert torch.equal(loaded, own)
    assert torch.equal(named, own)
    assert torch.allclose(whole, own, atol=1e-5)
    assert (plain - own).abs().max() > 100 * (whole - own).abs().max()


def test_a_new_head_is_trained_whole_and_comes_home(tmp_path: Path, volunteers: list[Identity]) -> None:
    folder = bert(tmp_path / "model")
    run = create_run(
        tmp_path / "run",
        model=f"hf:{folder}",
        task=Task.SEQUENCE_CLASSIFICATION,
        classes=3,
        data=[samples_for("sequence-classification", tmp_path)],
        training=ENGINE_TRAINING,
        lora="r=2,targets=query+value",
    )
    names = {name for layout in run.layouts() for name, _ in layout}
    whole = {name for name in names if ".lora_" not in name}
    assert {name.partition(".modules_to_save.default.")[0] for name in whole} == {"classifier", "bert.pooler"}
    assert len(whole) == 4
    Engine(run, volunteers).train()
    export(run.path, tmp_path / "adapter", Format.ADAPTER)
    export(run.path, tmp_path / "whole", Format.HF)
    ids = torch.arange(3, 19).unsqueeze(0)
    kind = transformers.AutoModelForSequenceClassification.from_pretrained
    with torch.no_grad():
        own = current_model(run)(ids).logits
        loaded = peft.PeftModel.from_pretrained(kind(folder, num_labels=3), tmp_path / "adapter").eval()
        assert torch.equal(loaded(ids).logits, own)
        assert torch.allclose(kind(tmp_path / "whole").eval()(ids).logits, own, atol=1e-5)


def test_a_run_of_a_function_with_adapters_is_exported_and_generates(tmp_path: Path) -> None:
    run = make_run(tmp_path / "author", SMALL, lora="r=2,dora,dropout=0.1", frozen_dtype="int8")
    assert run.author().lora == "r=2,dora,dropout=0.1"
    model = build(width=32, layers=2, heads=2, context=8)
    model.load_state_dict(load_file(export(run.path, tmp_path / "weights.safetensors").weights))
    tokens = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(model.eval()(tokens), current_model(run)(tokens), atol=1e-5)
    export(run.path, tmp_path / "adapter", Format.ADAPTER)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 100_000
    assert len(b"".join(generate(run.path, "7 sq", tokens=3, temperature=0, seed=0))) == 3


def test_adapters_that_are_not_there_are_not_exported(fresh: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="the run has no adapters"):
        export(fresh.path, tmp_path / "adapter", Format.ADAPTER)
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_is_not_added_to_a_weight_that_others_share() -> None:
    model = build_tied()
    adapt(model, LoraSettings.parse("r=2,targets=lm_head"))
    with pytest.raises(LocalError, match="shares the weight of lm_head"):
        merged_weights(model)


@pytest.mark.parametrize(
    ("lora", "what"),
    [
        ("targets=q_proj", "q_proj"),
        ("targets=c_fc+typo", "typo"),
        ("targets=ln_1", "ln_1"),
        ("train=top", "top"),
    ],
)
def test_targets_that_cannot_be_adapted_are_named(tmp_path: Path, lora: str, what: str) -> None:
    with pytest.raises(LocalError) as caught:
        make_run(tmp_path / "author", SMALL, lora=lora)
    error = caught.value
    assert (error.code, error.exit_code) == ("HP-RUN-001", ExitCode.CONFIG)
    assert what in error.what
    assert "c_attn, c_proj, c_fc, lm_head" in error.fix
    assert not (tmp_path / "author" / "run").exists()


def test_without_peft_a_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(LocalError, match=r"hetpeer\[hf\]") as caught:
        make_run(tmp_path / "author", SMALL, lora="r=2")
    assert caught.value.code == "HP-SYS-006"


def test_a_model_with_adapters_is_cut_between_its_layers() -> None:
    """As without them, though in front of the first adapter nothing needs a gradient."""
    model = build(width=64, layers=3, heads=2, context=8, vocabulary=8192)
    adapt(model, LoraSettings.parse(f"r=2,targets={LAYERS}"))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    blocks = cut_blocks(trace(model, {"tokens": tokens, "targets": tokens}))
    layers = [sorted({name.split(".")[1] for name in block.parameter_specs}) for block in blocks]
    assert layers == [["0"], ["1"], ["2"], []]


def test_all_linear_leaves_a_language_models_head_alone() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    names = linear_layers(transformers.GPT2LMHeadModel(config))
    assert {name.rpartition(".")[2] for name in names} == {"c_attn", "c_proj", "c_fc"}


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_a_frozen_base_in_fewer_bytes(tmp_path: Path, form: str) -> None:
    said: list[str] = []
    run = make_run(
        tmp_path / "author", SMALL, lora=f"r=2,targets={LAYERS}", frozen_dtype=form, tell=said.append
    )
    assert any(line.startswith(f"frozen tensors in {form} change the loss") for line in said)
    found: dict[str, torch.Tensor] = {}
    for path in run.constant_paths():
        found |= load_file(path)  # a small table may be in several blocks
    constants = sum(tensor.nbytes for tensor in found.values())
    model = build(width=32, layers=2, heads=2, context=8)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    bits = {"bf16": 16, "int8": 8.5, "int4": 4.5}[form]
    assert constants == math.ceil(matrices * bits / 8) + 4 * vectors


def test_a_frozen_dtype_without_anything_frozen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="--frozen-dtype int8 has no effect") as caught:
        make_run(tmp_path / "author", SMALL, frozen_dtype="int8")
    assert caught.value.code == "HP-RUN-001"
    assert not (tmp_path / "author" / "run").exists()
