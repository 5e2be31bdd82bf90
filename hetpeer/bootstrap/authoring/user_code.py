"""The author's Python code: import `module.py:function` and call it for a model, a loss, samples or scores.

Only the author's own machine does this (init, generate, watch); volunteers get the model and samples
as data. An exception in the author's code becomes one plain error with the file and line where it was raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hetpeer.bootstrap.authoring.author_modules import author_imports, author_module
from hetpeer.bootstrap.pretrained.source import ModelSource, is_named
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.tracing.refusals import author_frame

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hetpeer.bootstrap.authoring.sample_weigher import Weigh
    from hetpeer.stages.data.shards import Arrays


@dataclass(frozen=True, slots=True)
class FunctionRole:
    """Purpose of a function of the author, and the error code and advice if it cannot be used."""

    name: str
    code: str
    fix: str

    def error(self, reference: str, why: str) -> LocalError:
        """Error for a function at `reference` that cannot be loaded."""
        what = f"cannot load the {self.name} {reference}"
        return LocalError(self.code, what, why=why, fix=self.fix, exit_code=ExitCode.CONFIG)


MODEL: Final = FunctionRole(
    "model",
    "HP-MODEL-006",
    "give --model path/to/module.py:function, a function without arguments that returns a torch.nn.Module, "
    "or hf: and a folder or id",
)
LOSS: Final = FunctionRole(
    "loss",
    "HP-MODEL-008",
    "give --loss path/to/module.py:function, a function of the model's outputs and the batch that returns "
    "the mean loss",
)
DATA: Final = FunctionRole(
    "data",
    "HP-DATA-004",
    "give --data path/to/module.py:function, a function without arguments that yields mappings of names to "
    "numpy arrays",
)
SCORE: Final = FunctionRole(
    "scoring function",
    "HP-MODEL-017",
    "give --score path/to/module.py:function, a function of the model and a batch that returns names and "
    "numbers: for each name one number, or a tensor with one for each sample",
)


def absolute_reference(reference: str, role: FunctionRole = MODEL) -> str:
    """`module.py:function`, or the name of a model, with an absolute path.

    Raises the role's `LocalError` unless the file exists, HP-MODEL-015 for a name that can be none.
    """
    if role is MODEL and is_named(reference):
        return ModelSource.parse(reference).reference
    module, colon, function = reference.rpartition(":")
    path = Path(module).expanduser()
    if not colon or not function.isidentifier():
        raise role.error(reference, "it does not have the form module.py:function")
    if not path.is_file():
        raise role.error(reference, f"there is no file {path}")
    return f"{path.resolve()}:{function}"


def build_model(reference: str, seed: int, folder: Path | None = None) -> nn.Module:
    """Call the author's function, torch seeded, in float32, on the CPU.

    Parameters that do not fit into memory lie in files in `folder` (large_model.py). Raises `LocalError`
    HP-MODEL-006, HP-DISK-002.
    """
    import torch
    from torch import nn

    from hetpeer.bootstrap.authoring.large_model import LargeTensorsInFiles

    function = _load_function(reference, MODEL)
    torch.manual_seed(seed)
    with _author_errors(reference, MODEL), LargeTensorsInFiles(folder, planned=function):
        model = function()
    if not isinstance(model, nn.Module):
        raise MODEL.error(reference, f"it returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def with_loss(model: nn.Module, loss: str | None, names: Iterable[str]) -> nn.Module:
    """The author's model as a function of a batch with the arrays `names` that returns the loss.

    Parameters and buffers have the author's names. Raises HP-MODEL-004, HP-MODEL-008.
    """
    from hetpeer.bootstrap.authoring.loss_module import objective

    function = None if loss is None else _load_function(loss, LOSS)
    return objective(model, function, tuple(names))


def weights_by_loss(model: nn.Module, loss: str | None, example: Arrays) -> Weigh | None:
    """`given_weights` of the function `loss`; None without one. Raises HP-MODEL-004, HP-MODEL-015."""
    from hetpeer.bootstrap.authoring.given_weights import given_weights

    return None if loss is None else given_weights(model, _load_function(loss, LOSS), example)


def author_samples(reference: str) -> Iterator[Any]:
    """Samples from the author's function. Raises `LocalError` HP-DATA-004."""
    function = _load_function(reference, DATA)
    with _author_errors(reference, DATA):
        samples = iter(function())
    end = object()
    while True:
        with _author_errors(reference, DATA):
            sample = next(samples, end)
        if sample is end:
            return
        yield sample


def author_scores(reference: str) -> Callable[[nn.Module, Mapping[str, Tensor]], Any]:
    """The author's function of (model, batch) for scores. Raises, also when called, HP-MODEL-017."""
    function = _load_function(reference, SCORE)

    def scores(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        with _author_errors(reference, SCORE):
            return function(model, batch)

    return scores


def _load_function(reference: str, role: FunctionRole) -> Callable[..., Any]:
    module_name, _, function_name = absolute_reference(reference, role).rpartition(":")
    path = Path(module_name)
    with _author_errors(reference, role):
        module = author_module(path, path.read_bytes())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise role.error(reference, f"{path.name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


@contextmanager
def _author_errors(reference: str, role: FunctionRole) -> Iterator[None]:
    """Context of the author's code at `reference`: its imports, and its errors as those of the role."""
    path = Path(reference.rpartition(":")[0]).expanduser().resolve()
    try:
        with author_imports(path):
            yield
    except LocalError:
        raise
    except (Exception, SystemExit) as error:  # the author's code may raise anything
        frame = None if isinstance(error, SyntaxError) else author_frame(error)  # its text has file and line
        where = "" if frame is None else f" ({Path(frame.filename).name}, line {frame.lineno})"
        raise role.error(reference, f"{type(error).__name__}: {error}{where}") from error
