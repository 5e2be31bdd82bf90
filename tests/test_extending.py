"""docs/extending.md: its examples run in the real parts, and every registered name has its row in the
docs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from hetpeer.averaging import messages as m
from hetpeer.averaging.optim.update_rules import UPDATE_RULES, rule_of, rule_settings
from hetpeer.bootstrap.admission.admission import Admission, Admitted
from hetpeer.bootstrap.run.admission_policies import ADMISSION_POLICIES
from hetpeer.bootstrap.run.settings import AdmissionSettings, LinkSettings, TrainingSettings
from hetpeer.bootstrap.state.placement_policies import PLACEMENT_POLICIES
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.links.adaptive_ratio import coding_for
from hetpeer.stages.links.codec import Codec, codec_names, reduce_codec_names
from hetpeer.stages.links.value_codecs import VALUE_CODECS
from hetpeer.stages.operators.operators import FAMILIES
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.bundle_codec import Decoder, Encoder
from hetpeer.stages.worker.tensor_staging import Copier, Staging
from tests.bootstrap.test_placement import AsEver, asks, chosen, newcomer, steps_of, swarm
from tests.simulation.config import HistoryConfig
from tests.stages.split_run import assert_same_step, eager_step, split_step
from tests.stages.test_bundle_codec import LAYOUT, Coders, bundle, decode, encode, view

DOCS, PRODUCT = Path(__file__).parents[1] / "docs", Path(__file__).parents[1] / "hetpeer"
PAGE = (DOCS / "extending.md").read_text()
EXAMPLE = re.compile(r"^```python (\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = dict(EXAMPLE.findall(PAGE))


def example(kind: str, folder: Path) -> Any:
    """The page's example of `kind` as a module."""
    path = folder / f"example_of_{kind}.py"
    path.write_text(EXAMPLES[kind])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # pydantic looks for it there
    spec.loader.exec_module(module)
    return module


def rows(page: str) -> set[str]:
    """Names in backticks at the beginning of the rows of a page's tables."""
    return set(re.findall(r"^\| `([^`]+)`", (DOCS / page).read_text(), re.MULTILINE))


REGISTRIES = {
    "averaging/optim/update_rules.py": "UPDATE_RULES",
    "stages/links/value_codecs.py": "VALUE_CODECS",
    "stages/operators/operators.py": "FAMILIES",
    "bootstrap/run/admission_policies.py": "ADMISSION_POLICIES",
    "bootstrap/state/placement_policies.py": "PLACEMENT_POLICIES",
}
"""Module → its registry."""


@pytest.mark.parametrize(("module", "name"), REGISTRIES.items())
def test_a_registry_is_a_literal_that_nobody_else_writes(module, name):
    """Nothing from a run's files or from the network can add to it."""
    literal = [
        node.value
        for node in ast.parse((PRODUCT / module).read_text()).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    ]
    assert [type(value) for value in literal] == [ast.Dict]
    assert all(isinstance(key, ast.Constant) for key in literal[0].keys)
    writes = re.compile(rf"\b{name}(\[[^\]]*\] *=[^=]|\.(update|setdefault|pop|clear|popitem)\b| *\|=)")
    assert [str(path) for path in PRODUCT.rglob("*.py") if writes.search(path.read_text())] == []
    assert f"`{name}`" in PAGE and f"`{module}`" in PAGE  # noqa: PT018 - one fact


@pytest.mark.parametrize(
    ("page", "registry"),
    [
        ("averaging.md", UPDATE_RULES),
        ("links.md", codec_names()),
        ("graph.md", FAMILIES),
        ("admission.md", ADMISSION_POLICIES),
        ("planning.md", PLACEMENT_POLICIES),
    ],
)
def test_every_registered_name_has_its_row(page, registry):
    assert set(registry) <= rows(page)


def test_update_rule(monkeypatch, tmp_path):
    """The manifest accepts it, and the worker's update is the one computed in numpy."""
    monkeypatch.setitem(UPDATE_RULES, "Lion", example("update_rule", tmp_path).Lion)
    own = rule_settings("Lion", ["betas=0.95,0.98"])
    settings = TrainingSettings.model_validate({"optimizer": {"name": "Lion"} | own, "learning_rate": 0.01})
    assert settings.optimizer.keeps == ("exp_avg",)
    assert settings.model_dump()["optimizer"] == {"name": "Lion", "betas": (0.95, 0.98)}
    rule = rule_of(settings.update)
    parameters = torch.randn(70_003, generator=torch.Generator().manual_seed(0))
    state, expected, mean = (
        {"exp_avg": torch.zeros(70_003)},
        parameters.numpy().copy(),
        np.zeros(70_003, "f4"),
    )
    f32 = np.float32
    for update in (1, 2, 3):
        gradient = torch.randn(70_003, generator=torch.Generator().manual_seed(update))
        rule.apply(
            parameters=parameters,
            state=state,
            gradient=gradient,
            coefficient=0.5,
            update=update,
            step=update,
        )
        g = gradient.numpy() * f32(0.5)
        expected = expected * f32(1 - 0.01 * 0.1) + np.sign((g - mean) * f32(1 - 0.95) + mean) * f32(-0.01)
        mean = mean + (g - mean) * f32(1 - 0.98)
    assert parameters.numpy().tobytes() == expected.tobytes()
    assert state["exp_avg"].numpy().tobytes() == mean.tobytes()


def test_an_unknown_update_rule_names_the_known_ones():
    with pytest.raises(ValueError, match=f"unknown optimizer 'Lion2'; known: {', '.join(UPDATE_RULES)}"):
        TrainingSettings.model_validate({"optimizer": {"name": "Lion2"}})
    with pytest.raises(LocalError, match=r"optimizer\.beta"):
        rule_settings("AdamW", ["beta=1"])


@pytest.fixture
def arena():
    made = Arena(16 << 20)
    yield made
    made.close()


def test_codec(monkeypatch, tmp_path, arena):
    """The manifest accepts it, a slow link takes it, and a bundle passes through the worker's executors."""
    codec = example("codec", tmp_path).FP8()
    monkeypatch.setitem(VALUE_CODECS, "fp8", codec)
    assert LinkSettings(codec="topk-fp8", reduce="fp8").codecs == (Codec(codec, sparse=True),) * 2
    assert coding_for(Codec.of("topk-fp8"), 4.0).codec == Codec(codec)
    staging = Staging(arena.memory, Copier.of(torch.device("cpu")))
    coders = Coders(Encoder(staging), Decoder(staging))
    extent, hidden = bundle(arena)
    for name, share in (("fp8", 1.0), ("topk-fp8", 0.1)):
        data, written = encode(coders, arena, extent, name, share)
        _, back = decode(coders, arena, name, written, data)
        read = view(arena, LAYOUT.within(back)["hidden"])
        kept = read != 0
        assert torch.allclose(read[kept], hidden[kept], rtol=2**-3, atol=1e-4)
        assert kept.sum() == (
            written[0].kept if share < 1 else (hidden.to(torch.float8_e5m2).float() != 0).sum()
        )


def test_an_unknown_codec_names_the_known_ones():
    with pytest.raises(ValueError, match=f"unknown codec 'fp9'; known: {', '.join(codec_names())}"):
        LinkSettings(codec="fp9")
    with pytest.raises(
        ValueError, match=f"'topk-int8' for a reduce; known: {', '.join(reduce_codec_names())}"
    ):
        LinkSettings(reduce="topk-int8")


class Windows(torch.nn.Module):
    """A model that needs the operators of the example."""

    def __init__(self, length):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, length), torch.nn.Linear(3, 1)
        self.length = length

    def forward(self, x):
        windows = self.second(self.first(x).unfold(1, 3, 1).sinh()).squeeze(2)
        return torch.logaddexp(windows, -windows).mean()


def test_operator(monkeypatch, tmp_path):
    """A model is traced, its blocks pass the volunteer's checks, and a step is that of eager torch."""
    own = {name: one for name, one in FAMILIES["guarded"].items() if name != "aten.unfold.default"}
    monkeypatch.setitem(FAMILIES, "guarded", own)  # as if the product did not have the page's example
    model, x = Windows(12), {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    with pytest.raises(LocalError, match=r"HP-MODEL-001.*aten\.unfold\.default"):
        trace(model, x)
    monkeypatch.setitem(FAMILIES, "windows", example("operator", tmp_path).FAMILY)
    dag = trace(model, x)
    blocks = [unpack_block(pack_block(block)) for block in cut_blocks(dag, 2)]
    assert_same_step(split_step(blocks, [(0, 1), (1, 2)], dag.tensors, [x]), eager_step(model, [x]))
    with pytest.raises(LocalError, match="at most 1024 windows, not 1498"):
        trace(Windows(1500), x)


def test_admission_policy(monkeypatch, tmp_path):
    """The manifest accepts it, and the coordinator's admission decides by it, also after a restart."""
    monkeypatch.setitem(ADMISSION_POLICIES, "neighbours", example("admission", tmp_path).Neighbours)
    settings, log = AdmissionSettings(policy="neighbours"), []
    hello = m.Hello(run="run", incarnation=0)
    for peer in ("a", "b", "b", "c"):
        decided = Admission("run", b"", settings, log).judge(peer, hello, 0.0, "10.1.2", ())
        assert isinstance(decided, Admitted)
        log += [decided.record] if decided.record else []
    assert [record["peer"] for record in log] == ["a", "b", "c"]
    admission = Admission("run", b"", settings, log)
    assert admission.judge("d", hello, 0.0, "10.1.2", ()) == m.Rejected(
        reason="uninvited", why="three peers of this network were admitted already"
    )
    assert isinstance(admission.judge("a", hello, 0.0, "10.1.2", ()), Admitted)
    assert isinstance(admission.judge("d", hello, 0.0, "10.1.3", ()), Admitted)


def test_an_unknown_admission_policy_names_the_known_ones():
    with pytest.raises(
        ValueError, match=f"unknown admission policy 'all'; known: {', '.join(ADMISSION_POLICIES)}"
    ):
        AdmissionSettings(policy="all")


class StrongToHeavyHistory(HistoryConfig):
    """A history in which the coordinator ranks places by the example's policy."""

    def coordinator(self, numerics):
        return replace(super().coordinator(numerics), placement="strong-to-heavy")


def test_placement_policy(monkeypatch, tmp_path):
    """A newcomer goes where it says, and a simulated swarm trains with it."""
    policy = example("placement", tmp_path).StrongToHeavy()
    monkeypatch.setitem(PLACEMENT_POLICIES, "strong-to-heavy", policy)
    work = asks([1, 4, 2])
    book = swarm(work, (0, 2.0, {}), (1, 2.0, {}), (2, 2.0, {}))
    assert [chosen(book, newcomer(tflops), work, "strong-to-heavy") for tflops in (1.0, 8.0)] == [0, 1]
    assert median(steps_of(StrongToHeavyHistory)) < 0.8 * median(steps_of(AsEver))
