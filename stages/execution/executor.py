"""One command at a time, and what went wrong as an answer: the frame around everything that the worker does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetpeer.dht.errors import HetpeerError
from hetpeer.stages.execution import results as r
from hetpeer.stages.execution.command import Command

Handlers = Mapping[type[Command[Any]], Callable[[Any], r.Result]]


class Executor:
    """Carries out the commands that `handlers` knows. No socket and no process here."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def execute(self, command: Command[Any]) -> r.Result:
        """Carry out one command. Raises torch.AcceleratorError alone: the GPU context is lost."""
        try:
            return self._handlers[type(command)](command)
        except torch.AcceleratorError:
            raise
        except HetpeerError as error:
            if isinstance(error.__cause__, torch.AcceleratorError):
                raise error.__cause__ from error
            return r.failed(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return r.Failed(
                code="HP-MEM-002",
                what="the compute worker is out of memory",
                why=_line(error),
                fix="close what else uses the device's memory, or take part with fewer blocks",
            )
        except Exception as error:  # noqa: BLE001 - kernels raise what they like, and one task must not end the worker
            return r.Failed(
                code="HP-WORK-002",
                what=f"{type(command).__name__} failed",
                why=_line(error),
                fix="try --device cpu; if it stays, report it with what -vv prints",
            )


def _line(error: Exception) -> str:
    """The first line of what a kernel says, without its stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
