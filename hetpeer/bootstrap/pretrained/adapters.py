"""Adapters in the author's model: LoRA and DoRA, made by peft. The only module that imports peft.

The chosen layers are replaced inside the model, and all other parameters are frozen. The model keeps its
class and its forward, so everything after this treats it as any model with frozen parameters.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpeer.bootstrap.pretrained.formats import Dtype
from hetpeer.bootstrap.pretrained.load import POOLER
from hetpeer.bootstrap.pretrained.source import ModelSource
from hetpeer.bootstrap.pretrained.tasks import HEADS, Task
from hetpeer.bootstrap.pretrained.written import not_exported
from hetpeer.bootstrap.run.durable_files import atomic_write, disk_errors
from hetpeer.bootstrap.samples.record import not_installed
from hetpeer.dht.base.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from torch import Tensor, nn

ALL_LINEAR = "all-linear"
"""Every linear layer but the head that gives a language model's logits."""
SYNTAX = "--lora r=16,alpha=32,targets=all-linear,dropout=0.05, and ,dora for DoRA"
TASKS: Mapping[Task, str] = {Task.CAUSAL_LM: "CAUSAL_LM", Task.SEQ2SEQ: "SEQ_2_SEQ_LM"}
"""Task → peft's name for it, for tasks whose head is frozen in peft, too."""
TRAINED = "modules_to_save.default"
"""Part of the names in a module that is trained whole."""
SHOWN = 8
"""Names of layers in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Settings of the adapters.

    LoraSettings.parse("r=8,targets=q_proj+v_proj,dora")
    """

    r: int = 16
    """Rank: a layer [out, in] gets r · (out + in) trained numbers."""
    alpha: int = 0
    """The adapter's output is scaled by alpha / r; 0: 2 · r."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of layers, or the ends of their names."""
    dropout: float = 0.0
    dora: bool = False
    train: tuple[str, ...] = ()
    """Names, or their ends, of modules that are trained whole instead of being frozen."""

    @classmethod
    def parse(cls, text: str) -> LoraSettings:
        """The settings in `KEY=VALUE,…`, several targets joined by `+`. Raises `LocalError` HP-RUN-001."""
        found: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = part.strip().partition("=")
            if key in found or key not in {one.name for one in fields(cls)}:
                raise _invalid(f"{key!r} is {'given twice' if key in found else 'no setting'}")
            if (key == "dora") == bool(equals):
                raise _invalid(f"{key!r} takes {'no' if equals else 'a'} value")
            try:
                found[key] = _READ[key](value)
            except ValueError as error:
                raise _invalid(f"{key} cannot be {value!r}") from error
        settings = cls(**found)
        return settings if settings.alpha else cls(**found | {"alpha": 2 * settings.r})


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def _share(text: str) -> float:
    if not 0 <= (number := float(text)) < 1:
        raise ValueError(text)
    return number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split("+"))
    if not all(names):
        raise ValueError(text)
    return names


_READ: Mapping[str, Callable[[str], Any]] = {
    "r": _positive,
    "alpha": _positive,
    "targets": _names,
    "dropout": _share,
    "dora": lambda _: True,
    "train": _names,
}
"""Setting → how its text is read; raises ValueError."""


def _invalid(why: str) -> LocalError:
    return LocalError(
        "HP-RUN-001", "--lora is not valid", why=why, fix=f"write {SYNTAX}", exit_code=ExitCode.CONFIG
    )


def adapt(model: nn.Module, settings: LoraSettings, task: Task | None = None) -> int:
    """Put adapters into `model` and freeze everything else; returns the number of adapted layers.

    `task`: that of a model of transformers, whose new head for it is trained whole. Adapters begin with
    torch's next random numbers. Raises `LocalError` HP-RUN-001 if no layer has a target's name or peft
    refuses one, HP-SYS-006 without peft.
    """
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise not_installed("the maker of adapters", "peft") from error
    linear = linear_layers(model)
    config = peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        target_modules=_layers(model, settings.targets, linear),
        lora_dropout=settings.dropout,
        use_dora=settings.dora,
        modules_to_save=[*_layers(model, settings.train, linear), *_heads(model, task)] or None,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a transposed weight, which peft sees and allows for
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:  # a layer of a kind that peft does not know
        raise _no_layer(settings.targets, str(error).strip().splitlines()[0], linear) from error
    return sum(isinstance(module, BaseTunerLayer) for module in model.modules())


def _heads(model: nn.Module, task: Task | None) -> list[str]:
    """Names of the parts of a model of transformers that a checkpoint of another task does not have."""
    if task not in HEADS:
        return []
    body = getattr(model, "base_model_prefix", None)
    ends = [name for name, module in model.named_children() if name != body and [*module.parameters()]]
    poolers = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == POOLER]
    return [*ends, *poolers] if body else []


def _layers(model: nn.Module, targets: Sequence[str], linear: Sequence[str]) -> list[str]:
    """Targets as peft takes them; `linear` are the linear layers.

    Raises `LocalError` HP-RUN-001 for a target that names no layer.
    """
    found: dict[str, None] = {}
    every = [name for name, _ in model.named_modules()]
    for target in targets:
        names = linear if target == ALL_LINEAR else [target]
        if not any(name == known or known.endswith(f".{name}") for name in names for known in every):
            raise _no_layer([target], "the model has no such layer", linear)
        found |= dict.fromkeys(names)
    return list(found)


def _no_layer(targets: Sequence[str], why: str, linear: Sequence[str]) -> LocalError:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    shown = ", ".join(ends[:SHOWN]) + (", …" if len(ends) > SHOWN else "")
    return LocalError(
        "HP-RUN-001",
        f"--lora cannot adapt {' or '.join(targets)}",
        why=why,
        fix=f"choose targets among the model's layers; linear ones end in {shown or 'nothing: it has none'}",
        exit_code=ExitCode.CONFIG,
    )


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers, without heads that models of transformers call output embeddings."""
    from torch import nn

    owners: list[Any] = [module for module in model.modules() if hasattr(module, "get_output_embeddings")]
    heads = [owner.get_output_embeddings() for owner in owners]
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and not any(module is head for head in heads)
    ]


def save_adapter(model: nn.Module, folder: Path, base: ModelSource | None, task: Task, dtype: Dtype) -> None:
    """Write the adapters of `model` to `folder`, as `PeftModel.from_pretrained(…, folder)` reads them.

    `base`: the frozen model, if it has a name; `task`: what it does. Raises `LocalError` HP-DISK-*.
    """
    import peft
    import torch
    from safetensors.torch import save

    module: Any = model
    config = module.peft_config["default"]
    config.inference_mode = True
    if base is not None:
        config.base_model_name_or_path, config.revision = base.name, base.revision
        config.task_type = TASKS.get(task)
    settings = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
    }
    kind = getattr(torch, dtype.torch_name)
    tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.to(kind).contiguous() for name, tensor in tensors.items()}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "adapter_model.safetensors", save(named, metadata={"format": "pt"}))
    atomic_write(
        folder / "adapter_config.json", json.dumps(settings, indent=1, sort_keys=True).encode() + b"\n"
    )


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """State dict of `model` as it was before `adapt`, each adapter added to its layer, which is changed.

    Raises `LocalError` HP-MODEL-014 if another part of the model shares the weight of an adapted layer.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            if uses[id(module.get_base_layer().weight)] > 1:
                raise not_exported(
                    f"another part of the model shares the weight of {name}, and has no adapter",
                    "give --format adapter",
                )
            module.merge()
    return {
        name.replace(".base_layer.", ".").replace(f".{TRAINED}.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name and ".original_module." not in name
    }
