"""Models of transformers by name, in float32. No other module here imports transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.pretrained.source import ModelSource, not_loaded
from hetpeer.bootstrap.pretrained.tasks import AUTO_CLASSES, HEADS, Task
from hetpeer.bootstrap.samples.quiet_library import without_log
from hetpeer.bootstrap.samples.record import not_installed
from hetpeer.dht.base.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from torch import nn

UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"}
"""Errors of the hub's client if there is no network."""
POOLER = "pooler"
"""A part of the body that belongs to the head: checkpoints of other tasks lack it."""
SHORT = {"BF16": "bfloat16", "F16": "float16", "F64": "float64", "F32": "float32"}
"""Dtype in a safetensors file → its name in torch."""


def library() -> Any:
    """The package transformers, told to be silent. Raises `LocalError` HP-SYS-006 if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise not_installed("models of transformers", "transformers") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def load(
    source: ModelSource, task: Task | None, classes: int | None, seed: int, tell: Callable[[str], None]
) -> tuple[nn.Module, Task]:
    """The model with the weights of its checkpoint as float32, and its task; `tell` gets what is remarkable.

    `task`: None stands for that of the checkpoint. `classes`: size of the last layer of a classifier; None:
    as in the checkpoint. Raises `LocalError` HP-MODEL-012 if it cannot be loaded, HP-MODEL-013 if it has no
    such task.
    """
    import torch

    missing = source.missing_shards()
    if missing:
        raise not_loaded(
            source.reference,
            f"{missing[0]} is missing" + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            "copy the folder again, whole",
        )
    config = _config(source, classes)
    task = _task(source, config, task)
    stored = _stored(source, config)
    torch.manual_seed(seed)
    with library_errors(source):
        model, found = getattr(library(), AUTO_CLASSES[task]).from_pretrained(
            source.name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=classes is not None,
            **where_from(source),
        )
    _check_missing(source, model, task, found, tell)
    if stored not in ("", "float32"):
        tell(f"the checkpoint is stored as {stored}; it is trained as float32")
    model.name_or_path = source.name
    return model, task


def planned(source: ModelSource, task: Task | None) -> tuple[nn.Module, Task]:
    """The model without weights, on torch's meta device, and its task. Raises as `load`."""
    import torch

    config = _config(source, None)
    task = _task(source, config, task)
    kind = getattr(library(), AUTO_CLASSES[task])
    with library_errors(source), torch.device("meta"):
        model: nn.Module = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
    without_cache(model)
    return model, task


def without_cache(model: nn.Module) -> None:
    """Let the model keep no keys and values of earlier tokens: training needs none."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def pretrained_part(model: nn.Module) -> tuple[str, Any] | None:
    """Name and module of the one model of transformers in the author's module; None: none or several.

    The name is empty if the author's module is that model itself. A model within another one does not count.
    """
    import sys

    if "transformers" not in sys.modules:
        return None
    kind = library().PreTrainedModel
    names = [name for name, module in model.named_modules() if isinstance(module, kind)]
    outer = [name for name in names if not any(_within(name, other) for other in names)]
    return (outer[0], model.get_submodule(outer[0])) if len(outer) == 1 else None


def can_write(model: nn.Module) -> bool:
    """Whether the model is one of transformers that generates text."""
    can = getattr(model, "can_generate", None)
    return bool(can is not None and can())


def saved_config(model: Any) -> Any:
    """A copy of the model's configuration that names its class; None for a class of somebody else's."""
    kind = type(model)
    if getattr(library(), kind.__name__, None) is not kind:
        return None
    config = copy.deepcopy(model.config)
    config.architectures = [kind.__name__]
    return config


def built(folder: Path) -> Any:
    """The model that `config.json` in `folder` describes, with random weights, in float32.

    Raises `LocalError` HP-MODEL-012.
    """
    with library_errors(ModelSource(str(folder))):
        config = library().AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return getattr(library(), config.architectures[0])(config)


def other_file(source: ModelSource, name: str) -> Path | None:
    """A file beside the model, such as `generation_config.json`; None if there is none."""
    if source.folder is not None:
        path = source.folder / name
        return path if path.is_file() else None
    with library_errors(source):
        found = library().utils.cached_file(
            source.name,
            name,
            revision=source.revision,
            _raise_exceptions_for_missing_entries=False,
        )
    return None if found is None else Path(found)


def _within(name: str, other: str) -> bool:
    """Whether the module `name` is a part of the module `other`."""
    return name != other and (not other or name.startswith(f"{other}."))


def where_from(source: ModelSource) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say which files it may use."""
    where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": source.folder is not None}
    return where | ({"revision": source.revision} if source.revision else {})


def _config(source: ModelSource, classes: int | None) -> Any:
    if source.folder is not None and not (source.folder / "config.json").is_file():
        raise not_loaded(
            source.reference,
            "the folder has no config.json",
            "give a folder that save_pretrained has written",
        )
    more = {} if classes is None else {"num_labels": classes}
    with library_errors(source):
        config = library().AutoConfig.from_pretrained(source.name, **where_from(source), **more)
    if getattr(config, "quantization_config", None) is not None:
        raise not_loaded(
            source.reference,
            "its weights are quantized, and cannot be trained",
            "give the checkpoint from which it was made",
        )
    return config


def _task(source: ModelSource, config: Any, asked: Task | None) -> Task:
    """`asked`, or the task of the checkpoint's own class. Raises `LocalError` HP-MODEL-013."""
    own = {task: _class_names(task, config) for task in Task}
    able = [task for task, names in own.items() if names]
    if asked is None:
        made_for = set(getattr(config, "architectures", None) or ())
        asked = next((task for task in able if made_for & own[task]), None)
        if asked is None:
            what = f"cannot tell the task of {source.reference}"
            raise _no_such_task(what, "its config.json names no class with a head", able)
    if asked not in able:
        what = f"the model {source.reference} cannot be trained for {asked}"
        raise _no_such_task(what, f"transformers has no such class for {config.model_type}", able)
    return asked


def _class_names(task: Task, config: Any) -> set[str]:
    """Names of transformers' classes for `task` and this configuration."""
    mapping = getattr(library(), AUTO_CLASSES[task])._model_mapping  # noqa: SLF001 - it has no public name
    if type(config) not in mapping:
        return set()
    found = mapping[type(config)]
    return {kind.__name__ for kind in (found if isinstance(found, tuple) else (found,))}


def _no_such_task(what: str, why: str, able: list[Task]) -> LocalError:
    tasks = f"give --task {' or '.join(able)}" if able else "give a function that builds it and its loss"
    return LocalError("HP-MODEL-013", what, why=why, fix=tasks, exit_code=ExitCode.CONFIG)


def _stored(source: ModelSource, config: Any) -> str:
    """Dtype of most weights in the checkpoint, or what its configuration says; empty: unknown."""
    counts: dict[str, int] = {}
    for path in source.folder.glob("*.safetensors") if source.folder is not None else ():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(min(size, path.stat().st_size)))
            except ValueError as error:
                why = f"{path.name} is damaged"
                raise not_loaded(source.reference, why, "copy the folder again") from error
        for entry in header.values():
            kind = SHORT.get(entry.get("dtype"))
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
    if counts:
        return max(counts, key=lambda kind: counts[kind])
    return str(getattr(config, "dtype", None) or "").removeprefix("torch.")


def _check_missing(
    source: ModelSource, model: Any, task: Task, found: dict[str, Any], tell: Callable[[str], None]
) -> None:
    """Refuse a checkpoint that lacks parts of the model other than a new head, which is told."""
    parameters = {name for name, _ in model.named_parameters()}
    mismatched = {entry[0] for entry in found["mismatched_keys"]}
    lacking = sorted(parameters & (set(found["missing_keys"]) | mismatched))
    body = f"{model.base_model_prefix}."
    foreign = [
        name
        for name in lacking
        if task not in HEADS or (name.startswith(body) and POOLER not in name) or body == "."
    ]
    if foreign:
        raise not_loaded(
            source.reference,
            f"its checkpoint lacks {len(foreign)} of the {len(parameters)} parameters of "
            f"{type(model).__name__}, as {foreign[0]}: they would begin at random",
            "copy the checkpoint again, whole, or choose the --task that it was made for",
        )
    if lacking:
        tell(f"the checkpoint has no {', '.join(lacking[:4])}: new, and random at the start")


@contextmanager
def library_errors(source: ModelSource) -> Iterator[None]:
    """Context that turns the many errors of transformers into HP-MODEL-012."""
    try:
        with without_log():
            yield
    except LocalError:
        raise
    except Exception as error:
        raise not_loaded(source.reference, *_reason(source, error)) from error


def _reason(source: ModelSource, error: BaseException) -> tuple[str, str]:
    """(why, what to do) of an error of transformers."""
    text = str(error).strip() or type(error).__name__
    if "trust_remote_code" in text:
        return (
            "it brings Python code of its own, which is not run",
            "load it in a function of yours with trust_remote_code=True, and give --model FILE.PY:FUNCTION",
        )
    if "does not recognize this architecture" in text:
        return (
            f"transformers {library().__version__} does not know its model_type",
            "pip install -U transformers, or give a function that loads it: --model FILE.PY:FUNCTION",
        )
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    if {type(one).__name__ for one in chain} & UNREACHABLE:
        return (
            "the hub cannot be reached, and the model is not among the files that were fetched before",
            "connect this machine to the network, or give the folder of a model: hf:FOLDER",
        )
    lines = text.splitlines()
    if source.folder is not None:
        return f"{type(error).__name__}: {lines[0]}", "copy the folder again, whole"
    return lines[0], "check the name; a private model needs `hf auth login` on this machine"
