"""Small files of the author's model in the run directory: configuration, tokenizer, template.

They are all that `export` and `generate` need besides the weights, so the source of the model may be gone.
They stay on the author's machine.

    kept = KeptFiles(run.path / "author")
    kept.keep_model(model, source)
    kept.model()  # the same model, with random weights
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.pretrained import load
from hetpeer.bootstrap.pretrained.source import TOKENIZER_FILES, ModelSource
from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.samples.tokenizer import Tokenizer

FOLDER = "author"
"""Name of the folder in a run directory."""
CONFIG = "config.json"
COPIED = (
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template.jinja"),
    "chat_template.json",
)
"""Files that are exported as they are."""


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The folder of one run; it need not exist."""

    folder: Path

    def keep_model(self, model: Any, source: ModelSource | None) -> None:
        """Keep the configuration of a model of transformers, and what lies beside it at its source.

        A class that transformers itself does not have is not kept: it could not be built again.
        """
        config = load.saved_config(model)
        if config is None:
            return
        with self._written():
            config.save_pretrained(str(self.folder))
        if source is None:
            return
        for name in COPIED:
            found = load.other_file(source, name)
            if found is not None:
                with self._written():
                    shutil.copyfile(found, self.folder / name)

    def keep_processor(self, processor: Any) -> None:
        """Keep an image processor that does not lie beside the model at its source."""
        with self._written():
            processor.save_pretrained(str(self.folder))

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Keep a tokenizer with its template."""
        with self._written():
            tokenizer.save(self.folder)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Make the folder for the body, and turn its OSErrors into `LocalError` HP-DISK-*."""
        with disk_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            yield

    @property
    def has_model(self) -> bool:
        return (self.folder / CONFIG).is_file()

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)

    def model(self) -> Any:
        """The model with random weights. Raises `LocalError` HP-MODEL-012."""
        return load.built(self.folder)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `LocalError` HP-DATA-009."""
        return Tokenizer(self.folder)

    def copy_to(self, folder: Path) -> None:
        """Copy all but the configuration, which the written model brings itself."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name != CONFIG:
                shutil.copyfile(path, folder / path.name)
