"""Names of data sets as `datasets` loads them: `hf:FOLDER_OR_ID[:CONFIG][@REVISION]`.

HubName.parse("hf:openai/gsm8k:main")  # a data set of the hub, one of its configurations
HubName.parse("hf:sets/chats")  # a folder with files and perhaps a card, as the hub has it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hetpeer.dht.base.errors import ExitCode, LocalError

PREFIX = "hf:"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""An id on the hub: `NAME` or `OWNER/NAME`."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A folder, or a data set of the hub at a revision."""

    name: str
    """Absolute path of the folder, or the hub's id."""
    config: str | None = None
    """One of its configurations; None: the only one, or the default one."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None: its main branch."""

    @classmethod
    def parse(cls, reference: str) -> HubName:
        """The name in `hf:…`. Raises `LocalError` HP-DATA-001 if it can be neither folder nor id."""
        text = reference.removeprefix(PREFIX)
        name, _, revision = text.partition("@")
        name, _, config = name.partition(":")
        folder = Path(name).expanduser()
        if name and folder.is_dir() and not revision:
            name = str(folder.resolve())
        elif not HUB_ID.fullmatch(name):
            raise no_data_set(
                reference,
                f"there is no folder {name}" if name else "it names no data set",
                "give hf: and a folder, or an id of the hub: hf:OWNER/NAME[:CONFIG][@REVISION]",
            )
        return cls(name, config or None, revision or None)

    def __str__(self) -> str:
        """The name in full."""
        config = f":{self.config}" if self.config else ""
        return f"{PREFIX}{self.name}{config}" + (f"@{self.revision}" if self.revision else "")


def no_data_set(reference: str, why: str, fix: str) -> LocalError:
    """HP-DATA-001: the data set of that name cannot be read."""
    return LocalError(
        "HP-DATA-001",
        f"cannot read the data set {reference}",
        why=why,
        fix=fix,
        exit_code=ExitCode.CONFIG,
    )
