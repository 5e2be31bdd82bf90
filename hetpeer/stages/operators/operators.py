"""The registry of operators that a block may use: a name from the wire is only a dictionary key.

A new family of operators is one module and one line here (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from hetpeer.stages.operators import (
    aten_operators,
    chunked_loss,
    ctc_loss,
    drawn_operators,
    frozen_operators,
    guarded_operators,
    indexed_operators,
    own_operators,
    scan_operators,
)
from hetpeer.stages.operators.operator_family import Operator

FAMILIES: dict[str, Mapping[str, Operator]] = {
    "aten": aten_operators.FAMILY,
    "chunked": chunked_loss.FAMILY,
    "ctc": ctc_loss.FAMILY,
    "drawn": drawn_operators.FAMILY,
    "frozen": frozen_operators.FAMILY,
    "guarded": guarded_operators.FAMILY,
    "indexed": indexed_operators.FAMILY,
    "own": own_operators.FAMILY,
    "scan": scan_operators.FAMILY,
}
"""Family → its operators by their names in a graph; no name is in two families."""


def find_operator(name: str) -> Operator | None:
    """The operator called `name` in a graph; None if there is none."""
    return next((family[name] for family in FAMILIES.values() if name in family), None)


def operator_of(name: str) -> Operator:
    """The operator of a call that interpreter.py has accepted."""
    found = find_operator(name)
    assert found is not None, name
    return found
