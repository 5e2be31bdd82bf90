"""Logs of exact runs, as far as their training curves go: commits, evaluations and roll-backs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def commit(step: int, view: int = 0) -> dict[str, Any]:
    return {
        "kind": "commit",
        "term": 1,
        "view": view,
        "step": step,
        "batch": step,
        "plan": 1,
        "loss": 3.0 - step / 64 + view / 1024,
        "norm": 1.0 + view,
    }


def evaluation(version: int, loss: float = 2.0) -> dict[str, Any]:
    return {"kind": "evaluation", "step": version, "batch": version, "loss": loss}


def rollback(version: int, view: int = 1) -> dict[str, Any]:
    return {"kind": "rollback", "view": view, "to_version": version}


@st.composite
def _logs(draw: st.DrawFn) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    version = view = 0
    for _ in range(draw(st.integers(0, 24))):
        if draw(st.integers(0, 5)) == 0:
            version, view = draw(st.integers(0, version)), view + 1
            records.append(rollback(version, view))
            continue
        records.append(commit(version, view))
        if version % 2 == 0:
            records.append(evaluation(version, draw(st.sampled_from([1.5, 2.0]))))
        version += 1
        if draw(st.booleans()):
            records.append({"kind": "checkpoint", "version": version, "blocks": []})
    return records


LOGS = _logs()
