"""Text by the trained model: bytes, or tokens of the run's tokenizer; with a chat template also answers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hetpeer.bootstrap.pretrained.kept import FOLDER, KeptFiles
from hetpeer.bootstrap.pretrained.load import can_write
from hetpeer.bootstrap.results.export import current_model
from hetpeer.bootstrap.results.token_stream import streamed
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.samples.tokenizer import Tokenizer
from hetpeer.dht.base.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

BYTES = 256
"""Vocabulary size of text: a token is a byte."""


class Writer:
    """The trained model of a run, ready to write.

    writer = Writer(Path("my_run"))
    b"".join(writer.text("Once upon", tokens=50, temperature=0.8, seed=0))
    """

    def __init__(self, directory: Path) -> None:
        """Load the newest checkpoint.

        Raises `LocalError` HP-RUN-008 if the run is not of text, HP-MODEL-006 or HP-MODEL-007 when the module
        does not fit it any more, HP-CKPT-001.
        """
        self._run = RunDirectory.open(directory)
        kept = KeptFiles(self._run.path / FOLDER)
        self._tokenizer = kept.tokenizer() if kept.has_tokenizer else None
        data = self._run.manifest.data
        if self._tokenizer is None and data.kind != "text":
            raise _no_text(self._run, f"its samples consist of {', '.join(data.sample)}")
        self.chats = self._tokenizer is not None and self._run.author().chats
        """Whether the model was trained on chats, and so answers."""
        self._length = max(shape[0] for array in data.sample.values() if (shape := array.shape))
        self._model = current_model(self._run)

    def text(self, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[bytes]:
        """Continue `prompt`, in pieces; temperature 0 takes the likeliest token.

        A model that was trained on chats answers: the prompt is the user's message. Raises `LocalError`
        HP-MODEL-010 if the model gives no logits for tokens alone.
        """
        if self._tokenizer is None:
            ids = [*os.fsencode(prompt)] or [*b"\n"]
            yield from (bytes([one]) for one in self._sampled(ids, tokens, temperature, seed, BYTES))
        elif self.chats:
            yield from self.answer([{"role": "user", "content": prompt}], tokens, temperature, seed)
        else:
            yield from self._continued(
                self._tokenizer, self._tokenizer.begun(prompt), tokens, temperature, seed
            )

    def answer(
        self, messages: Sequence[Mapping[str, str]], tokens: int, temperature: float, seed: int
    ) -> Iterator[bytes]:
        """The assistant's next message in a chat. Raises `LocalError` HP-DATA-009 without a chat template."""
        if self._tokenizer is None:
            raise _no_text(self._run, "it has no tokenizer, and so no chat template")
        ids = self._tokenizer.asked(messages)
        yield from self._continued(self._tokenizer, ids, tokens, temperature, seed)

    def _continued(
        self, tokenizer: Tokenizer, ids: list[int], tokens: int, temperature: float, seed: int
    ) -> Iterator[bytes]:
        """Text of the tokens behind `ids`, up to the end-of-text token."""
        found: list[int] = []
        told = text = ""
        for token in self._tokens(tokenizer, ids, tokens, temperature, seed):
            if token in tokenizer.ends:
                break
            found.append(token)
            text = tokenizer.decoded(found)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may have several tokens
                yield text[len(told) :].encode(errors="replace")
                told = text
        yield text[len(told) :].encode(errors="replace")

    def _tokens(
        self, tokenizer: Tokenizer, ids: list[int], tokens: int, temperature: float, seed: int
    ) -> Iterator[int]:
        if can_write(self._model):
            return streamed(self._model, ids, tokens=tokens, temperature=temperature, seed=seed)
        return self._sampled(ids, tokens, temperature, seed, tokenizer.vocabulary)

    def _sampled(
        self, ids: list[int], tokens: int, temperature: float, seed: int, vocabulary: int
    ) -> Iterator[int]:
        """Tokens of a module of the author's, which sees the last ones that fit into a sample."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        context = [*ids]
        for _ in range(tokens):
            window = torch.tensor([context[-self._length :]])
            with torch.no_grad():
                logits = _logits(self._model, window, vocabulary)
            if temperature > 0:
                chances = torch.softmax(logits / temperature, dim=-1)
                token = int(torch.multinomial(chances, 1, generator=generator))
            else:
                token = int(logits.argmax())
            context.append(token)
            yield token


def generate(directory: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[bytes]:
    """Continue `prompt` with the newest checkpoint of a run. Raises as `Writer`."""
    yield from Writer(directory).text(prompt, tokens=tokens, temperature=temperature, seed=seed)


def _no_text(run: RunDirectory, why: str) -> LocalError:
    return LocalError(
        "HP-RUN-008",
        f"{run.manifest.name} was not trained on text",
        why=why,
        fix="take the weights with hetpeer export, and use them in your own module",
        exit_code=ExitCode.CONFIG,
    )


def _logits(model: nn.Module, window: Tensor, vocabulary: int) -> Tensor:
    """Logits of the token after `window`. Raises `LocalError` HP-MODEL-010."""
    try:
        found = model(window)
        logits: Tensor = getattr(found, "logits", found)[0, -1].float()
    except Exception as error:  # the author's code may raise anything
        raise _no_logits(f"{type(error).__name__}: {error}") from error
    if logits.dim() != 1 or logits.isnan().any():
        raise _no_logits(f"for the last one it gives {list(logits.shape)} numbers, or some that are NaN")
    return logits[:vocabulary]  # a model may have more outputs than there are tokens


def _no_logits(why: str) -> LocalError:
    return LocalError(
        "HP-MODEL-010",
        "the model gives no logits for tokens alone",
        why=why,
        fix="let forward(tokens) return logits [1, T, vocabulary], or use what hetpeer export writes in your "
        "own way",
        exit_code=ExitCode.CONFIG,
    )
