"""docs/glossary.md: every name in it exists in the product code, and no banned word is part of a name
there.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "hetpeer"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
MOST_ROWS = 40

OTHER_MEANING = {"border": {"Border"}}
"""Banned word → names in which it means another thing: here the place between two blocks of a graph."""


@cache
def rows() -> list[list[str]]:
    """The cells of each row of the table, without its head."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    table = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return table[2:]


@cache
def names_by_word() -> dict[str, set[str]]:
    """Lower-case word → names of modules, classes and functions of the product that contain it."""
    found = defaultdict(set)
    for path in sorted(PRODUCT.rglob("*.py")):
        names = [path.parent.name if path.stem == "__init__" else path.stem]
        names += [
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        for name in names:
            for word in WORD.findall(name):
                found[word.lower()].add(name)
    return dict(found)


def banned() -> set[str]:
    """Words of the last column."""
    return {word.strip() for *_, words in rows() for word in words.split(",") if word.strip()}


def test_the_table_is_short_and_each_row_is_complete() -> None:
    assert 0 < len(rows()) <= MOST_ROWS
    for row in rows():
        assert len(row) == 4, row
        assert all(row[:3]), row
    words = [word.strip() for word, *_ in rows() for word in word.split(",")]
    assert len(set(words)) == len(words), "a word in two rows"
    assert banned().isdisjoint(words), "a word that is both used and banned"


def test_every_name_of_the_table_is_in_the_code() -> None:
    for word, _, where, _ in rows():
        path, *names = re.findall(r"`([^`]+)`", where)
        assert (PRODUCT / path).is_file(), f"{word}: {path}"
        defined = {
            node.name
            for node in ast.parse((PRODUCT / path).read_text()).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert defined.issuperset(names), f"{word}: {names} in {path}"


def test_no_banned_word_is_part_of_a_name() -> None:
    found = {
        word: left
        for word in banned()
        if (left := names_by_word().get(word, set()) - OTHER_MEANING.get(word, set()))
    }
    assert found == {}


def test_exceptions_exist() -> None:
    for word, names in OTHER_MEANING.items():
        assert names <= names_by_word()[word], word
