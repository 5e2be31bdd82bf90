"""Names of models: `hf:FOLDER_OR_ID[@revision]`.

source = ModelSource.parse("hf:models/llama")  # a folder that `save_pretrained` has written
source = ModelSource.parse("hf:Qwen/Qwen3-0.6B@main")  # an id of the hub
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetpeer.bootstrap.samples.hub_name import HUB_ID, PREFIX
from hetpeer.dht.base.errors import ExitCode, LocalError

TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
    *("vocab.txt", "vocab.json"),
)
"""A folder with one of these has a tokenizer."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder, or a model of the hub at a revision."""

    name: str
    """Absolute path of the folder, or the hub's id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None: its main branch."""

    @classmethod
    def parse(cls, reference: str) -> ModelSource:
        """The source of `hf:…`. Raises `LocalError` HP-MODEL-012 if it can be neither folder nor id."""
        text = reference.removeprefix(PREFIX)
        if text and Path(text).expanduser().is_dir():
            return cls(str(Path(text).expanduser().resolve()))
        if text and Path(text).expanduser().is_file():
            fix = "give hf: and the folder that has config.json and the weights"
            raise not_loaded(reference, f"{text} is a file, no folder", fix)
        name, _, revision = text.partition("@")
        if not HUB_ID.fullmatch(name):
            raise not_loaded(
                reference,
                f"there is no folder {text}" if text else "it names no model",
                "give hf: and the folder that save_pretrained has written, or an id of the hub",
            )
        return cls(name, revision or None)

    @property
    def reference(self) -> str:
        """The name in full, with an absolute path: `hf:/models/llama`."""
        return f"{PREFIX}{self.name}" + (f"@{self.revision}" if self.revision else "")

    @property
    def folder(self) -> Path | None:
        """The folder; None for an id of the hub."""
        return Path(self.name) if self.name.startswith("/") else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer; for an id of the hub only loading can tell."""
        return self.folder is None or any((self.folder / name).is_file() for name in TOKENIZER_FILES)

    def missing_shards(self) -> list[str]:
        """Files that an index of the folder names and that are not there."""
        if self.folder is None:
            return []
        named: set[str] = set()
        for index in self.folder.glob("*.index.json"):
            try:
                named.update(json.loads(index.read_bytes())["weight_map"].values())
            except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
                raise not_loaded(
                    self.reference, f"{index.name} cannot be read: {error}", "copy the folder again"
                ) from error
        return sorted(name for name in named if not (self.folder / name).is_file())


def is_named(reference: str) -> bool:
    """Whether a model is given by name: `hf:…`."""
    return reference.startswith(PREFIX)


def base_of(reference: str) -> tuple[str, bool]:
    """(name of the model for others, whether it is an id of the hub); empty for a function of a file.

    Of a folder only the last part of its path: the others are nobody's business.
    """
    if not is_named(reference):
        return "", False
    name = reference.removeprefix(PREFIX)
    return (Path(name).name, False) if name.startswith("/") else (name.partition("@")[0], True)


def not_loaded(reference: str, why: str, fix: str) -> LocalError:
    """HP-MODEL-012: the model of that name cannot be loaded."""
    return LocalError(
        "HP-MODEL-012", f"cannot load the model {reference}", why=why, fix=fix, exit_code=ExitCode.CONFIG
    )
