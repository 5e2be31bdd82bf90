"""`hetpeer generate` and `hetpeer chat`: text by the trained model. bootstrap/results does the work."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import typer

from hetpeer.peer.cli.options import RunDir

TemperatureOption = Annotated[
    float, typer.Option(min=0.0, help="Randomness; 0 always takes the likeliest token.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed: the same one gives the same text.")]


def generate(
    directory: RunDir,
    prompt: Annotated[
        str, typer.Option(help="Text to continue; the user's message if the model was trained on chats.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add; bytes without a tokenizer.")] = 200,
    temperature: TemperatureOption = 0.8,
    seed: SeedOption = 0,
) -> None:
    """Continue a text with the trained model."""
    from hetpeer.bootstrap.results.generate import Writer

    writer = Writer(directory)
    print(prompt, end="\n" * writer.chats, flush=True)
    _show(writer.text(prompt, tokens=tokens, temperature=temperature, seed=seed))


def chat(
    directory: RunDir,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 400,
    temperature: TemperatureOption = 0.8,
    seed: SeedOption = 0,
) -> None:
    """Talk with the trained model.

    Each line is a message, and the chat so far counts. Ctrl-D ends it. The model's tokenizer needs a chat
    template.
    """
    from hetpeer.bootstrap.results.generate import Writer

    writer = Writer(directory)
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            messages.append({"role": "user", "content": line})
            answer = _show(writer.answer(messages, tokens, temperature, seed + len(messages) // 2))
            messages.append({"role": "assistant", "content": answer})


def _show(pieces: Iterator[bytes]) -> str:
    """Print a text piece by piece as it is written; returns the whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end within a character
    text = ""
    for piece in chain(pieces, (None,)):
        new = decoder.decode(piece or b"", final=piece is None)
        print(new, end="", flush=True)
        text += new
    print()
    return text
