"""Parameters that do not fit into memory lie in files: the same numbers."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from hetpeer.bootstrap.authoring import large_model, package_model
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.large_model import LEAST_BYTES, LargeTensorsInFiles, kept_in_files
from hetpeer.bootstrap.authoring.user_code import build_model
from hetpeer.bootstrap.model_checks import equivalence
from hetpeer.bootstrap.model_checks.block_gradients import BlockGradients
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.base.errors import LocalError

WIDTH = 2048


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(3000, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def lies_in_file(tensor):
    """Whether the tensor's memory is mapped from a file."""
    address = tensor.data_ptr()
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "/" in line
    raise AssertionError("the tensor is nowhere")


def test_what_does_not_fit_lies_in_files_and_has_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plain = build()
    with LargeTensorsInFiles(memory_bytes=4 * 3000 * WIDTH):
        large = build()
    assert [lies_in_file(one) for one in large.parameters()] == [False, True, False, False, False]
    with LargeTensorsInFiles(memory_bytes=LEAST_BYTES):
        large = build()
    assert [lies_in_file(one) for one in large.parameters()] == [True, True, False, False, False]
    assert all(isinstance(one, nn.Parameter) and one.requires_grad for one in large.parameters())
    for one, other in zip(plain.parameters(), large.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not list(tmp_path.iterdir()), "a file without a name"
    large(torch.tensor([[1, 2]])).sum().backward()
    assert large[0].weight.grad is not None


def test_a_planned_model_takes_no_file(monkeypatch):
    monkeypatch.setattr(large_model, "_in_file", lambda *_: pytest.fail("a file for a tensor without memory"))
    with torch.device("meta"), LargeTensorsInFiles(memory_bytes=0):
        assert all(one.is_meta for one in build().parameters())
    with LargeTensorsInFiles(memory_bytes=0):
        assert torch.empty(LEAST_BYTES, device="meta").is_meta


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Embedding(3000, 2048)\n"
    )

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(large_model, "survey", lambda: type("Free", (), {"ram_free_bytes": 0}))
    with pytest.raises(LocalError, match="HP-DISK-002"):
        build_model(f"{tmp_path}/own.py:build", 0)


def test_what_a_backward_needs_lies_in_files_and_changes_no_bit(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.randn(1024, WIDTH)
    model(x).sum().backward()
    plain = [one.grad for one in model.parameters()]
    model.zero_grad()
    made = []
    with pytest.MonkeyPatch.context() as patch:
        in_file = large_model._in_file
        patch.setattr(large_model, "_in_file", lambda *what: made.append(in_file(*what)) or made[-1])
        with kept_in_files(model, tmp_path, memory_bytes=x.nbytes):
            loss = model(x).sum()
    assert len(made) >= 2, "the first of them is in memory"
    assert all(lies_in_file(one) and one.shape == x.shape for one in made), "and no weight is copied"
    loss.backward()
    assert all(torch.equal(one.grad, before) for one, before in zip(model.parameters(), plain, strict=True))


def deleted_bytes():
    """Bytes that are mapped from nameless files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "(deleted)" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


BUILD = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 256)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def author(tmp_path):
    (tmp_path / "own.py").write_text(BUILD)
    (tmp_path / "text.txt").write_text("a text of some letters " * 500)
    return {
        "model": f"{tmp_path}/own.py:Model",
        "data": [tmp_path / "text.txt"],
        "sequence_length": 16,
        "training": TrainingSettings(steps=2, batch_size=8, microbatch_size=2, eval_microbatches=1),
        "stages": [4],
        "seed": 3,
    }


def little_memory(monkeypatch):
    """All parameters in files, and no memory to compare the whole model."""
    monkeypatch.setattr(large_model, "LEAST_BYTES", 512)
    monkeypatch.setattr(large_model, "LEAST_KEPT", 512)
    monkeypatch.setattr(large_model, "survey", lambda: type("Free", (), {"ram_free_bytes": 0}))
    monkeypatch.setattr(equivalence, "memory_of", lambda _: 1 << 60)


def test_a_run_of_a_large_model_is_that_of_a_small_one(tmp_path, monkeypatch, author):
    plain = create_run(tmp_path / "plain", **author)
    little_memory(monkeypatch)
    seen, said = [], []
    write = package_model._write_block

    def watched(folder, spec, dag, model):
        before = deleted_bytes()
        entry = write(folder, spec, dag, model)
        seen.append((before, deleted_bytes()))
        return entry

    monkeypatch.setattr(package_model, "_write_block", watched)
    large = create_run(tmp_path / "large", **author, tell=said.append)
    assert large.manifest.blocks == plain.manifest.blocks
    assert any("block by block" in line for line in said)
    assert len(seen) >= 4
    assert all(after < before for before, after in seen[1:-1]), "what is in the run is nowhere else"


def test_a_large_model_with_a_backward_of_its_own_is_refused(tmp_path, monkeypatch, author):
    (tmp_path / "own.py").write_text(
        BUILD.replace("x + F.gelu(layer(x))", "x + Odd.apply(layer(x))")
        + """
class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient
"""
    )
    little_memory(monkeypatch)
    with pytest.raises(LocalError, match="HP-MODEL-011"):
        create_run(tmp_path / "run", **author)
    assert not (tmp_path / "run").exists()


def test_gradients_of_a_few_blocks_exist_at_a_time(tmp_path, monkeypatch, author):
    little_memory(monkeypatch)
    most, take = [], BlockGradients.take

    def watched(self, name, gradient):
        take(self, name, gradient)
        most.append(sum(tensor.numel() for key, tensor in self._apart.items() if key != "words.weight"))

    monkeypatch.setattr(BlockGradients, "take", watched)
    create_run(tmp_path / "run", **author)
    assert len(most) == 1 + 2 * 6 + 1
    assert 0 < max(most) <= 2 * (16 * 16 + 16), "of two layers"


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, monkeypatch, author):
    little_memory(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 20_000}))
    monkeypatch.setattr(large_model, "_in_file", lambda *_: pytest.fail("a file on a disk that is too small"))
    with pytest.raises(LocalError, match="20,000 bytes are free, 2") as caught:
        create_run(tmp_path / "run", **author)
    assert caught.value.code == "HP-DISK-002"
