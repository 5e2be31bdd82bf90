"""The commit record: the only truth about a step, and the message that tells it to the holders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.credit import work_in, written
from hetpeer.bootstrap.decisions import Effect, Send
from hetpeer.bootstrap.history import History
from hetpeer.bootstrap.ledger import clip_coefficient
from hetpeer.bootstrap.reign import Reign
from hetpeer.bootstrap.spotcheck import Verdict
from hetpeer.bootstrap.training import CoordinatedStep


def commit(
    reign: Reign, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float
) -> list[Effect]:
    """`step` is committed by `decision`: the log says so, and then those who work on it are told."""
    logged = reign.log(**_commit_record(step, decision, reign, now))
    effects: list[Effect] = [logged]
    if step.ledger.evaluation:
        effects.append(reign.log(**evaluation_record(step)))
    return effects + [Send(peer, commit_message(logged.record)) for peer in sorted(step.roster)]


def _commit_record(
    step: CoordinatedStep, decision: Mapping[int, m.BlockVote], reign: Reign, now: float
) -> dict[str, Any]:
    """What the log says of `step`: its plan, loss, gradient digests, the global norm with what follows from it, and who counted how much."""
    norm = math.sqrt(math.fsum(vote.squared_norm for vote in decision.values()))
    return {
        "kind": "commit",
        "term": step.line.term,
        "view": step.line.view,
        "step": step.number,
        "batch": step.batch,
        **({"behind": step.behind} if step.behind else {}),
        "workers": step.workers,
        "plan": step.reduce.plan,
        "loss": step.ledger.train_loss(step.sizes),
        "norm": norm,
        "coefficient": clip_coefficient(norm, reign.config.clip_norm),
        "gradients": {block: vote.digest for block, vote in sorted(decision.items())},
        **written(work_in(step.covers.values(), step.sizes), reign.history.contributors),
        "seconds": now - step.awaited_at,
        "reduce_seconds": now - step.reduce.began_at,
    }


def found_out(reign: Reign, step: CoordinatedStep) -> tuple[list[Effect], dict[str, str]]:
    """What the log says of the spot checks that have ended, and who was convicted by them, with the reason."""
    effects: list[Effect] = []
    convicted: dict[str, str] = {}
    for check in step.checks.take():
        about = {"step": step.number, "checked": check.peer, "checkers": check.checkers}
        if check.verdict is Verdict.CONVICTED:
            false = "its sums" if check.culprit == check.peer else "its word as a checker"
            why = f"{false} of step {step.number} are not what two others found"
            convicted[check.culprit] = why
            effects.append(reign.log(kind="banned", peer=check.culprit, why=why, **about))
        elif check.verdict is Verdict.DISPUTED:
            effects.append(reign.log(kind="dispute", peers=[check.peer, check.culprit], **about))
    return effects, convicted


def evaluation_record(step: CoordinatedStep) -> dict[str, Any]:
    """The held-out loss of the state with which `step` began."""
    loss = step.ledger.evaluation_loss()
    return {"kind": "evaluation", "step": step.number, "batch": step.batch, "loss": loss}


def commit_message(record: Mapping[str, Any]) -> m.Commit:
    """A commit record as the holders are told, on the line on which it was decided."""
    return m.Commit(
        line=m.Line(term=record["term"], view=record["view"], cluster=record.get("cluster", 0)),
        step=record["step"],
        plan=record["plan"],
        coefficient=record["coefficient"],
        loss=record["loss"],
        workers=record.get("workers", 1),
        digests={int(block): digest for block, digest in record["gradients"].items()},
    )


def average_message(record: Mapping[str, Any], cluster: int, step: int) -> m.Commit:
    """An averaging's record as the members of `cluster` are told when it is their step `step`, on the line on which it was decided."""
    return m.Commit(
        line=m.Line(term=record["term"], view=0, cluster=cluster),
        step=step,
        group=record["group"],
        plan=record["plan"],
        coefficient=1.0 / len(record["clusters"]),
        loss=None,
        digests={int(block): digest for block, digest in record["sums"].items()},
    )


def last_message(history: History) -> m.Commit | None:
    """What led to the version of `history`, for whoever was not told; nothing at its beginning."""
    step = history.version - 1
    if step in history.averages:
        return average_message(history.averages[step], history.cluster, step)
    return commit_message(history.commits[step]) if step in history.commits else None
