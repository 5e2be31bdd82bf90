"""What commits credit to each peer, beside what the volunteers' signed logs say was in the sums: rule C1 of the audit. Docs: credit.md."""

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
    """Peer → samples times blocks that it has, and where that is not what was applied. `sizes`: how many samples each id has.

    A step of which some block has no evidence, or one holder's word against another's, is not compared: that is a problem of its own.
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
