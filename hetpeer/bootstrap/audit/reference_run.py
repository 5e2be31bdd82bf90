"""The author's module, trained again by plain torch in a process of its own (reference.py), for plots.

Its numbers drift away from the run's by rounding alone, as those of any second machine do. So they are shown
and not judged; the verdict is replay.py's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from hetpeer.bootstrap.audit.child_process import run_child
from hetpeer.bootstrap.run.durable_files import temporary_folder
from hetpeer.dht.base.errors import LocalError

REFERENCE = "hetpeer.bootstrap.audit.reference"


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Results of one machine: `records` and `state` as reference.py's `train` returns them."""

    records: Mapping[str, Any]
    state: Mapping[str, np.ndarray[Any, Any]]


def run_reference(directory: Path, steps: int, behind: Sequence[int] = ()) -> ReferenceRun:
    """Train `steps` steps in a child process; `behind`: staleness of each. Raises HP-AUDIT-001, HP-DISK-*."""
    with temporary_folder("replay") as folder:
        out = folder / "reference.json"
        arguments = [str(directory), str(out), json.dumps([*behind] or [0] * steps)]
        status, said = run_child(REFERENCE, arguments)
        if status:
            raise LocalError(
                "HP-AUDIT-001",
                "the reference cannot run here",
                why=(said.strip().splitlines() or ["it was killed"])[-1],
                fix="run the audit on the machine where hetpeer init was run",
            )
        return ReferenceRun(json.loads(out.read_text()), _trained(out.with_suffix(".safetensors")))


def _trained(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Trained tensors: float32 only. A frozen tensor may have a type that numpy does not know."""
    with safe_open(path, "np") as file:
        return {n: file.get_tensor(n) for n in file.keys() if file.get_slice(n).get_dtype() == "F32"}  # noqa: SIM118
