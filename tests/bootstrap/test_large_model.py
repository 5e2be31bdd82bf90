"""Parameters that do not fit into memory lie in files: the same numbers."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hetpeer.bootstrap.authoring import large_model
from hetpeer.bootstrap.authoring.large_model import LEAST_BYTES, LargeTensorsInFiles
from hetpeer.bootstrap.authoring.user_code import build_model
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
