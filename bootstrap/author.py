"""The author's side that is Python: importing `module.py:function` and calling it for a model.

Only the author's own machine does this (init, generate, the reference); volunteers get the model as data. Whatever
the author's code raises becomes one error in plain words with the file and line it came from.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from hetpeer.dht.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from torch import nn


class Author(BaseModel):
    """What `author.json` keeps: the things that exist on the author's machine only."""

    model_config = ConfigDict(frozen=True)

    model: str
    """`/absolute/path/module.py:function`."""
    data: tuple[str, ...]
    """The paths the tokens were read from; none for Python's standard library."""


def absolute_reference(reference: str) -> str:
    """`module.py:function` with the module's absolute path. Raises `LocalError` HP-MODEL-006 unless the file exists."""
    module, colon, function = reference.rpartition(":")
    path = Path(module).expanduser()
    if not colon or not function.isidentifier():
        raise _unloadable(reference, "it does not have the form module.py:function")
    if not path.is_file():
        raise _unloadable(reference, f"there is no file {path}")
    return f"{path.resolve()}:{function}"


def build_model(reference: str, seed: int) -> nn.Module:
    """Import the author's function and call it, with torch seeded, in float32 and on the CPU.

    Raises `LocalError` HP-MODEL-006.
    """
    import torch
    from torch import nn

    function = _load_function(reference)
    torch.manual_seed(seed)
    with _author_errors(reference):
        model = function()
    if not isinstance(model, nn.Module):
        raise _unloadable(reference, f"it returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _load_function(reference: str) -> Callable[[], Any]:
    """The function itself. The module's folder is importable while the module loads, so that it can use its neighbours."""
    module_name, _, function_name = absolute_reference(reference).rpartition(":")
    path = Path(module_name)
    spec = importlib.util.spec_from_file_location(f"hetpeer_author_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise _unloadable(reference, "it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with _author_errors(reference):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _unloadable(reference, f"{path.name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


@contextmanager
def _author_errors(reference: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the author's code may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise _unloadable(reference, f"{type(error).__name__}: {error} ({where})") from error


def _unloadable(reference: str, why: str) -> LocalError:
    return LocalError(
        "HP-MODEL-006",
        f"cannot load the model {reference}",
        why=why,
        fix="give --model path/to/module.py:function, a function without arguments that returns a torch.nn.Module",
        exit_code=ExitCode.CONFIG,
    )
