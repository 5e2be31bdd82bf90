"""Command-line options of the compute worker."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options from the daemon to the worker. `socket` and `arena` are inherited descriptors."""

    socket: int
    arena: int
    parent: int
    device: str
    threads: int
    nice: int
    gpu_memory: float

    def arguments(self) -> list[str]:
        """Command-line arguments that `parse` reads back."""
        return [f"--{name}={getattr(self, name)}" for name in self.__slots__]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> WorkerOptions:
        """The options in `arguments`. Exits with status 2 if they do not fit, as argparse does."""
        parser = argparse.ArgumentParser(description="hetpeer's compute worker; started by its daemon")
        for name in ("socket", "arena", "parent", "threads", "nice"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--device", required=True)
        parser.add_argument("--gpu_memory", type=float, required=True)
        return cls(**vars(parser.parse_args(arguments)))
