"""`hetpeer bench`: figures of this machine, and what is said of what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hetpeer.peer.checkup import machine_speeds
from hetpeer.peer.checkup.machine_speeds import MeasuredSpeed
from hetpeer.peer.cli.main import app
from hetpeer.stages.block.device import measure_flops


def test_the_command_measures_all_of_it(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(app, ["bench", "--json", "--home", str(tmp_path / "home")])
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == "hetpeer.bench/1"
    cores = document["machine"]["cores"]
    rows = {(row["what"], row["where"], row["dtype"], row["threads"]): row for row in document["speeds"]}
    for threads in {1, cores}:
        assert rows["product", "cpu", "float32", threads]["per_second"] > 1e7
        assert rows["copy", "cpu", "", threads]["per_second"] > 1e7
    for what, where in (("write", "disk"), ("send", "loopback")):
        assert rows[what, where, "", 0]["per_second"] > 1e5, rows
    assert [*tmp_path.iterdir()] == []


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = machine_speeds._tried("write", "disk", lambda: machine_speeds.written(tmp_path / "file"))
    assert found.per_second is None
    assert "not measured: " in found.line()
    with pytest.raises(RuntimeError):
        measure_flops(torch.device("cpu"), 0.1, torch.bool)


def test_a_line_has_its_unit() -> None:
    product = MeasuredSpeed(what="product", where="cpu", dtype="float32", threads=2, per_second=2e11)
    assert product.line().split() == ["product", "cpu", "float32", "2", "threads", "200", "GFLOP/s"]
    assert MeasuredSpeed(what="copy", where="cuda:0", per_second=float(3 << 30)).line().endswith(" 3 GiB/s")
