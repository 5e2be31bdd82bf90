"""The amounts that `make test` and `make proof-tests` differ in: a few cases here, all of them there.

`pytest -m "proof or hypothesis" --hypothesis-profile=proof` is what `make proof-tests` runs
(docs/testing.md).
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

PROOF_PROFILE = "proof"
EXAMPLES = 100
"""Examples in a proof of a test that names no number, as hypothesis has it."""
SHARE = 5
"""`make test` tries one of so many of the examples that a proof tries."""
FEWEST = 4
"""Examples that are tried in any case, where a proof tries as many."""


def examples(count: int, **options: Any) -> settings:
    """Settings of hypothesis: `count` examples in a proof, a part of them in `make test`."""
    if settings.get_current_profile_name() != PROOF_PROFILE:
        count = min(count, max(FEWEST, count // SHARE))
    return settings(max_examples=count, **options)


def mostly_proof(values: Iterable[Any], here: Iterable[Any]) -> list[Any]:
    """The parameters `values`, tuples for several arguments; those that are not in `here` are proofs."""
    everything, kept = list(values), list(here)
    missing = [value for value in kept if value not in everything]
    assert not missing, f"no such parameters: {missing}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in kept else [pytest.mark.proof],
        )
        for value in everything
    ]
