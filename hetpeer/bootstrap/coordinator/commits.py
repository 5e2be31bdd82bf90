"""Commit records, the only truth about a step, and the messages that tell holders of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.coordinator.step import CoordinatedStep
from hetpeer.bootstrap.coordinator.step_ledger import clip_coefficient
from hetpeer.bootstrap.log.credit import work_in, written
from hetpeer.bootstrap.log.history import History, view_in
from hetpeer.bootstrap.state.context import CoordinatorContext
from hetpeer.bootstrap.state.effects import Effect, Send
from hetpeer.bootstrap.trust.verdicts import CheckVerdict


def commit(
    context: CoordinatorContext, step: CoordinatedStep, decision: Mapping[int, m.BlockVote], now: float
) -> list[Effect]:
    """Commit `step` by `decision`: write the log record first, then tell the step's volunteers."""
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
    """Lone holders whose norm would swamp everybody's update → reason; others, if any, compute it as well."""
    return {
        peer: f"the norm of block {block} in step {step.number} is {times:.1e} times that of a usual update, "
        "and nobody else holds it"
        for block, (peer, times) in _outliers(context, step, decision).items()
        if context.norm_outliers.refuses(step.batch, block)
    }


def _outliers(
    context: CoordinatorContext, step: CoordinatedStep, decision: Mapping[int, m.BlockVote]
) -> dict[int, tuple[str, float]]:
    """Block → its only holder, and the norm it claims as a multiple of the usual one."""
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
    """Log record of a commit: plan, loss, gradient digests, norms, clip coefficient, volunteers' shares.

    `squares`: each block's part of the squared norm, so that a replay can name a block. `group_squares`: each
    parameter group's part, the last one that of all other parameters.
    """
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
        **_skipped(step.ledger.skipped & step.samples.sizes.keys()),
        "loss": step.ledger.train_loss(step.samples.weights),
        "norm": norm,
        "squares": [vote.squared_norm for _, vote in sorted(decision.items())],
        **group_squares(decision),
        "coefficient": clip_coefficient(norm, context.config.clip_norm),
        "gradients": {block: vote.digest for block, vote in sorted(decision.items())},
        **written(
            work_in(step.reduction.covers.values(), step.samples.sizes),
            context.history.contributors,
            step.roster,
        ),
        "seconds": now - step.reduction.awaited_at,
        "reduce_seconds": now - step.reduction.reduce.began_at,
        **step.ledger.unused.written(),
        **({"afterwards": afterwards} if (afterwards := context.late_work.take()) else {}),
    }


def group_squares(decision: Mapping[int, m.BlockVote]) -> dict[str, Any]:
    """Squared norms of the parameter groups; nothing if a vote has none, or others than the rest."""
    told = [vote.group_squares for vote in decision.values()]
    if not told or not told[0] or len({*map(len, told)}) > 1:
        return {}
    return {"group_squares": [math.fsum(parts) for parts in zip(*told, strict=True)]}


def given_up(step: CoordinatedStep) -> dict[str, Any]:
    """Log fields of a step that is given up."""
    step.ledger.give_up()
    about = {"step": step.number, "batch": step.batch, "behind": step.behind}
    return {**about, **step.ledger.unused.written()}


@dataclass(slots=True)
class CheckFindings:
    """Results of spot checks: log records, peers to fence → reason, why steps begin anew (empty: no)."""

    logged: list[Effect] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)
    anew: str = ""

    def ban(self, context: CoordinatorContext, peer: str, why: str, about: Mapping[str, Any]) -> None:
        """`peer` has lied: ban it. Volunteers that were kept apart from it no longer are."""
        self.out[peer] = why
        self.logged.append(context.log(kind="banned", peer=peer, why=why, **about))
        context.reputation.banned(peer)


def check_findings(context: CoordinatorContext, step: CoordinatedStep) -> CheckFindings:
    """Findings of the spot checks of `step` that have ended.

    Others have computed from bundles that are in question too. That work is done again, without a convicted
    volunteer, or with two volunteers kept apart of which one is lying.
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


def dispute_records(context: CoordinatorContext, step: CoordinatedStep) -> list[Effect]:
    """Log records of the pairs that came into dispute after the plans of `step`."""
    return [
        context.log(kind="quarrel", step=step.number, **news)
        for news in step.reduction.reduce.complaints.news()
    ]


def ban_records(context: CoordinatorContext, step: int, out: Mapping[str, str]) -> list[Effect]:
    """Ban records for the peers of `out` (peer → reason) that were fenced too often, now in `step`."""
    done = [peer for peer in out if context.disputed_pairs.is_done_with(peer)]
    return [context.log(kind="banned", peer=peer, why=out[peer], step=step) for peer in done]


def _shunned(context: CoordinatorContext, pairs: Iterable[frozenset[str]]) -> set[str]:
    """Peers of `pairs` whose bundles are false to most holders of the blocks before or behind their own."""
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
    """Log record of held-out loss and hits of the state with which `step` began."""
    skipped = _skipped(step.ledger.skipped - step.samples.sizes.keys())
    loss = step.ledger.evaluation_loss(step.samples.evaluation_weights)
    found = step.ledger.evaluation_hits()
    hits = {} if found is None else {"hits": found}
    return {"kind": "evaluation", "step": step.number, "batch": step.batch, **skipped, "loss": loss, **hits}


def _skipped(ids: Iterable[int]) -> dict[str, Any]:
    """Record field of the ids that cannot be computed, if there are any."""
    return {"skipped": sorted(ids)} if ids else {}


def commit_message(record: Mapping[str, Any]) -> m.Commit:
    """The commit message for holders, in the term and view of its record."""
    return m.Commit(
        line=m.TermView(term=record["term"], view=record["view"], cluster=record.get("cluster", 0)),
        step=record["step"],
        plan=record["plan"],
        coefficient=record["coefficient"],
        loss=record["loss"],
        workers=record.get("workers", 1),
        digests={int(block): digest for block, digest in record["gradients"].items()},
    )


def average_message(record: Mapping[str, Any], cluster: int, step: int) -> m.Commit:
    """The commit message of an averaging for members of `cluster`, as their step `step`."""
    return m.Commit(
        line=m.TermView(term=record["term"], view=view_in(record, cluster), cluster=cluster),
        step=step,
        group=record["group"],
        plan=record["plan"],
        coefficient=1.0 / len(record["clusters"]),
        loss=None,
        digests={int(block): digest for block, digest in record["sums"].items()},
    )


def last_message(history: History) -> m.Commit | None:
    """The message that led to the version of `history`, for volunteers that missed it; None at first."""
    step = history.version - 1
    if step in history.averages:
        return average_message(history.averages[step], history.cluster, step)
    return commit_message(history.commits[step]) if step in history.commits else None
