"""Credit of a run that its manifest describes. Docs: credit.md."""

from __future__ import annotations

from collections.abc import Iterable

from hetpeer.bootstrap.log.credit import Credit
from hetpeer.bootstrap.log.history import Record
from hetpeer.bootstrap.run.manifest import Manifest


def credit_in(manifest: Manifest, records: Iterable[Record]) -> Credit:
    """What `records` give, in tokens (or samples) times blocks; later records can be added."""
    grouped = None if manifest.averaging is None else manifest.training.steps
    credit = Credit(manifest.data.tokens_per_sample, grouped)
    for record in records:
        credit.add(record)
    return credit
