"""docs/testing.md names every test that `make test` leaves out, wholly or in part."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "testing.md"


def proofs(file: Path) -> dict[str, bool]:
    """Names of the tests of `file` that are proofs → whether with all their parameters."""
    tree = ast.parse(file.read_text())
    shared = {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            text = "\n".join([*decorators, *(shared.get(one, "") for one in decorators)])
            if re.search(r"mostly_proof\(|mark\.proof", text):
                found[node.name] = "pytest.mark.proof" in decorators
    return found


def test_every_proof_is_named() -> None:
    entries = re.findall(r"^- `tests/(\S+\.py)`\n((?:  - .*\n)+)", PAGE.read_text(), re.MULTILINE)
    told = {
        file: {name: not more for name, more in re.findall(r"- `(test_\w+)`( \(some cases\))?", tests)}
        for file, tests in entries
    }
    files = {str(file.relative_to(TESTS)): proofs(file) for file in sorted(TESTS.rglob("test_*.py"))}
    assert told == {file: tests for file, tests in files.items() if tests}
