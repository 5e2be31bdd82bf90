"""Files of a run that a peer serves from its disk: the manifest, and files by hash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from hetpeer.bootstrap.run.membership_config import MembershipConfig
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.file_service import Served

StateSource = Callable[[int, int, int], Awaitable[Served | None]]
"""(cluster, version, block) → the block's state file, or None if it is not here."""
Answer = Callable[[str], bytes]
"""Part of a name after its slash (or nothing) → answer. Raises `ProtocolError` for an invalid name."""


class ServedRunFiles:
    """Serves `run`'s manifest, its latest amendment, its local files, and states from `states`.

    `answers`: name → answer from the run's log, at peers that have it.
    """

    def __init__(
        self,
        run: RunDirectory,
        membership_config: MembershipConfig,
        states: StateSource,
        answers: Mapping[str, Answer] = MappingProxyType({}),
    ) -> None:
        self._run = run
        self._membership_config = membership_config
        self._states = states
        self._answers = answers
        self._files = {reference.blake3: path for reference, path in run.files()}

    @asynccontextmanager
    async def find(self, name: str) -> AsyncIterator[Served | None]:
        """Data for `name`, or None if it is unknown or not here."""
        match name.split("/"):
            case ["manifest"]:
                yield Served(self._run.signed.data, {})
            case ["amendment"] if self._membership_config.data:
                yield Served(self._membership_config.data, {})
            case ["file", digest] if digest in self._files and self._files[digest].is_file():
                yield Served(await asyncio.to_thread(self._files[digest].read_bytes), {})
            case ["state", *numbers] if len(numbers) == 3 and all(map(str.isdecimal, numbers)):
                cluster, version, block = map(int, numbers)
                yield await self._states(cluster, version, block)
            case [kind, *about] if kind in self._answers and len(about) < 2:
                yield Served(self._answers[kind]("".join(about)), {})
            case _:
                yield None
