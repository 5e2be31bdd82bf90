"""What SECURITY.md and docs/trust.md say shows something, is there: every test, every benchmark, every
`make` target; and each attack has one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("SECURITY.md", "docs/trust.md")
NAMED = re.compile(r"`((?:tests|benchmarks)/(?!results)[^`]+|make [a-z0-9-]+)`")
"""Results are made by who runs the benchmarks."""
ATTACKS = range(1, 18)
ROW = re.compile(r"^\| (\d+)[a-z]? \|", re.MULTILINE)


def spelled_out(name: str) -> Iterator[str]:
    """`a/test_{b,c}.py` is two."""
    match = re.search(r"\{([^}]*)\}", name)
    if match is None:
        yield name
        return
    for part in match[1].split(","):
        yield from spelled_out(name[: match.start()] + part + name[match.end() :])


def named(text: str) -> list[str]:
    return [one for name in NAMED.findall(text) for one in spelled_out(name)]


def is_there(name: str) -> bool:
    """A file with tests, `file::test` in it, a folder or file of what is no test, or a target of the
    Makefile.
    """
    if name.startswith("make "):
        return re.search(rf"^{name[5:]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) is not None
    file, _, test = name.partition("::")
    found = sorted(ROOT.glob(file))
    if not test and not Path(file).name.startswith("test_"):
        return bool(found)
    tests = [
        one.name
        for path in found
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test_")
    ]
    return test in tests if test else bool(tests)


def shown_by() -> dict[str, list[str]]:
    """Row of the table of attacks → what its last column names."""
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if ROW.match(line)]
    return {line.split("|")[1].strip(): named(line.rstrip("| ").rpartition(" | ")[2]) for line in lines}


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_is_there(page: str) -> None:
    names = named((ROOT / page).read_text())
    assert len(names) >= 10
    assert [name for name in names if not is_there(name)] == []


def test_each_attack_has_a_test_or_a_benchmark() -> None:
    rows = shown_by()
    assert {int(re.match(r"\d+", row)[0]) for row in rows} == set(ATTACKS)
    assert [row for row, names in rows.items() if not names] == []


@pytest.mark.parametrize(
    "name",
    [
        "tests/bootstrap/test_nothing.py",
        "tests/test_security_page.py::test_nothing",
        "tests/bootstrap/court.py::test_x",
        "make nothing",
    ],
)
def test_what_is_not_there_is_found_out(name: str) -> None:
    assert not is_there(name)
