"""docs/models.md from the results of `make zoo`; needs neither torch nor the libraries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import zoo_table, zoo_timm_table

REASON = 150
"""Characters of a reason on the page."""
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
RESULTS = Path(__file__).with_name("results") / "zoo.json"
LIBRARIES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "transformers": zoo_table.FAMILIES,
    "timm": zoo_timm_table.FAMILIES,
}
"""Library → its families."""

Row = Mapping[str, Any]


class Entry(NamedTuple):
    """A model of the table."""

    family: str
    name: str
    task: str


def library_of(family: str) -> str:
    """The library that a family belongs to."""
    return next(library for library, families in LIBRARIES.items() if family in families)


def entries(chosen: str | None = None, names: Sequence[str] = ()) -> Iterator[Entry]:
    """The models of the tables: those of the family or library `chosen`, and those with one of `names`."""
    for library, families in LIBRARIES.items():
        for family, (usual, listed) in families.items():
            for written in listed.split():
                name, _, task = written.partition(":")
                if chosen in (None, library, family) and (not names or name in names or written in names):
                    yield Entry(family, name, task or usual)


def kept_rows() -> dict[Entry, Row]:
    """The results of the last run of each model that the tables still have, in the tables' order."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    found = {Entry(row["family"], row["name"], row["task"]): row for row in rows}
    return {entry: found[entry] for entry in entries() if entry in found}


def page(rows: Sequence[Row]) -> str:
    """The text of docs/models.md."""
    lines = [
        "# Architectures that were tried",
        "",
        "Made by `make zoo` (`benchmarks/zoo.py`); not edited by hand. Each model is small and random, and",
        "goes through what `hetpeer init` does: it is traced in training with a batch of any size, cut into",
        "blocks, packed, and compared with the eager module on one microbatch, with the run's own dropout",
        "and drop path. Figures: the largest relative differences of the loss and of a parameter's gradient.",
        "A model with a fixed batch trains with microbatches of one size only. Layer drop is off: a",
        "layer left out at random is no operator.",
        "",
        "| library | works | tried | with |",
        "| --- | --- | --- | --- |",
    ]
    for library, families in LIBRARIES.items():
        found = [row for row in rows if row["family"] in families]
        versions = "; ".join(sorted({row["versions"] for row in found}))
        lines.append(f"| {library} | {_works(found)} | {len(found)} | {versions} |")
    lines += [f"| together | {_works(rows)} | {len(rows)} | |", ""]
    lines += ["| family | works | tried |", "| --- | --- | --- |"]
    by_family = {
        family: [row for row in rows if row["family"] == family]
        for families in LIBRARIES.values()
        for family in families
    }
    lines += [f"| {family} | {_works(found)} | {len(found)} |" for family, found in by_family.items()]
    for family, found in by_family.items():
        lines += ["", f"## {family[0].upper()}{family[1:]}", ""]
        lines += ["| model | result | loss | gradient | batch |", "| --- | --- | --- | --- | --- |"]
        lines += [_line(row) for row in found]
    return "\n".join(lines) + "\n"


def _works(rows: Sequence[Row]) -> int:
    return sum(bool(row["works"]) for row in rows)


def _line(row: Row) -> str:
    model = f"{row['name']} ({row['task']})"
    if not row["works"]:
        return f"| {model} | {_short(row['why'])} | | | |"
    batch = "any" if row["dynamic"] else "fixed"
    return f"| {model} | works | {_figure(row['loss'])} | {_figure(row['gradient'])} | {batch} |"


def _figure(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def _short(why: str) -> str:
    """A reason for a table's cell: without paths, at most one line."""
    said = re.sub(r",? (at )?/\S+", "", why).replace("|", "/").replace("\n", " ")
    return said if len(said) <= REASON else said[: REASON - 1] + "…"
