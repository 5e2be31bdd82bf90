"""Tokens of a model of transformers, each as soon as it is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class _StoppedError(Exception):
    """Ends `generate` after its reader has stopped reading."""


class _Stream:
    """A streamer for `generate` of transformers, which calls `put` for the prompt and then for each token."""

    def __init__(self) -> None:
        self.tokens: SimpleQueue[int | None] = SimpleQueue()
        """The tokens; None after the last."""
        self.stopped = False
        self._is_begun = False

    def put(self, tokens: Tensor) -> None:
        if self.stopped:
            raise _StoppedError
        if self._is_begun:
            self.tokens.put(int(tokens))
        self._is_begun = True

    def end(self) -> None:
        """Do nothing: `run` ends the stream, whether or not `generate` fails."""

    def run(self, model: Any, ids: Sequence[int], seed: int, how: dict[str, Any]) -> None:
        """Generate, and end the stream."""
        import torch

        prompt = torch.tensor([ids])
        torch.manual_seed(seed)
        try:
            with torch.no_grad():
                model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=self, **how)
        except _StoppedError:
            pass
        finally:
            self.tokens.put(None)


def streamed(model: Any, ids: Sequence[int], *, tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """At most `tokens` tokens after `ids`; temperature 0 takes the likeliest.

    `model` keeps keys and values of earlier tokens. It works in a thread, which ends with the iterator, even
    one that is closed early. Raises the errors of `model.generate`.
    """
    how: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0, "top_k": 0, "top_p": 1.0}
    if temperature > 0:
        how["temperature"] = temperature
    stream = _Stream()
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(stream.run, model, ids, seed, how)
        try:
            yield from iter(stream.tokens.get, None)
        finally:
            stream.stopped = True
        work.result()
