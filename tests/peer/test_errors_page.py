"""Every code that hetpeer can raise has a section in docs/errors.md, says what, why and what to do, and is
raised by some test.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, PeerLostError, ProtocolError
from hetpeer.dht.p2pd.p2pd_control import P2pdError
from hetpeer.dht.streams.abuse import Offence, OffenceError

ROOT = Path(__file__).parents[2]
PACKAGES = ("hetpeer",)
CODE = re.compile(r"HP-[A-Z]+-[0-9]{3}")
PLAIN = frozenset({"HetpeerError", "LocalError", "RemoteError"})
"""Whoever makes one of these says all three; each other class says in its constructor what its callers do
not.
"""
CARRIERS = frozenset({"CommandFailed", "FunctionRole"})
"""What an error is made of later: a worker's answer, and what a function of the author's is for."""


@dataclass(frozen=True, slots=True)
class Made:
    """A place where an error gets its code."""

    code: str
    where: str
    call: ast.Call
    kind: str


@cache
def trees(*folders: str) -> list[tuple[Path, ast.Module]]:
    """Every module below the folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


@cache
def trees_with_codes(*folders: str) -> list[tuple[Path, ast.Module]]:
    """Every module below the folders in which a code stands: parsing the others shows none."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(path, path.read_text()) for path in paths]
    return [(path, ast.parse(text)) for path, text in texts if CODE.search(text)]


def name_of(call: ast.Call) -> str:
    """`LocalError` of `LocalError(…)`, `__init__` of `super().__init__(…)`."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def codes_in(node: ast.AST) -> set[str]:
    """Those in the code's own texts: comments and docstrings do not count."""
    docstrings = {id(inner.value) for inner in ast.walk(node) if isinstance(inner, ast.Expr)}
    return {
        code
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and id(inner) not in docstrings
        for code in CODE.findall(inner.value)
    }


@cache
def made() -> list[Made]:
    """Every place in the sources where an error gets its code."""
    kinds = PLAIN | CARRIERS | {"__init__"}
    return [
        Made(value.value, f"{path.relative_to(ROOT)}:{call.lineno}", call, name_of(call))
        for path, tree in trees_with_codes(*PACKAGES)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and name_of(call) in kinds
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and CODE.fullmatch(value.value)
    ]


def codes() -> set[str]:
    """All codes. Not a constant: each process that collects the tests would parse the whole product."""
    return {one.code for one in made()}


def sections() -> dict[str, list[str]]:
    """Code → the lines under its heading."""
    page = (ROOT / "docs" / "errors.md").read_text()
    found: dict[str, list[str]] = {}
    for part in page.split("\n### ")[1:]:
        head, *lines = part.split("\n## ")[0].splitlines()
        assert CODE.fullmatch(head), f"a heading that is no code alone, and so no stable anchor: {head}"
        assert head not in found, f"{head} has two sections"
        found[head] = [line for line in lines if line.strip()]
    return found


def test_the_page_has_every_code_and_no_other() -> None:
    found = sections()
    assert codes() - found.keys() == set(), "codes without a section"
    assert found.keys() - codes() == set(), "sections of codes that nothing raises"
    areas = [code.rpartition("-")[0] for code in found]
    assert len(set(areas)) == len([*groupby(areas)]), "an area in two places"
    assert all(one < other for one, other in pairwise(found) if one[:-4] == other[:-4]), (
        "numbers that do not rise"
    )
    for code, lines in found.items():
        assert 2 <= len(lines) <= 9, code
        parts = [part.strip() for part in "\n".join(lines).split("\n**Do:** ")]
        assert len(parts) == 2, code
        assert all(parts), code


def test_codes_that_the_sources_ask_for_are_raised() -> None:
    asked = {code for _, tree in trees_with_codes(*PACKAGES) for code in codes_in(tree)}
    assert asked == codes()


def test_the_page_is_found_from_where_people_look() -> None:
    assert "(docs/errors.md)" in (ROOT / "README.md").read_text()
    named = set(CODE.findall((ROOT / "README.md").read_text()))
    for page in (ROOT / "docs").glob("*.md"):
        named |= set(CODE.findall(page.read_text()))
    assert named <= codes()


def is_said(value: ast.expr) -> bool:
    """Whether a text can be empty only where an exception's own text is: no "", no `or ""`, no `if … else
    ""`.
    """
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str) and bool(value.value.strip())
    if isinstance(value, ast.BoolOp):
        return is_said(value.values[-1])
    if isinstance(value, ast.IfExp):
        return is_said(value.body) and is_said(value.orelse)
    return True


def test_each_error_says_what_why_and_what_to_do() -> None:
    silent = []
    for one in made():
        if one.kind == "FunctionRole":
            continue  # makes its error in a method, which is one of the others
        said = {keyword.arg: keyword.value for keyword in one.call.keywords}
        if one.kind != "CommandFailed":
            said["what"] = one.call.args[1]
        if not all(part in said and is_said(said[part]) for part in ("what", "why", "fix")):
            silent.append(f"{one.code} {one.where}")
    assert made()
    assert silent == []


def test_helpers_that_make_errors_get_a_reason_from_their_callers() -> None:
    """Nobody hands on an empty text to a function that makes an error of it."""
    makers = {
        function.name
        for _, tree in trees(*PACKAGES)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and {"why", "fix"} & {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        and any(name_of(call) in PLAIN for call in ast.walk(function) if isinstance(call, ast.Call))
    }
    assert makers
    for path, tree in trees(*PACKAGES):
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and name_of(call) in makers:
                assert all(map(is_said, call.args)), f"{path.name}:{call.lineno}"


def test_a_class_of_error_says_what_its_callers_do_not() -> None:
    for error in (
        ProtocolError("what"),
        OffenceError(Offence.DRIP, "what"),
        PeerLostError("Qm", "why"),
        P2pdError("why"),
    ):
        assert all((error.what, error.why, error.fix))


def test_the_page_has_every_exit_status_and_no_other() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    (table,) = [part for part in page.split("\n\n") if part.startswith("| exit status |")]
    assert sorted(int(number) for number in re.findall(r"\| (\d+) \|", table)) == sorted(ExitCode)


def asserted() -> set[str]:
    """Codes that tests compare with what they got; an error that a test itself makes does not count."""
    found: set[str] = set()
    for path, tree in trees_with_codes("tests"):
        if path == Path(__file__):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name.startswith(
                "test_"
            ):
                own = [
                    c
                    for c in ast.walk(function)
                    if isinstance(c, ast.Call) and name_of(c) in PLAIN | CARRIERS
                ]
                found |= codes_in(function) - {code for call in own for code in codes_in(call)}
    return found


def test_each_code_is_raised_by_a_test() -> None:
    assert codes() - asserted() == set(), "codes that no test raises"
