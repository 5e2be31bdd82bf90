"""The commit record: the only truth about a step, and the message that tells it to the holders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_ledger import clip_coefficient
from hetpeer.bootstrap.log.credit import work_in, written
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.trust.verdicts import CheckVerdict


def commit(
    context: CoordinatorContext, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float
) -> list[Effect]:
    """`step` is committed by `decision`: the log says so, and then those who work on it are told."""
    outliers = _outliers(context, step, decision)
    record = _commit_record(step, decision, context, now)
    logged = context.log(**record, **({"outliers": outliers} if outliers else {}))
    context.norm_outliers.committed(step.batch, record["norm"], usual=not outliers)
    context.length_outliers.committed(step.reduction.lengths if step.reduction.checks.wanted else {})
    effects: list[Effect] = [logged]
    if step.ledger.evaluation:
        effects.append(context.log(**evaluation_record(step)))
    return effects + [Send(peer, commit_message(logged.record)) for peer in sorted(step.roster)]


def refused(
    context: CoordinatorContext, step: CoordinatedStep, decision: Mapping[int, m.BlockVote]
) -> dict[str, str]:
    """Whose norm alone would make nothing of everybody's update, with what is said to it: others are to find it, too, if there are any."""
    return {
        peer: f"the norm of block {block} in step {step.number} is {times:.1e} times that of a usual update, and nobody else holds it"
        for block, (peer, times) in _outliers(context, step, decision).items()
        if context.norm_outliers.refuses(step.batch, block)
    }


def _outliers(
    context: CoordinatorContext, step: CoordinatedStep, decision: Mapping[int, m.BlockVote]
) -> dict[int, tuple[str, float]]:
    """Block → its only holder, and how many times as long as a usual update it says that it is."""
    if context.config.clip_norm is None:
        return {}
    holders = {
        block: [peer for peer, (begin, end) in step.roster.items() if begin <= block < end]
        for block in decision
    }
    alone = [block for block, peers in holders.items() if len(peers) == 1]
    found = context.norm_outliers.outliers(decision, alone)
    return {block: (holders[block][0], times) for block, times in sorted(found.items())}


def _commit_record(
    step: CoordinatedStep, decision: Mapping[int, m.BlockVote], context: CoordinatorContext, now: float
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
        "plan": step.reduction.reduce.plan,
        "loss": step.ledger.train_loss(step.sizes),
        "norm": norm,
        "coefficient": clip_coefficient(norm, context.config.clip_norm),
        "gradients": {block: vote.digest for block, vote in sorted(decision.items())},
        **written(work_in(step.reduction.covers.values(), step.sizes), context.history.contributors),
        "seconds": now - step.reduction.awaited_at,
        "reduce_seconds": now - step.reduction.reduce.began_at,
        **step.ledger.unused.written(),
        **({"afterwards": afterwards} if (afterwards := context.late_work.take()) else {}),
    }


def given_up(step: CoordinatedStep) -> dict[str, Any]:
    """What the log says of a step that comes to nothing."""
    step.ledger.give_up()
    about = {"step": step.number, "batch": step.batch, "behind": step.behind}
    return {**about, **step.ledger.unused.written()}


@dataclass(slots=True)
class CheckFindings:
    """What has come of spot checks: what the log says, who is to be turned away, with the reason, and why the steps under way are to be begun anew."""

    logged: list[Effect] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)
    anew: str = ""

    def ban(self, context: CoordinatorContext, peer: str, why: str, about: Mapping[str, Any]) -> None:
        """`peer` has lied; who was kept apart from it need not be any more."""
        self.out[peer] = why
        self.logged.append(context.log(kind="banned", peer=peer, why=why, **about))
        context.reputation.banned(peer)


def found_out(context: CoordinatorContext, step: CoordinatedStep) -> CheckFindings:
    """Of the spot checks of `step` that have ended. Where bundles are in question, others have computed from them, too: all of that is done again, without who is convicted, or
    with two apart of whom one is false.
    """
    found = CheckFindings()
    for check in step.reduction.checks.take():
        verdict, culprit, against, apart, witness = check.outcome
        about = {"step": step.number, "checked": check.peer, "checkers": check.checkers}
        if verdict is CheckVerdict.CONVICTED:
            false = "what it gave" if culprit == check.peer else "its word as a checker"
            why = f"{false} in step {step.number} is not what two others found"
            found.ban(context, culprit, why, about)
        elif verdict is CheckVerdict.EVADED:
            found.out[culprit] = "it does not say what it has computed from"
        elif verdict is CheckVerdict.DISPUTED:
            context.reputation.disputed(against, culprit)
            found.logged.append(context.log(kind="dispute", peers=[against, culprit], **about))
        known = {pair for pair in apart if not pair & found.out.keys()}
        if known != apart or context.reputation.part(known, witness):
            found.anew = f"bundles in step {step.number} may be false: {against or culprit} is in question"
            for peer in sorted(_shunned(context, known)):
                why = "most of those next to it cannot work with it, and two others found them right"
                found.ban(context, peer, why, about)
    return found


def quarrelled(context: CoordinatorContext, step: CoordinatedStep) -> list[Effect]:
    """Who is in quarrel with whom after the plans of `step`: the log says so."""
    return [
        context.log(kind="quarrel", step=step.number, **news)
        for news in step.reduction.reduce.complaints.news()
    ]


def done_with(context: CoordinatorContext, step: int, out: Mapping[str, str]) -> list[Effect]:
    """Who of those turned out because of `step`, with the reason for each, is not to come back: the log says so."""
    done = [peer for peer in out if context.disputed_pairs.is_done_with(peer)]
    return [context.log(kind="banned", peer=peer, why=out[peer], step=step) for peer in done]


def _shunned(context: CoordinatorContext, pairs: Iterable[frozenset[str]]) -> set[str]:
    """Who of these has false bundles with most of those who hold the blocks before its own, or behind them."""
    places = {v.peer: v.place for v in context.members.volunteers.values() if v.place is not None}
    found = set()
    for peer in {peer for pair in pairs for peer in pair} & places.keys():
        for block in (places[peer][0] - 1, places[peer][1]):
            next_to_it = [
                other for other, (begin, end) in places.items() if begin <= block < end and other != peer
            ]
            if context.reputation.is_shunned(peer, next_to_it):
                found.add(peer)
    return found


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
