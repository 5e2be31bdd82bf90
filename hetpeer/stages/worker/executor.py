"""One command at a time, with errors turned into answers: the frame around all work of the worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetpeer.dht.base.errors import HetpeerError
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.worker_messages import Command

NO_MEMORY_TEXTS = ("can't allocate memory", "_STATUS_ALLOC_FAILED")

Handlers = Mapping[type[Command[Any]], Callable[[Any], r.Result]]


class Executor:
    """Carries out commands by `handlers`. No socket and no process here."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def execute(self, command: Command[Any]) -> r.Result:
        """Carry out one command. Raises only torch.AcceleratorError: the GPU context is lost."""
        try:
            return self._handlers[type(command)](command)
        except torch.AcceleratorError:
            raise
        except HetpeerError as error:  # a kernel's error may be its cause
            if isinstance(error.__cause__, torch.AcceleratorError):
                raise error.__cause__ from error
            return _no_memory(error.__cause__) if _lacks_memory(error.__cause__) else r.failed(error)
        except Exception as error:  # noqa: BLE001 - kernels raise anything; the worker must live on
            if _lacks_memory(error):
                return _no_memory(error)
            return r.CommandFailed(
                code="HP-WORK-002",
                what=f"{type(command).__name__} failed",
                why=_line(error),
                fix="try --device cpu; if it stays, report it with what -vv prints",
            )


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether a kernel lacked memory; torch's CPU allocator and CUDA's libraries have no class for it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY_TEXTS)
    )


def _no_memory(error: BaseException | None) -> r.CommandFailed:
    return r.CommandFailed(
        code="HP-MEM-002",
        what="the compute worker is out of memory",
        why=_line(error),
        fix="close what else uses the device's memory, or allow less with --ram-limit,"
        " so that a smaller place is taken",
    )


def _line(error: BaseException | None) -> str:
    """The first line of a kernel's error, without its stack."""
    return (str(error).strip().splitlines() or [f"{type(error).__name__}, and no more is said"])[0][:300]
