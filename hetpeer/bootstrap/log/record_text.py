"""Decisions of the log in plain words, for the person who runs a reliable peer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetpeer.bootstrap.log.moves import Move, MoveResult
from hetpeer.dht.base.errors import short_id, short_ids

TOLD = frozenset(
    {"rollback", "gone", "planned", "arranged", "backups", "moved"}
    | {"banned", "bad_sample", "dispute", "quarrel"}
    | {"founded", "dissolved"}
)
"""Kinds of records that a person should hear of."""
OF_ONE_CLUSTER = frozenset({"rollback", "gone", "bad_sample"})
"""Those that are of one cluster of a grouped run; they name it unless it is cluster 0."""
FAREWELL = "said farewell"
"""The reason in a `gone` record of a volunteer that left by itself."""
PLAIN = {
    "stream broken": "its connection broke",
    "lease expired": "nothing was heard of it for too long",
    "came back as a new session": "it has restarted",
}
"""Other reasons in such records → the same for people."""


def record_text(record: Mapping[str, Any], before: int | None = None, *, grouped: bool = False) -> str:
    """A record of a kind in TOLD as one line; `before`: steps committed before a roll-back, if known;
    `grouped`: the record is of a grouped run.

    >>> record_text({"kind": "dissolved", "cluster": 2, "why": "no holder is left of block 3"}, grouped=True)
    'cluster 2 falls apart: no holder is left of block 3'
    """
    text = short_ids(_text(record, before))
    named = record["kind"] in ("founded", "dissolved")
    of_cluster = "cluster" in record or (grouped and record["kind"] in OF_ONE_CLUSTER)
    return f"cluster {record.get('cluster', 0)}: {text}" if of_cluster and not named else text


def _text(record: Mapping[str, Any], before: int | None) -> str:
    """One line for people on a record of a kind in TOLD; `before`: steps committed before a roll-back."""
    match record["kind"]:
        case "rollback":
            return f"back to step {record['to_version']}: {record['why']}{_again(record, before)}"
        case "founded" if record["version"]:
            return f"cluster {record['cluster']} begins from the last checkpoint"
        case "founded":
            return f"cluster {record['cluster']} begins"
        case "dissolved":
            return f"cluster {record['cluster']} falls apart: {record['why']}"
        case "gone" if record["why"] == FAREWELL:
            return f"volunteer {short_id(record['peer'])} left"
        case "gone":
            return f"volunteer {short_id(record['peer'])} is lost: {PLAIN.get(record['why'], record['why'])}"
        case "planned":
            places = sum(len(layout) for layout in record["layouts"])
            cuts = "; ".join(_cut(layout) for layout in record["layouts"])
            return f"plan {record['id']} is in force, with {places} places, by pipeline: {cuts}"
        case "arranged":
            cuts = "; ".join(_cut(layout) for layout in record["layouts"])
            backups = len(record.get("backups", ()))
            spared = f"; {backups} volunteer{' is a backup' if backups == 1 else 's are backups'}"
            return f"the blocks are divided anew, by pipeline: {cuts}{spared if backups else ''}"
        case "backups" if record["steps_in"]:
            named = ", ".join(map(short_id, record["steps_in"]))
            return f"a block has no other volunteer any more; from now on a backup works: {named}"
        case "backups":
            return f"backups now: {', '.join(map(short_id, record['peers'])) or 'none'}"
        case "moved":
            return f"the move of blocks {result_text(MoveResult.model_validate(record))}"
        case "banned":
            return f"volunteer {short_id(record['peer'])} is banned: {record['why']}"
        case "bad_sample":
            follows = "it is left out" if record["skipped"] else "the run halts"
            return f"{bad_sample_text(record)}; {follows}"
        case "dispute":
            one, other = map(short_id, record["peers"])
            return f"volunteers {one} and {other} report different results for step {record['step']}"
        case "quarrel":
            named = ", ".join(f"{short_id(one)} and {short_id(other)}" for one, other in record["pairs"])
            others = int(record["of"]) - len(record["pairs"])
            more = f" and {others} more pairs" if others > 0 else ""
            return f"volunteers who cannot add up together: {named}{more} ({record['why']})"
        case kind:
            raise ValueError(f"a {kind} record is told to nobody")


def result_text(result: MoveResult | None) -> str:
    """Cost and result of a move, as the end of a sentence; None: it has not settled."""
    if result is None:
        return "has not settled yet"
    took = "" if result.moving_s is None else f"took {result.moving_s:.0f} s"
    if result.after_s is None:
        return f"{took + ', and ' if took else ''}cannot be judged: {result.why}"
    return f"{took}; a step takes {result.after_s:.1f} s now"


def move_text(move: Move) -> str:
    """A move of blocks in one line: what it promised, what it took, and what came."""
    promise = move.promise
    what = "pipelines formed anew"
    if promise.blocks:
        what = "1 block moved" if promise.blocks == 1 else f"{promise.blocks} blocks moved"
    instead = "" if promise.before_s is None else f" instead of {promise.before_s:.1f} s"
    promised = f"{promise.after_s:.1f} s a step{instead} promised, for {promise.moving_s:.0f} s of moving"
    return f"step {move.step}: {what}; {promised}; it {result_text(move.result)}"


def bad_sample_text(record: Mapping[str, Any]) -> str:
    """One line on the samples of a `bad_sample` record, for people and as the reason of a halt."""
    where = f"microbatch {record['id']} of step {record['step']}"
    return f"{record['where']} cannot be computed by anybody ({where}): {record['why']}"


def _again(record: Mapping[str, Any], before: int | None) -> str:
    steps = 0 if before is None else before - int(record["to_version"])
    if steps > 0:
        return f"; {steps} step{' is' if steps == 1 else 's are'} computed again"
    return ""


def _cut(layout: list[list[int]]) -> str:
    """`0-3, 4-7, 8`: the blocks of each place of a pipeline."""
    return ", ".join(str(begin) if end - begin == 1 else f"{begin}-{end - 1}" for begin, end in layout)
