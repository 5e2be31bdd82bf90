"""Bottlenecks between stages: little crosses, gradients are torch's, the export computes the same."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from safetensors.torch import load_file
from torch import Tensor, nn

from hetpeer.bootstrap.authoring.bottlenecks import insert, narrowed
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.model_costs import plan_model
from hetpeer.bootstrap.model_checks.equivalence import compare
from hetpeer.bootstrap.pretrained.formats import Format
from hetpeer.bootstrap.results.export import current_model, export
from hetpeer.bootstrap.results.generate import generate
from hetpeer.bootstrap.run.run_directory import Bottlenecks, RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.examples.gpt import GPT
from hetpeer.examples.resnet import ResNet
from hetpeer.stages.graph.block_spec import Batch, BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.links.value_codecs import VALUE_CODECS
from hetpeer.stages.operators.names import BOTTLENECK
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import balanced_ranges, cut_blocks
from hetpeer.stages.tracing.trace import OpDag, trace
from tests.bootstrap.engine import TRAINING, Engine, make_author

WIDTH, CONTEXT, VOCABULARY, RANK = 32, 16, 64, 4


def small_gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(WIDTH, 4, 2, CONTEXT, VOCABULARY, dropout=dropout)


def microbatch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    names = ("tokens", "targets")
    return {name: torch.randint(0, VOCABULARY, (2, CONTEXT), generator=draw) for name in names}


class Classifier(nn.Module):
    """A ResNet and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = ResNet(16, 4)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return nnf.cross_entropy(self.net(image), label)


def thin(
    model: nn.Module, example: dict[str, Tensor], stages: int, rank: int = RANK
) -> tuple[OpDag, list[BlockSpec], list[tuple[int, int]], list[str]]:
    """The model with bottlenecks: its graph, its blocks, its stages, what was said."""
    said: list[str] = []
    dag = trace(model, example)
    layout = balanced_ranges(cut_blocks(dag, at_least=stages), stages)
    found, specs, _ = narrowed(
        model, example, dag, [layout], rank, ComputeMode(), at_least=stages, seed=5, tell=said.append
    )
    return found, specs, layout, said


def by_hand(model: GPT, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of a GPT with bottlenecks, in the words of docs/links.md; parameters are those in `weights`."""
    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: tokens.shape[1]]
    for number, layer in enumerate(model.h):
        own = {
            name.removeprefix(f"h.{number}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"h.{number}.") and BOTTLENECK not in name
        }
        x = torch.func.functional_call(layer, own, (x,))
        at = f"h.{number}.{BOTTLENECK}"
        if f"{at}.down.weight" in weights:
            narrow = x @ weights[f"{at}.down.weight"].T
            x = narrow @ weights[f"{at}.up.weight"].T + weights[f"{at}.table.weight"][tokens]
    norm = nnf.layer_norm(x, (WIDTH,), weights["ln_f.weight"], weights["ln_f.bias"])
    return norm @ weights["lm_head.weight"].T


def test_a_narrow_tensor_crosses_between_stages_and_the_rest_stays() -> None:
    model = small_gpt()
    plain = cut_blocks(trace(model, microbatch()), at_least=4)
    _, specs, layout, said = thin(model, microbatch(), 4)
    assert len(specs) == len(plain)
    ends = {end - 1 for _, end in layout[:-1]}
    for before, after in zip(plain[:-1], specs[:-1], strict=True):
        (wide,), (narrow,) = before.outputs.values(), after.outputs.values()
        size = RANK if after.index in ends else WIDTH
        assert narrow.shape == (*wide.shape[:-1], size)
        assert (narrow.dtype, narrow.grad) == ("float32", True)
    for one, other in itertools.pairwise(specs):
        assert list(one.outputs.items()) == list(other.inputs.items())
    assert all(list(specs[end].data) == ["tokens"] for end in {begin for begin, _ in layout[1:]})
    assert said == ["bottlenecks behind h.0, h.1, h.2: 4 features cross, not 32"]


def test_the_rewrite_is_deterministic() -> None:
    found = [thin(small_gpt(dropout=0.1), microbatch(), 4) for _ in range(2)]
    (first, specs, _, _), (second, again, _, _) = found
    assert [pack_block(spec) for spec in specs] == [pack_block(spec) for spec in again]
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)


def test_it_begins_with_a_projection_and_the_embedding() -> None:
    model = small_gpt()
    dag, *_ = thin(model, microbatch(), 4)
    down, up = (dag.tensors[f"h.1.{BOTTLENECK}.{way}.weight"] for way in ("down", "up"))
    assert torch.allclose(down @ up, torch.eye(RANK), atol=1e-6)
    assert torch.equal(dag.tensors[f"h.1.{BOTTLENECK}.table.weight"], model.wte.weight)
    other = dag.tensors[f"h.0.{BOTTLENECK}.up.weight"]
    assert not torch.allclose(up, other), "each has a basis of its own"


def test_loss_and_gradients_are_those_of_plain_torch() -> None:
    model, example = small_gpt(), microbatch()
    dag, specs, _, _ = thin(model, example, 4)
    both = compare(model, example, dag, specs)
    assert both.worst() == pytest.approx((0, 0), abs=1e-5)

    weights = {name: tensor.clone().requires_grad_() for name, tensor in dag.tensors.items()}
    loss = nnf.cross_entropy(
        by_hand(small_gpt(), weights, example["tokens"]).flatten(0, 1), example["targets"].flatten()
    )
    loss.backward()
    assert both.found == pytest.approx(loss.item(), rel=1e-5)
    assert both.norms.keys() == {name for name, tensor in weights.items() if tensor.grad is not None}
    for name, norm in both.norms.items():
        gradient = weights[name].grad
        assert gradient is not None
        assert norm == pytest.approx(gradient.norm().item(), rel=1e-4), name


def test_images_are_narrowed_by_channels() -> None:
    """A ResNet's cut is before a ReLU: the border moves behind it, to the output of the layer."""
    images = {"image": torch.randn(4, 1, 8, 8), "label": torch.randint(0, 10, (4,))}
    model = Classifier()
    dag, specs, layout, _ = thin(model, images, 3)
    for _, end in layout[:-1]:
        (narrow,) = specs[end - 1].outputs.values()
        assert narrow.shape[0] == Batch(1)
        assert narrow.shape[-1] == RANK
    assert not any(name.endswith("table.weight") for name in dag.parameters.values())
    starts = {tuple(dag.tensors[name].shape) for name in dag.tensors if name.endswith(".start")}
    assert starts == {(16, 1, 1), (64, 1, 1)}
    centers = {tuple(dag.tensors[name].shape) for name in dag.tensors if name.endswith(".center")}
    assert centers == {(RANK,)}
    assert compare(model, images, dag, specs).worst() == pytest.approx((0, 0), abs=1e-5)


class Patches(nn.Module):
    """Layers over five positions, without tokens, behind running statistics.

    A layer that is a `Sequential` calls each of its parts by itself, and so its bottleneck.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Parameter(torch.randn(5, 16))
        self.norm = nn.BatchNorm1d(5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) + self.positions
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_without_tokens_it_begins_with_the_best_that_k_features_can_do() -> None:
    """Against numpy's singular values of what crosses: the mean is exact, and no other basis is nearer."""
    torch.manual_seed(1)
    model, images = Patches(), {"x": torch.randn(64, 5, 16)}
    plain, seen = Patches(), list[Tensor]()
    plain.layers[1].register_forward_hook(lambda _layer, _args, output: seen.append(output.detach()))
    plain(**images)
    found, specs, *_ = thin(model, images, 2, rank=3)
    assert torch.equal(model.norm.running_mean, Patches().norm.running_mean)

    assert compare(model, images, found, specs).worst() == pytest.approx((0, 0), abs=1e-5)
    down, up = (found.tensors[f"layers.1.{BOTTLENECK}.{way}.weight"] for way in ("down", "up"))
    center, start = (found.tensors[f"layers.1.{BOTTLENECK}.{name}"] for name in ("center", "start"))
    assert (center.shape, start.shape) == ((5, 3), (5, 16))
    (x,) = seen
    left = (x @ down.T + center) @ up.T + start - x
    assert left.mean(0).abs().max() < 1e-5
    values = np.linalg.svd((x - x.mean(0)).flatten(0, 1).numpy(), compute_uv=False)
    assert left.square().sum().item() == pytest.approx((values[3:] ** 2).sum(), rel=1e-3)


def rounded_off(features: Tensor, varying: Tensor) -> float:
    """Energy that int4 rounds off from `features`, as a part of the energy of `varying` ones."""
    flat, codec = features.flatten(), VALUE_CODECS["int4"]
    written = memoryview(bytearray(codec.nbytes(len(flat))))
    codec.encode(flat, written)
    return float((codec.decode(written, len(flat)) - flat).square().sum() / varying.square().sum())


@pytest.mark.parametrize("kind", ["patches", "images"])
def test_features_begin_as_a_codec_needs_them(kind: str) -> None:
    """Without what is the same for all samples, and none much larger than the others: less is rounded off
    than of principal components, or with the mean in them.
    """
    torch.manual_seed(1)
    if kind == "patches":
        model, layer, axis, inputs = Patches(), "layers.1", -1, {"x": 2 + torch.randn(64, 5, 16)}
    else:
        model, layer, axis = Classifier(), "net.layers.2", 1
        inputs = {"image": torch.rand(64, 1, 8, 8), "label": torch.randint(0, 10, (64,))}
    seen = list[Tensor]()
    model.get_submodule(layer).register_forward_hook(lambda _layer, _args, x: seen.append(x.detach().clone()))
    model(**inputs)
    found, *_ = thin(model, inputs, 2 if kind == "patches" else 3, rank=8)
    x = seen[0].movedim(axis, -1)
    down, center = (found.tensors[f"{layer}.{BOTTLENECK}.{name}"] for name in ("down.weight", "center"))
    features = x @ down.T + center
    assert features.mean(0 if kind == "patches" else (0, 1, 2)).abs().max() < 1e-5
    sizes = features.flatten(0, -2).square().mean(0)
    components = torch.linalg.svd(features.flatten(0, -2), full_matrices=False)[2]
    principal = features @ components.T
    assert sizes.max() / sizes.mean() < principal.flatten(0, -2).square().mean(0).max() / sizes.mean() / 1.2
    assert rounded_off(features, features) < min(
        rounded_off(principal, features), rounded_off(x @ down.T, features)
    )


def test_a_bottleneck_of_an_earlier_version_has_no_center() -> None:
    text = """{"rank": 3, "embedding": "", "places": [
        {"layer": "layers.1", "dim": -1, "width": 16, "tokens": false, "start": [5, 16]}]}"""
    model = Patches()
    insert(model, Bottlenecks.model_validate_json(text), seed=5)
    parts = dict(model.get_submodule(f"layers.1.{BOTTLENECK}").named_parameters())
    assert parts.keys() == {"down.weight", "up.weight", "start"}


@pytest.fixture(scope="module")
def narrow_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("narrow")
    make_author(folder / "author")
    return create_run(
        folder / "run",
        model=f"{folder}/author/tiny.py:build",
        data=[folder / "author" / "text.txt"],
        seed=3,
        sequence_length=16,
        stages=[2, 1],
        training=TRAINING,
        bottleneck=RANK,
    )


def test_a_run_is_exported_with_its_bottlenecks(
    narrow_run: RunDirectory, tmp_path: Path, volunteers: list[Identity]
) -> None:
    run = narrow_run
    layout = run.manifest.layouts[0]
    sizes = [run.manifest.blocks[end - 1].output_bytes for _, end in layout[:-1]]
    assert sizes == [TRAINING.microbatch_size * 16 * RANK * 4]
    Engine(run, volunteers).train()
    exported = export(run.path, tmp_path / "weights.safetensors")
    weights = load_file(exported.weights)
    assert exported.version == 4
    assert sum(BOTTLENECK in name for name in weights) == 3

    tokens = torch.arange(40, 56).unsqueeze(0)
    with torch.no_grad():
        model = current_model(run)
        plain = GPT(WIDTH, 2, 2, 16, 256)
        ours, theirs = model(tokens), by_hand(plain, weights, tokens)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert len(b"".join(generate(run.path, "7 sq", tokens=3, temperature=0, seed=0))) == 3
    with pytest.raises(LocalError, match="HP-MODEL-014"):
        export(run.path, tmp_path / "folder", Format.HF)


def test_a_module_without_the_layer_is_not_the_runs(narrow_run: RunDirectory, tmp_path: Path) -> None:
    author = narrow_run.author()
    assert author.bottlenecks is not None
    gone = author.bottlenecks.model_copy(update={"embedding": "embedding_of_before"})
    text = author.model_copy(update={"bottlenecks": gone}).model_dump_json()
    path = narrow_run.path / "author.json"
    before = path.read_text()
    path.write_text(text)
    try:
        with pytest.raises(LocalError, match="HP-MODEL-007"):
            current_model(narrow_run)
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ({"bottleneck": 32}, "HP-RUN-001", "the output of h.0 has 32 features"),
        ({"bottleneck": 0}, "HP-RUN-001", "at least one feature must cross a border"),
        ({"bottleneck": 4, "stages": [1]}, "HP-MODEL-018", "there is one stage, and so no border"),
        (
            {"bottleneck": 4, "lora": "r=2"},
            "HP-RUN-001",
            "frozen layers cannot learn to do with fewer features",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, object], code: str, why: str) -> None:
    make_author(tmp_path / "author")
    with pytest.raises(LocalError) as caught:
        create_run(
            tmp_path / "run",
            model=f"{tmp_path}/author/tiny.py:build",
            data=[tmp_path / "author" / "text.txt"],
            sequence_length=16,
            training=TrainingSettings(steps=2, batch_size=4, microbatch_size=2, slot_size=2),
            **options,  # type: ignore[arg-type]
        )
    assert (caught.value.code, caught.value.exit_code, caught.value.why) == (code, ExitCode.CONFIG, why)
    assert not (tmp_path / "run").exists()


class InOneForward(nn.Module):
    """Layers whose sum no module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_a_model_without_a_place_is_refused_with_the_reason() -> None:
    with pytest.raises(LocalError, match="is the result of no module that is called once") as caught:
        thin(InOneForward(), {"x": torch.randn(4, 16)}, 2)
    assert caught.value.code == "HP-MODEL-018"


def test_a_planned_model_has_the_bytes_of_its_bottlenecks(tmp_path: Path) -> None:
    make_author(tmp_path / "author")
    training = TrainingSettings()
    wide, narrow = (
        plan_model(
            f"{tmp_path}/author/tiny.py:build",
            batch=2,
            sequence_length=16,
            stages=[2],
            training=training,
            bottleneck=rank,
        )
        for rank in (None, RANK)
    )
    leaves = [sum(costs.layouts[0][0].leaves.values()) for costs in (wide, narrow)]
    assert np.divide(*leaves) == WIDTH / RANK
