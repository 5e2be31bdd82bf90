"""`hetpeer init`'s work: a complete run directory, or an error in plain words and nothing on the disk."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from hetpeer.bootstrap.authoring.create import create_run, name_of
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.results.export import export
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.stages.block import block_state, device, state_file
from tests.bootstrap.engine import TRAINING, make_author


def test_run_directory_is_complete(fresh: RunDirectory) -> None:
    fresh.verify()
    manifest = fresh.manifest
    assert manifest.training == TRAINING
    assert manifest.coordinators == (Identity.load(fresh.identity_path).peer_id,)
    assert [len(layout) for layout in manifest.layouts] == [2, 1]
    assert manifest.blocks[-1].output_bytes == 4
    assert (fresh.path / "owner.key").stat().st_mode & 0o777 == 0o600
    names = {path.name for path in fresh.path.iterdir()}
    folders = {"graph", "state", "data", "checkpoints", "log", "volunteers"}
    assert names == folders | {"manifest.hetpeer", "owner.key", "identity.key", "author.json"}


def test_initial_state_is_the_authors_model(fresh: RunDirectory) -> None:
    model = build_model(fresh.author().model, seed=3)
    expected = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for block, layout in zip(fresh.manifest.blocks, fresh.layouts(), strict=True):
        loaded = state_file.load(fresh.state_path(block).read_bytes(), block.index, layout, ())
        assert loaded.digest() == block.state_digest
        assert (block.parameter_count, block.parameter_bytes) == (
            len(loaded.parameters),
            4 * len(loaded.parameters),
        )
        for name, part in block_state.split(loaded.parameters, layout):
            assert (part == expected.pop(name)).all()
    assert not expected


def test_shards_hold_the_authors_text(fresh: RunDirectory, fresh_template: RunDirectory) -> None:
    data = fresh.manifest.data
    text = b"".join(
        load_file(fresh.data / shard.name)["tokens"].tobytes() for shard in (*data.train, *data.heldout)
    )
    assert text == (fresh_template.path.parent / "author" / "text.txt").read_bytes() + b"\n"
    assert 0 < data.heldout[0].samples < data.train[0].samples


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damaged_file_is_named(fresh: RunDirectory, damage: str) -> None:
    path = fresh.state_path(fresh.manifest.blocks[1])
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(LocalError, match=r"initial-001\.safetensors") as caught:
        fresh.verify()
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-005", ExitCode.VERSION)


def test_other_machine_has_no_author(fresh: RunDirectory) -> None:
    (fresh.path / "author.json").unlink()
    with pytest.raises(LocalError) as caught:
        fresh.author()
    assert caught.value.code == "HP-RUN-006"


@pytest.fixture
def author(tmp_path: Path) -> str:
    return make_author(tmp_path / "author")


def written_in(folder: Path) -> list[Path]:
    """All files and folders below `folder`, without what Python compiles."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


def assert_fails(tmp_path: Path, code: str, exit_code: ExitCode, **arguments: object) -> LocalError:
    """Creating the run fails with this code and leaves nothing behind."""
    before = written_in(tmp_path)
    with pytest.raises(LocalError) as caught:
        create_run(tmp_path / "run", **arguments)
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)
    assert written_in(tmp_path) == before
    return caught.value


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def build():\n    raise KeyError('no such size')", "KeyError: 'no such size' (broken.py, line 2)"),
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye (broken.py, line 2)"),
        ("def build(:", "SyntaxError"),
        ("def build():\n    return 7", "it returned a int"),
        ("def other():\n    pass", "has no function 'build'"),
        ("def build(width):\n    pass", "TypeError"),
    ],
)
def test_module_that_cannot_be_used(tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    (tmp_path / "text.txt").write_text("text " * 1000)
    error = assert_fails(
        tmp_path,
        "HP-MODEL-006",
        ExitCode.CONFIG,
        model=f"{tmp_path / 'broken.py'}:build",
        data=[tmp_path / "text.txt"],
    )
    assert why in error.why


@pytest.mark.parametrize("model", ["broken.py", "missing.py:build", "broken.py:not a name", ":build"])
def test_reference_that_names_nothing(tmp_path: Path, model: str) -> None:
    assert_fails(tmp_path, "HP-MODEL-006", ExitCode.CONFIG, model=model)


FIXED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, tokens):
        return (self.linear(tokens.float().reshape(2, 16)) - {rows}).square().mean()

def build():
    return Model()
"""


def test_a_model_of_one_size_needs_batches_that_it_divides(tmp_path: Path, author: str) -> None:
    (tmp_path / "fixed.py").write_text(FIXED.format(rows="torch.ones(2, 16)"))
    error = assert_fails(
        tmp_path,
        "HP-MODEL-009",
        ExitCode.CONFIG,
        model=f"{tmp_path / 'fixed.py'}:build",
        data=[tmp_path / "author"],
        sequence_length=16,
        training=TRAINING.model_copy(update={"batch_size": 7}),
    )
    assert error.why == "7 samples are no multiple of 2"


def test_a_model_of_one_size_evaluates_full_microbatches(tmp_path: Path, author: str) -> None:
    """Such a run would stop at its first evaluation, with a microbatch that nobody can compute."""
    (tmp_path / "fixed.py").write_text(FIXED.format(rows="torch.ones(2, 16)"))
    arguments = {
        "model": f"{tmp_path / 'fixed.py'}:build",
        "data": [tmp_path / "author"],
        "sequence_length": 16,
        "training": TRAINING.model_copy(update={"eval_samples": 5, "eval_microbatches": 3}),
    }
    asked = arguments | {"reading": DataOptions(eval_samples=3)}
    error = assert_fails(tmp_path, "HP-MODEL-009", ExitCode.CONFIG, **asked)
    assert error.why == "an evaluation of 3 samples is no multiple of 2"
    training = create_run(tmp_path / "run", **arguments).manifest.training  # type: ignore[arg-type]
    assert (training.eval_samples, training.eval_microbatches) == (4, 2)


REVERSED = """
import torch
from torch import nn

class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        return self.head(Reversal.apply(self.linear(tokens.float()))).square().mean()
"""


def reversing(tmp_path: Path) -> dict[str, Any]:
    """A run of a model with a backward of its own."""
    (tmp_path / "reversed.py").write_text(REVERSED)
    (tmp_path / "text.txt").write_text("text " * 1000)
    return {
        "model": f"{tmp_path / 'reversed.py'}:Model",
        "data": [tmp_path / "text.txt"],
        "sequence_length": 16,
        "training": TRAINING,
    }


def test_a_backward_that_volunteers_would_not_run(tmp_path: Path) -> None:
    error = assert_fails(tmp_path, "HP-MODEL-011", ExitCode.CONFIG, **reversing(tmp_path))
    assert "'linear." in error.what


def test_without_the_memory_for_it_nothing_is_compared_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        device, "survey", lambda: device.HostResources(ram_bytes=9, ram_free_bytes=9, cores=1)
    )
    said: list[str] = []
    create_run(tmp_path / "run", **reversing(tmp_path), tell=said.append)
    assert "are not compared" in caplog.text
    assert any("a batch is not compared" in line for line in said)


def test_little_text(tmp_path: Path, author: str) -> None:
    (tmp_path / "short.txt").write_text("x" * 100)
    data = [tmp_path / "short.txt"]
    error = assert_fails(
        tmp_path, "HP-DATA-003", ExitCode.CONFIG, model=author, data=data, sequence_length=16
    )
    assert "held-out" in error.what


def test_full_disk(tmp_path: Path, author: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        arguments = {"model": author, "data": [tmp_path / "author"], "sequence_length": 16}
        assert_fails(tmp_path, "HP-DISK-002", ExitCode.TOO_SMALL, **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_unwritable_place(tmp_path: Path, author: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalError) as caught:
        create_run(tmp_path / "file" / "run", model=author)
    assert caught.value.code == "HP-DISK-001"


def test_existing_directory_is_not_touched(tmp_path: Path, author: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    assert_fails(tmp_path, "HP-DISK-003", ExitCode.CONFIG, model=author)


def test_constants_travel_with_the_block(tmp_path: Path) -> None:
    source = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, tokens, targets):
        logits = self.head(self.embed(tokens) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
    (tmp_path / "buffered.py").write_text(source)
    (tmp_path / "text.txt").write_text("text " * 1000)
    model = f"{tmp_path / 'buffered.py'}:Model"
    run = create_run(tmp_path / "run", model=model, data=[tmp_path / "text.txt"], training=TRAINING)
    run.verify()
    (reference,) = [block.buffers for block in run.manifest.blocks if block.buffers]
    constants = load_file(run.path / "state" / reference.name)
    assert torch.equal(torch.from_numpy(constants["scale"]), torch.full((8,), 0.5))
    (run.path / "state" / reference.name).write_bytes(b"x" * reference.bytes)
    with pytest.raises(LocalError) as caught:
        export(run.path, tmp_path / "weights.safetensors")
    assert caught.value.line().startswith(
        f"HP-RUN-005: {run.path / 'state' / reference.name} is not the file"
    )


@pytest.mark.parametrize(
    ("folder", "name"), [("My Run", "my-run"), ("Modèle.2", "mod-le.2"), ("__", "run"), ("x" * 99, "x" * 64)]
)
def test_a_folder_of_any_name_gives_a_name(folder: str, name: str) -> None:
    assert name_of(Path("/runs") / folder) == name


def test_what_cannot_be_is_said_before_anything_is_made(tmp_path: Path, author: str) -> None:
    """Not after the data is cut and the model traced: here there is too little text to be cut."""
    text = tmp_path / "little.txt"
    text.write_text("a")
    for name, reliable, field in (("My Run", (), "name"), ("run", ("nobody",), "coordinators")):
        with pytest.raises(LocalError, match="HP-RUN-001") as caught:
            create_run(tmp_path / "run", model=author, data=[text], name=name, reliable=reliable)
        assert field in caught.value.what
        assert not (tmp_path / "run").exists()
