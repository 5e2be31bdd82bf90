"""A byte-level BPE as GPT-2 has it, trained on given texts, and the texts of the installed packages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})


def byte_level_bpe(texts: Iterable[str], vocabulary: int, special: Sequence[str]) -> Any:
    """A `tokenizers.Tokenizer` of at most so many tokens, the `special` ones first."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    trained = Tokenizer(BPE())
    trained.pre_tokenizer, trained.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*special],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def package_texts(nbytes: int) -> Iterator[str]:
    """Sources and documents of the installed packages, `nbytes` in all.

    They come in the order of their paths' hashes: mixed, and the same wherever the same packages are.
    """
    import torch  # the folder in which it is installed has the others

    packages, left = Path(torch.__file__).resolve().parents[1], nbytes
    paths = (path for path in packages.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    named = {path.relative_to(packages).as_posix(): path for path in paths}
    for name in sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = named[name].read_text(encoding="utf-8", errors="replace")[:left]
        if text.strip():
            yield text
            left -= len(text.encode())
        if left <= 0:
            return
