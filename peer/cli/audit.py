"""`hetpeer audit`: was every microbatch counted exactly once? In words, or as one JSON object. What it does lives in bootstrap/."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import RunDir

if TYPE_CHECKING:
    from hetpeer.bootstrap.audit import Verdict
    from hetpeer.bootstrap.replay import Comparison

FIRST = 100
"""Of the ranking by credit."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(audit)


def audit(
    directory: RunDir,
    replay: Annotated[
        bool, typer.Option("--replay", help="Train again on this machine and compare every number.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check from the volunteers' signed logs that every microbatch was counted exactly once."""
    from hetpeer.bootstrap.audit import audit as run_audit
    from hetpeer.bootstrap.replay import replay as run_replay

    verdict = run_audit(directory)
    comparison = run_replay(directory) if replay else None
    ok = verdict.ok and (comparison is None or comparison.ok)
    print(_verdict_json(verdict, comparison, ok) if as_json else _verdict_text(verdict, comparison, ok))
    if not ok:
        raise typer.Exit(1)


def _verdict_json(verdict: Verdict, comparison: Comparison | None, ok: bool) -> str:
    from dataclasses import asdict

    document = {"schema": "hetpeer.audit/1", "ok": ok, **asdict(verdict)}
    if comparison is not None:
        document["replay"] = asdict(comparison)
    return json.dumps(document, indent=1)


def _verdict_text(verdict: Verdict, comparison: Comparison | None, ok: bool) -> str:
    from hetpeer.bootstrap.audit import RULES

    counts = f"{verdict.counted} of {verdict.microbatches_expected} counted exactly once"
    lines = [
        f"run           {verdict.run}",
        f"steps         {verdict.steps} of {verdict.steps_planned} committed, {verdict.rollbacks} rollbacks",
        f"evidence      {verdict.events} updates in the signed logs of {verdict.volunteers} volunteers",
        f"microbatches  {counts}, {verdict.lost} lost, {verdict.duplicated} duplicated",
    ]
    if any(verdict.staleness):
        spread = ", ".join(f"{behind} in {steps}" for behind, steps in sorted(verdict.staleness.items()))
        lines.append(f"staleness     updates by which a step's parameters were behind: {spread} steps")
    if verdict.leftovers:
        lines.append(f"leftovers     {verdict.leftovers} of them reached their holder through the task board")
    total = sum(verdict.credit.values())
    for rank, (peer, credit) in enumerate(list(verdict.credit.items())[:FIRST], 1):
        lines.append(
            f"credit        {rank}. {peer}  {credit:,} {verdict.unit} x blocks ({credit / total:.1%})"
        )
    if len(verdict.credit) > FIRST:
        lines.append(f"              and {len(verdict.credit) - FIRST} more: --json has all")
    problems = list(verdict.problems)
    if comparison is not None:
        judged = ", as the run's lossy codec lets them" if comparison.lossy else ""
        lines.append(f"replay        losses differ by {comparison.max_relative_loss_difference:.1e}{judged}")
        lines.append(f"              gradient norms by {comparison.max_relative_norm_difference:.1e}")
        if comparison.relative_moment_difference is not None:
            lines.append(f"              the final moments by {comparison.relative_moment_difference:.1e}")
            lines.append(
                f"              the final parameters by {comparison.relative_parameter_difference:.1e}"
            )
        problems += comparison.problems
    lines += [f"problem       {problem}" for problem in problems]
    lines += [
        f"broken        {rule}, {RULES[rule]} ({times})" for rule, times in sorted(verdict.broken.items())
    ]
    lines.append(f"verdict       {'exactly once' if ok else 'BROKEN'}")
    return "\n".join(lines)
