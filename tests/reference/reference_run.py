"""The author's module trained again by plain torch, in a process of its own (eager_training.py).

Its numbers drift away from the run's by rounding alone, as those of any second machine do. Few steps can be
compared within gates (tests/bootstrap/drift.py); long runs are compared by replay.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors import safe_open

from hetpeer.bootstrap.audit.child_process import run_child


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Results of one machine: `records` and `state` as `train` of eager_training.py returns them."""

    records: Mapping[str, Any]
    state: Mapping[str, np.ndarray[Any, Any]]


def run_reference(
    directory: Path, steps: int, behind: Sequence[int] = (), bounds: Mapping[str, int] | None = None
) -> ReferenceRun:
    """Train `steps` steps in a child process, which may raise `RuntimeError`. `behind`: staleness of each;
    `bounds`: parameter → the most that it is stale, if that is less.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "reference.json"
        stale = json.dumps([*behind] or [0] * steps), json.dumps({**(bounds or {})})
        arguments = [str(directory), str(out), *stale]
        status, said = run_child("tests.reference.eager_training", arguments)
        if status:
            raise RuntimeError((said.strip().splitlines() or ["the reference was killed"])[-1])
        return ReferenceRun(json.loads(out.read_text()), _trained(out.with_suffix(".safetensors")))


def _trained(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Trained tensors: float32 only. A frozen tensor may have a type that numpy does not know."""
    with safe_open(path, "np") as file:
        return {n: file.get_tensor(n) for n in file.keys() if file.get_slice(n).get_dtype() == "F32"}  # noqa: SIM118
