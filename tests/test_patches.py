"""Patches of the product by tests and benchmarks: a patch of a name that is not there would do nothing."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def imported(tree: ast.AST) -> dict[str, Any]:
    """Names that `tree` imports from hetpeer → the modules and classes."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hetpeer":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                inner = getattr(module, name.name, None)
                found[name.asname or name.name] = (
                    importlib.import_module(f"{node.module}.{name.name}") if inner is None else inner
                )
    return found


def patched(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(name, attribute, line) of each assignment to an attribute of a name, such as `Node.open = …`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
        ):
            yield node.value.id, node.attr, node.lineno


def missing(source: str) -> list[str]:
    """Patches of attributes that their module or class does not have."""
    tree = ast.parse(source)
    changes = list(patched(tree))
    if not changes:
        return []
    found = imported(tree)
    return [
        f"line {line}: {name}.{attribute}"
        for name, attribute, line in changes
        if name in found and not hasattr(found[name], attribute) and attribute not in _fields(found[name])
    ]


def _fields(one: Any) -> set[str]:
    """Fields of instances: a local variable may have the name of a module that is imported elsewhere."""
    return set(getattr(one, "__annotations__", ())) | set(getattr(one, "model_fields", ()))


def test_what_is_patched_is_there() -> None:
    found = {str(path.relative_to(ROOT)): missing(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_patch_of_nothing_is_found() -> None:
    source = "from hetpeer.dht.node.node import Node\nNode.open_a_door = 1\nNode.start = 2\n"
    assert missing(source) == ["line 2: Node.open_a_door"]
