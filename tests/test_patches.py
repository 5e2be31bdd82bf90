"""Names of the product that tests and benchmarks import or patch exist, also in proofs that run rarely.

A patch of a name that was renamed meanwhile changes nothing, and its test then shows nothing.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PATCHING = {"setattr", "object", "_patched"}
"""Functions whose first two arguments are an object and the name of an attribute."""


def imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """(name in the file, object) of each import from the product, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hetpeer"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if hasattr(module, alias.name):
                    found = getattr(module, alias.name)
                else:
                    found = importlib.import_module(f"{node.module}.{alias.name}")
                yield alias.asname or alias.name, found


def patched(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """(object, attribute) of each patch: `Class.name = …`, `patch.object(module, "name", …)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets):
                flat = [one for target in targets for one in getattr(target, "elts", [target])]
                yield from ((one.value, one.attr) for one in flat if isinstance(one, ast.Attribute))
            case ast.Call(
                func=ast.Attribute(attr=called) | ast.Name(id=called),
                args=[owner, ast.Constant(value=str(name)), *_],
            ) if called in PATCHING:
                yield owner, name
            case _:
                pass


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_what_is_imported_and_patched_exists(folder):
    missing, count = [], 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        there = dict(imported(tree))
        for owner, name in patched(tree):
            if isinstance(owner, ast.Name) and owner.id in there:
                count += 1
                if not hasattr(there[owner.id], name):
                    missing.append(f"{path.relative_to(ROOT)}:{owner.lineno}: {owner.id}.{name}")
    assert missing == []
    assert count > (150 if folder == "tests" else 0)
