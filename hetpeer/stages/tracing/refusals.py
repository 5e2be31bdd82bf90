"""Refusals of models that cannot be shipped: what, why, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.dht.base.errors import ExitCode, LocalError

HINTS: Mapping[str, str] = {
    "rand": "take random numbers out of forward (nn.Dropout is understood):"
    " a redone task must give the same result",
    "bernoulli": "use nn.Dropout for random masks: a task redone by another peer must give the same result",
    "batch_norm": "use nn.BatchNorm with a fixed momentum, once per forward",
}
VALUES = "let no shape and no number of the graph depend on the values of a tensor (no x[mask], no item())"
NOT_LISTED = "it is not on the list of operators"


def unsupported(op: str, why: str = NOT_LISTED, where: str = "", fix: str = "") -> LocalError:
    """HP-MODEL-001; `where` is the author's line that calls the operator, `fix` overrides `HINTS`."""
    hints = (hint for part, hint in HINTS.items() if part in op)
    fix = fix or next(hints, "express the model with other operators")
    what = f"the model uses the operator {op}, which volunteers cannot run"
    why = f"{why}, at {where}" if where else why
    return LocalError("HP-MODEL-001", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


def unfit(what: str, why: str, fix: str) -> LocalError:
    """HP-MODEL-003: the model cannot be trained here."""
    return LocalError("HP-MODEL-003", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)
