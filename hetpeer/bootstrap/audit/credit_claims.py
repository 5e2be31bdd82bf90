"""Rule C1 of the audit: credit in commits equals the work in the volunteers' signed logs. Docs: credit.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hetpeer.bootstrap.log.credit import Contributors, work_in
from hetpeer.bootstrap.log.evidence import AppliedEvent, Key
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.log.logged_decision import Decision


def check_credit(
    surviving: Iterable[Decision],
    records: Iterable[Record],
    applied: Mapping[Key, Sequence[AppliedEvent]],
    sizes: Mapping[int, int],
    blocks: int,
) -> tuple[Counter[str], list[str]]:
    """Peer → credit, and a line for each difference from the applied work; `sizes`: id → samples.

    A step with a block without evidence, or with contradicting holders, is not compared: that is a problem of
    its own.
    """
    contributors = Contributors()
    for record in records:
        contributors.add(record)
    credit: Counter[str] = Counter()
    problems: list[str] = []
    for one in surviving:
        if one.counted is None:
            continue
        given = Counter(dict(contributors.read(one.counted)))
        credit += given
        said = [applied.get((*one.key, block), ()) for block in range(blocks)]
        work = work_in((events[0].cover for events in said if events), sizes)
        known = all(events and len({event.counts for event in events}) == 1 for events in said)
        wrong = [peer for peer in sorted(work.keys() | given.keys()) if known and work[peer] != given[peer]]
        problems += [f"{one}: {peer} is credited {given[peer]}, and has {work[peer]}" for peer in wrong]
    return credit, problems
