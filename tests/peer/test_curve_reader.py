"""Reading `metrics.jsonl` while it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetpeer.peer.watching import curve_reader
from hetpeer.peer.watching.curve_reader import CurveReader, PlacedPoint


def line(kind: str, step: int, **fields: Any) -> bytes:
    return json.dumps({"kind": kind, "step": step, "loss": 2.0, **fields}).encode() + b"\n"


def looked(reader: CurveReader) -> list[tuple[int | None, list[int]]]:
    return [(change.void_from, [point.x for point in change.points]) for change in reader.look()]


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    reader = CurveReader(tmp_path / "metrics.jsonl")
    assert looked(reader) == []
    (tmp_path / "metrics.jsonl").write_bytes(line("step", 0))
    assert looked(reader) == [(None, [1])]
    reader.close()


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path, whole = tmp_path / "metrics.jsonl", line("step", 1)
    path.write_bytes(line("step", 0) + whole[:7])
    reader = CurveReader(path)
    assert looked(reader) == [(None, [1])]
    assert looked(reader) == []
    with path.open("ab") as file:
        file.write(whole[7:] + b"no JSON\n" + line("evaluation", 2))
    assert looked(reader) == [(None, [2, 2])]
    reader.close()


def test_a_long_curve_comes_in_rows(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(curve_reader, "ROW", 4)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line("step", step) for step in range(10)))
    reader = CurveReader(path)
    assert [len(points) for _, points in looked(reader)] == [4, 4, 2]
    reader.close()


def replaced(path: Path, content: bytes) -> None:
    (path.parent / "new").write_bytes(content)
    (path.parent / "new").replace(path)


def test_another_file_with_the_same_points_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line("step", 0) + line("step", 1))
    reader = CurveReader(path)
    assert looked(reader) == [(None, [1, 2])]
    replaced(path, line("step", 0) + line("step", 1))
    assert looked(reader) == []
    replaced(path, line("step", 0) + line("step", 1) + line("step", 2))
    assert looked(reader) == [(None, [3])]
    replaced(path, line("step", 0) + line("step", 1, view=1))
    assert looked(reader) == [(2, [2])]
    replaced(path, line("step", 0))
    assert looked(reader) == [(2, [])]
    reader.close()


def test_of_a_grouped_run_the_place_is_the_number_of_commits(tmp_path: Path) -> None:
    """Its batches come in any order."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line("step", 0, batch=1) + line("step", 0, batch=0) + line("evaluation", 1, batch=2))
    reader = CurveReader(path, grouped=True)
    assert looked(reader) == [(None, [1, 2, 2])]
    reader.close()


def test_scalars_have_the_names_that_people_know() -> None:
    fields = {"kind": "step", "step": 3, "loss": 2, "norm": 0.5, "learning_rate": 1e-3, "plan": 7}
    point = PlacedPoint(
        4, {**fields, "tokens_per_second": 64.0, "block_norms": [0.3, 0.4], "group_norms": {"*.bias": 0.25}}
    )
    assert point.scalars == {
        "train/loss": 2.0,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-3,
        "train/tokens_per_second": 64.0,
        "grad_norm/block_000": 0.3,
        "grad_norm/block_001": 0.4,
        "grad_norm/*.bias": 0.25,
    }
    held_out = PlacedPoint(4, {"kind": "evaluation", "step": 4, "loss": 1.0, "perplexity": 2.7})
    assert held_out.scalars == {"eval/loss": 1.0, "eval/perplexity": 2.7}
