"""`hetpeer audit`: check that every microbatch was counted exactly once. The work is done in
bootstrap/audit.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from hetpeer.peer.cli.options import JsonOption, RunDir
from hetpeer.peer.limits.amounts import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hetpeer.bootstrap.audit.audit import AuditVerdict
    from hetpeer.bootstrap.audit.replay_result import Replay
    from hetpeer.bootstrap.log.contributions import Contribution, Tally

FIRST = 100
"""Contributors shown."""


def audit(
    directory: RunDir,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="Compute the run again on this machine and compare every number."),
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            metavar="N",
            min=1,
            help="Compute only N steps again, drawn at random, and what lies between a checkpoint and them.",
        ),
    ] = None,
    contributions: Annotated[
        bool,
        typer.Option(
            "--contributions",
            help="List every microbatch of every step: the version it was computed with, and whether it was "
            "used, late or lost.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check that every microbatch was counted exactly once.

    The proof is in the volunteers' signed logs.
    """
    from hetpeer.bootstrap.audit.audit import audit as run_audit
    from hetpeer.bootstrap.audit.replay import replay as run_replay

    verdict = run_audit(directory, contributions=contributions)
    replayed = run_replay(directory, sample=sample) if replay or sample is not None else None
    ok = verdict.ok and (replayed is None or replayed.ok)
    print(_verdict_json(verdict, replayed, ok) if as_json else _verdict_text(verdict, replayed, ok))
    if not ok:
        raise typer.Exit(1)


def _verdict_json(verdict: AuditVerdict, replayed: Replay | None, ok: bool) -> str:
    from dataclasses import asdict

    document = {"schema": "hetpeer.audit/1", "ok": ok, **asdict(verdict)}
    document["moves"] = [move.model_dump() for move in verdict.moves]
    if replayed is not None:
        document["replay"] = replayed.document()
    return json.dumps(document, indent=1)


def _verdict_text(verdict: AuditVerdict, replayed: Replay | None, ok: bool) -> str:
    """The report of an audit, with the replay if there was one."""
    from hetpeer.bootstrap.audit.audit import RULES
    from hetpeer.bootstrap.log.record_text import move_text

    counts = f"{verdict.counted:,} of {verdict.microbatches_expected:,} counted exactly once"
    lines = [
        f"run           {verdict.run}",
        (
            f"steps         {verdict.steps:,} of {verdict.steps_planned:,} committed, "
            f"{counted(verdict.rollbacks, 'roll-back')}"
        ),
        (
            f"evidence      {verdict.events:,} updates in the signed logs of "
            f"{counted(verdict.volunteers, 'volunteer')}"
        ),
        f"microbatches  {counts}, {verdict.lost} lost, {verdict.duplicated} duplicated",
    ]
    if verdict.skipped:
        lines.append(
            f"skipped       {counted(verdict.skipped, 'microbatch', 'microbatches')} that nobody can compute"
        )
    if verdict.awaited:
        lines.append(
            f"awaited       {counted(verdict.awaited, 'newer step')}: the run is not over, and their "
            "evidence is still to come from volunteers"
        )
    lines.append(f"contributions {_counts(verdict.contributed)}")
    if any(verdict.staleness):
        spread = ", ".join(f"{behind} in {steps}" for behind, steps in sorted(verdict.staleness.items()))
        lines.append(f"staleness     age of the parameters in updates: {spread} steps")
    if verdict.leftovers:
        lines.append(
            f"leftovers     {verdict.leftovers} of them were computed by a volunteer that came into the step "
            "for them"
        )
    lines += [f"move          {move_text(move)}" for move in verdict.moves]
    total = sum(verdict.credit.values())
    for rank, (peer, credit) in enumerate(list(verdict.credit.items())[:FIRST], 1):
        lines.append(
            f"credit        {rank}. {peer}  {credit:,} {verdict.unit} x blocks ({credit / total:.1%})"
        )
    if len(verdict.credit) > FIRST:
        lines.append(f"              and {len(verdict.credit) - FIRST} more: --json has all")
    lines += _each(verdict.contributions or ())
    problems = list(verdict.problems)
    if replayed is not None:
        lines += _replay_lines(replayed)
        problems += replayed.problems
    lines += [f"outvoted      {who}" for who in verdict.outvoted]
    lines += [f"problem       {problem}" for problem in problems]
    lines += [
        f"broken        {rule}, {RULES[rule]} ({times})" for rule, times in sorted(verdict.broken.items())
    ]
    so_far = ", so far" if verdict.awaited else ""
    lines.append(f"verdict       {f'exactly once{so_far}' if ok else 'BROKEN'}")
    return "\n".join(lines)


def _replay_lines(replayed: Replay) -> Iterator[str]:
    """Lines on what one machine got."""
    of = f"of {counted(replayed.steps, 'step')}"
    if replayed.sample is not None:
        yield f"replay        {replayed.sample} {of} drawn, and the steps before them since a checkpoint"
    if replayed.equal:
        evaluations = counted(replayed.evaluations, "held-out loss", "held-out losses")
        yield f"replay        {replayed.equal} {of} and {evaluations} equal to the last bit"
    if replayed.near:
        off = f"{replayed.farthest:.1e} off at most, {replayed.bound:.1e} allowed"
        yield f"replay        {replayed.near} {of} as near as rounding allows: {off}"
    if replayed.shown:
        yield f"replay        {replayed.shown} {of} not judged: {replayed.farthest:.1e} off at most"
    if replayed.why:
        yield f"              not to the last bit: {replayed.why}"
    if replayed.sample is not None:
        unseen = counted(replayed.undetected, "step")
        yield f"              at most {unseen} may be wrong unseen, with 95 % confidence"
    if not replayed.steps:
        yield "replay        no step is there to compute again"


def _counts(tally: Tally) -> str:
    """Number of contributions of each kind."""
    used = sum(tally.used.values())
    stale = ", ".join(f"{count:,} by {behind}" for behind, count in sorted(tally.used.items()))
    parts = [f"{used:,} used", f"{tally.late:,} late", f"{tally.lost:,} lost and done again"]
    if any(tally.used):
        parts[0] += f" (stale: {stale})"
    if tally.signed < used:
        parts.append(f"{used - tally.signed:,} of the used ones lack a signature for some block")
    if tally.waiting:
        parts.append(f"{tally.waiting:,} batches are still to be done again")
    if tally.silent:
        parts.append(f"{tally.silent:,} steps have no record of late or lost ones")
    return ", ".join(parts)


def _each(contributions: Iterable[Contribution]) -> Iterator[str]:
    """One line for all ids that share step, state and peer."""
    for about, ids in groupby(contributions, key=_about):
        yield f"contribution  {about.replace('IDS', _spans([one.id for one in ids]))}"


def _about(one: Contribution) -> str:
    cluster = f"cluster {one.cluster} " if one.cluster else ""
    view = f" view {one.view}" if one.view else ""
    what = f"{cluster}step {one.step}{view}, batch {one.batch}, base {one.base}, staleness {one.staleness}"
    why = f" ({one.why})" if one.why else ""
    whose = f" of {one.peers[0]}" if one.why and one.peers else ""
    group = "" if one.group is None else f", averaged in group {one.group}"
    return f"{what}: {one.state} IDS{why}{whose}{group}"


def _spans(ids: Iterable[int]) -> str:
    """Rising numbers as ranges: `1-3, 7`."""
    spans: list[list[int]] = []
    for number in ids:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
