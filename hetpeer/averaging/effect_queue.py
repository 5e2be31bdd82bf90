"""The queue from which a driver carries out the effects of a core, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EffectQueue(Generic[Item]):
    """Effects in the order of the calls of the core that returned them; `carry_out` gets one after the other.

    Carrying out an effect may call the core again, for example with a tensor that a volunteer sends to
    itself. The effects of that call wait behind those of earlier calls: no effect overtakes an earlier one.

    >>> def carry_out(effect):
    ...     print(effect)
    ...     queue.perform(["last"] if effect == "first" else [])
    >>> queue = EffectQueue(carry_out)
    >>> queue.perform(["first", "second"])
    first
    second
    last
    """

    def __init__(
        self, carry_out: Callable[[Item], object], drained: Callable[[], None] = lambda: None
    ) -> None:
        """`drained` is called each time when the loop has come to the end of the queue."""
        self._carry_out = carry_out
        self._drained = drained
        self._waiting: deque[Item] = deque()
        self._looping = False
        self._closed = False

    def perform(self, effects: Iterable[Item]) -> None:
        """Append `effects`, and carry out the queue unless a call further up the stack does so already.

        An exception of `carry_out` empties the queue and is raised from the outermost call.
        """
        if self._closed:
            return
        self._waiting.extend(effects)
        if self._looping:
            return
        self._looping = True
        try:
            while self._waiting:
                self._carry_out(self._waiting.popleft())
        finally:
            self._looping = False
            self._waiting.clear()
        self._drained()

    def close(self) -> None:
        """Drop waiting effects and ignore further ones."""
        self._closed = True
        self._waiting.clear()
