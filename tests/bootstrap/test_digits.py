"""A run of images, from the author's functions to a trained reference: arrays, an uneven last microbatch,
a loss outside.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.results.generate import generate
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity
from tests.bootstrap.drift import compare
from tests.bootstrap.engine import DIGITS, Engine, make_digits_run
from tests.bootstrap.test_create import assert_fails
from tests.reference.eager_training import train
from tests.reference.reference_run import run_reference


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_digits_run(tmp_path_factory.mktemp("images"))


def test_the_manifest_says_what_a_sample_is(digits: RunDirectory) -> None:
    digits.verify()
    data, plan = digits.manifest.data, digits.manifest.data_plan
    assert {name: (array.dtype, array.shape) for name, array in data.sample.items()} == {
        "image": ("float32", (1, 8, 8)),
        "label": ("int64", ()),
    }
    assert (data.kind, data.unit) == ("arrays", "samples")
    assert [sum(shard.samples for shard in part) for part in (data.train, data.heldout)] == [1618, 179]
    assert plan.sizes == [7, 7, 7, 2]
    author = digits.author()
    assert (author.loss, author.data) == (f"{DIGITS}:loss", (f"{DIGITS}:data",))


def test_microbatches_are_the_authors_samples(digits: RunDirectory) -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    known = {
        image.astype(np.float32).tobytes(): label
        for image, label in zip(theirs.images, theirs.target, strict=True)
    }
    for number in (0, 3, 4):
        batch = digits.batches().microbatch(2, number)
        for image, label in zip(batch["image"], batch["label"], strict=True):
            assert known[(image[0] * 16).tobytes()] == label


def test_three_steps_of_the_reference(digits: RunDirectory) -> None:
    """Written down again with nothing but torch: the mean over 23 samples is what a step follows."""
    records, state = train(digits.path, [0] * 3, {})
    settings, batches = digits.manifest.training, digits.batches()
    model = build_model(f"{DIGITS}:build", seed=3)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.optimizer.betas,
        eps=settings.optimizer.eps,
        weight_decay=settings.weight_decay,
    )
    for step in range(3):
        parts = [batches.microbatch(step, number) for number in range(4)]
        batch = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in parts[0]}
        assert len(batch["label"]) == 23
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        assert records["losses"][step] == pytest.approx(loss.item(), rel=1e-6)
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        assert records["norms"][step] == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(state[name], parameter, atol=1e-5)
    assert list(records["evaluations"]) == [0, 2, 3]


@pytest.mark.usefixtures("forked_replay")
def test_blocks_train_as_the_reference_does(digits: RunDirectory, tmp_path: Path) -> None:
    """Traced, cut and summed slot by slot; then the weights go home under the author's names."""
    Engine(digits, [Identity.create(tmp_path / name) for name in ("a", "b")]).train()
    assert audit(digits.path).ok
    comparison = compare(digits.path, run_reference(digits.path, 4))
    assert comparison.problems == []
    exported = export(digits.path, tmp_path / "weights.safetensors")
    model = build_model(digits.author().model, seed=99)
    model.load_state_dict(load_file(exported.weights), strict=True)
    assert json.loads(exported.metrics.read_text().splitlines()[-1])["kind"] == "evaluation"


def test_no_text_comes_out_of_images(digits: RunDirectory) -> None:
    with pytest.raises(LocalError, match="not trained on text") as caught:
        next(generate(digits.path, "a", tokens=1, temperature=0, seed=0))
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-008", ExitCode.CONFIG)


AUTHOR = """
import numpy as np
import torch

def nothing():
    return iter(())

def number():
    return 7

def stumbles():
    yield {"image": np.zeros((1, 8, 8), dtype=np.float32), "label": 0}
    raise OSError("the archive is gone")

def changes():
    for size in (8, 8, 9, 8):
        yield {"image": np.zeros((1, 8, size), dtype=np.float32), "label": 0}

def others():
    for _ in range(9):
        yield {"picture": np.zeros((1, 8, 8), dtype=np.float32), "label": 0}

def no_loss(logits, batch):
    return None

def wrong_loss(logits, batch):
    return logits @ batch["label"]
"""


@pytest.mark.parametrize(
    ("function", "code", "word"),
    [
        ("missing", "HP-DATA-004", "no function 'missing'"),
        ("not a name", "HP-DATA-004", "form module.py:function"),
        ("nothing", "HP-DATA-003", "yields 0 samples"),
        ("number", "HP-DATA-004", "TypeError: 'int' object is not iterable"),
        ("stumbles", "HP-DATA-004", "OSError: the archive is gone (author.py, line 13)"),
        ("changes", "HP-DATA-005", "sample 2 "),
        ("others", "HP-MODEL-004", "needs 'image'"),
    ],
)
def test_a_data_function_that_cannot_be_used(tmp_path: Path, function: str, code: str, word: str) -> None:
    (tmp_path / "author.py").write_text(AUTHOR)
    error = assert_fails(
        tmp_path,
        code,
        ExitCode.CONFIG,
        model=f"{DIGITS}:build",
        loss=f"{DIGITS}:loss",
        data=[f"{tmp_path / 'author.py'}:{function}"],
    )
    assert word in str(error)
    assert error.fix


@pytest.mark.parametrize(
    ("function", "code", "word"),
    [
        ("missing", "HP-MODEL-008", "no function 'missing'"),
        ("wrong_loss", "HP-MODEL-002", "author.py:27"),
    ],
)
def test_a_loss_function_that_cannot_be_used(tmp_path: Path, function: str, code: str, word: str) -> None:
    (tmp_path / "author.py").write_text(AUTHOR)
    error = assert_fails(
        tmp_path,
        code,
        ExitCode.CONFIG,
        model=f"{DIGITS}:build",
        loss=f"{tmp_path / 'author.py'}:{function}",
        data=[f"{DIGITS}:data"],
    )
    assert word in str(error)


def test_data_is_one_function_or_paths(tmp_path: Path) -> None:
    functions = [f"{DIGITS}:data", f"{DIGITS}:data"]
    for data in (functions, [functions[0], tmp_path], [tmp_path / "missing.py", functions[0]]):
        error = assert_fails(tmp_path, "HP-DATA-004", ExitCode.CONFIG, model=f"{DIGITS}:build", data=data)
        assert "not the only --data" in error.why
    error = assert_fails(
        tmp_path, "HP-DATA-004", ExitCode.CONFIG, model=f"{DIGITS}:build", data=["gone.py:data"]
    )
    assert "there is no file gone.py" in error.why


def test_model_loss_and_data_share_one_module(tmp_path: Path) -> None:
    """A loss may ask for a class of its own module."""
    (tmp_path / "shared.py").write_text(
        "import numpy as np, torch\n"
        "from torch import nn\n"
        "class Scores:\n"
        "    def __init__(self, logits):\n"
        "        self.logits = logits\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.lin = nn.Linear(2, 3)\n"
        "    def forward(self, x):\n"
        "        return Scores(self.lin(x))\n"
        "def loss(outputs, batch):\n"
        "    assert isinstance(outputs, Scores)\n"
        "    return nn.functional.cross_entropy(outputs.logits, batch['y'])\n"
        "def data():\n"
        "    for i in range(300):\n"
        "        yield {'x': np.array([i, -i], dtype=np.float32), 'y': i % 3}\n"
    )
    module = tmp_path / "shared.py"
    run = create_run(
        tmp_path / "run", model=f"{module}:Model", loss=f"{module}:loss", data=[f"{module}:data"], stages=[1]
    )
    assert len(train(run.path, [0], {})[0]["losses"]) == 1


@pytest.mark.parametrize(
    ("settings", "field"), [({"seed": -1}, "seed"), ({"sequence_length": 0}, "sequence_length")]
)
def test_settings_are_checked_before_they_are_used(
    tmp_path: Path, settings: dict[str, int], field: str
) -> None:
    error = assert_fails(tmp_path, "HP-RUN-001", ExitCode.CONFIG, model=f"{DIGITS}:build", **settings)
    assert error.what.endswith(field)
