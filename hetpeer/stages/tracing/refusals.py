"""Refusals of models that cannot be shipped: what, why, what to change, and at which line of the author's.

An author's line is one in a traceback that is not of torch, of another library, or of hetpeer; hetpeer's
examples count as an author's code.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError

HINTS: Mapping[str, str] = {
    "rand": "use torch.rand, torch.randn or nn.Dropout: a redone task must give the same result",
    "bernoulli": "use nn.Dropout for random masks: a task redone by another peer must give the same result",
    "batch_norm": "use nn.BatchNorm with a fixed momentum, once per forward",
}
VALUES = "let no shape and no number of the graph depend on the values of a tensor (no x[mask], no item())"
DRAWS = "draw float32 numbers by torch.rand, torch.randn or nn.Dropout"
NOT_LISTED = "it is not on the list of operators"


def unsupported(op: str, why: str = NOT_LISTED, where: str = "", fix: str = "") -> LocalError:
    """HP-MODEL-001; `where` is the author's line that calls the operator, `fix` overrides `HINTS`."""
    hints = (hint for part, hint in HINTS.items() if part in op)
    fix = fix or next(hints, "express the model with other operators")
    what = f"the model uses the operator {op}, which volunteers cannot run"
    why = f"{why}, at {where}" if where else why
    return LocalError("HP-MODEL-001", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


def unfit(what: str, why: str, fix: str) -> LocalError:
    """HP-MODEL-003: the model cannot be trained here."""
    return LocalError("HP-MODEL-003", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)


_OURS = Path(__file__).parents[2]
_EXAMPLES = _OURS / "examples"
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def author_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the author's code in `error`'s traceback, else of a library that it called.

    None if there are only frames of torch and hetpeer.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return next((one for one in reversed(frames) if is_author(one.filename)), None) or next(
        (one for one in reversed(frames) if not is_machinery(one.filename)), None
    )


@cache
def is_author(file: str) -> bool:
    """Whether a source file is the author's."""
    path = Path(file)
    if _EXAMPLES in path.parents:
        return True
    return not is_machinery(file) and _library(path) is None


@cache
def is_machinery(file: str) -> bool:
    """Whether code in this file is ours, torch's or the interpreter's own."""
    path = Path(file)
    if path.name.startswith("<") or file.startswith("<"):
        return True
    torch = importlib.util.find_spec("torch")
    homes = [_OURS, *([Path(torch.origin).parent] if torch is not None and torch.origin else [])]
    return any(home in path.parents for home in homes) and _EXAMPLES not in path.parents


def line_of(frames: Iterable[tuple[str, str | int]]) -> str:
    """The author's innermost line of (file, line number) frames, outermost first.

    If the author called a library, the library's line comes first: "library/x.py:7, called at model.py:3".
    Empty if there are only frames of torch and hetpeer.
    """
    own = inner = ""
    for file, number in frames:
        if is_author(file):
            own = inner = f"{file}:{number}"
        elif (library := _library(Path(file))) and not is_machinery(file):
            inner = f"{Path(file).relative_to(library)}:{number}"
    return inner if inner == own or not own else f"{inner}, called at {own}"


def _library(path: Path) -> Path | None:
    """The innermost folder of installed libraries that holds a file."""
    around = (library for library in _LIBRARIES if library in path.parents)
    return max(around, key=lambda library: len(library.parts), default=None)
