"""A trained model of transformers as a folder that `from_pretrained` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.bootstrap.pretrained.card import ModelCard
from hetpeer.bootstrap.pretrained.formats import Dtype
from hetpeer.bootstrap.pretrained.kept import KeptFiles
from hetpeer.bootstrap.pretrained.load import library
from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.dht.base.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from torch import Tensor

FACTS = "hetpeer.json"


def original_names(weights: Mapping[str, Tensor], part: str | None) -> dict[str, Tensor]:
    """`weights` of a module under the names of the model of transformers `part` within it.

    Names of other parts stay. Under the module's own names `from_pretrained` would find none, and begin at
    random. Raises `LocalError` HP-MODEL-014 if two would have the same name.
    """
    prefix = f"{part}." if part else ""
    renamed = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    if len(renamed) != len(weights):
        raise not_exported(
            f"parts of the module have the names of parts of its {part!r}",
            "give the module's own parts other names than those of the model of transformers",
        )
    return renamed


def write_model(
    folder: Path, kept: KeptFiles, weights: Mapping[str, Tensor], dtype: Dtype, card: ModelCard
) -> tuple[str, ...]:
    """Write the kept model with `weights` (`original_names`) into `folder`, with all that belongs to it.

    Returns the weights that the model does not have. Raises `LocalError`
    HP-MODEL-014 if the weights are not the model's, HP-DISK-*.
    """
    import torch

    model = kept.model()
    own = model.state_dict()
    lacking = [name for name in own if name not in weights or weights[name].shape != own[name].shape]
    if lacking:
        raise not_exported(
            f"the weights of the run have no {lacking[0]} as {type(model).__name__} has it",
            "use the version of transformers with which the run was made, or --format safetensors",
        )
    model.load_state_dict({name: weights[name] for name in own})
    library().logging.set_verbosity_error()
    with disk_errors(folder):
        model.to(getattr(torch, dtype.torch_name)).save_pretrained(str(folder))
    write_about(folder, kept, card)
    return tuple(name for name in weights if name not in own)


def write_about(folder: Path, kept: KeptFiles, card: ModelCard) -> None:
    """Write what belongs to the model besides its weights: tokenizer, model card, facts.

    Raises `LocalError` HP-DISK-*.
    """
    with disk_errors(folder):
        kept.copy_to(folder)
        (folder / "README.md").write_text(card.text())
        (folder / FACTS).write_text(json.dumps(card.facts(), indent=1) + "\n")


def is_export(folder: Path, run_id: str) -> bool:
    """Whether `folder` is an earlier export of the run, which may be replaced."""
    try:
        found = json.loads((folder / FACTS).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("id") == run_id


def not_exported(why: str, fix: str) -> LocalError:
    """HP-MODEL-014: the result cannot be written in that format."""
    return LocalError(
        "HP-MODEL-014",
        "cannot export the model in that format",
        why=why,
        fix=fix,
        exit_code=ExitCode.CONFIG,
    )
