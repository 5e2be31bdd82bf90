"""A tokenizer of the author's: texts and chats to ids. Only this module of the room imports transformers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.samples.record import bad_record, not_installed
from hetpeer.dht.base.errors import ExitCode, LocalError

MARKED = re.compile(r"{%-?\s*generation\b")
"""A chat template that marks the assistant's words itself."""

OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""End of the message of a bare `Exception` of the tokenizers' Rust part."""
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """Ids of a text or chat. `learned`: tokens that are targets, one bool per id; None: all."""

    ids: Sequence[int]
    learned: Sequence[bool] | None = None


class Tokenizer:
    """A `tokenizer.json`, or a folder that `save_pretrained` has written.

    tokenizer = Tokenizer(Path("model/"))
    (document,) = tokenizer.texts(["Hello"])  # ends with the end-of-text token, if there is one
    """

    def __init__(self, path: Path | str, revision: str | None = None) -> None:
        """Load the tokenizer at a path, or that of a model of the hub, given as a text.

        Raises `LocalError` HP-DATA-009 if there is none, HP-SYS-006 without transformers.
        """
        self.path = path
        self.chatted = False
        """Whether chats were tokenized."""
        self._tokenizer = _load(path) if isinstance(path, Path) else _of_hub(path, revision)
        self.vocabulary = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        """Largest id plus one."""
        if not self.vocabulary:
            raise unusable_tokenizer(path, "it has no tokens")

    @property
    def pad(self) -> int:
        """Id that fills samples up; it is never a target."""
        known = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return next(one for one in known if one is not None)

    @property
    def mask(self) -> int:
        """Id that stands for a hidden token. Raises `LocalError` HP-DATA-009 if there is none."""
        found: int | None = self._tokenizer.mask_token_id
        if found is None:
            raise unusable_tokenizer(self.path, "it has no mask token", "choose another --task or model")
        return found

    @property
    def special(self) -> list[int]:
        """Ids that stand for no part of a text."""
        return [*self._tokenizer.all_special_ids]

    @property
    def template(self) -> str | None:
        """The chat template; None: there is none."""
        found = self._tokenizer.chat_template
        return found if isinstance(found, str | None) else found.get("default")

    @property
    def ends(self) -> set[int]:
        """Ids that end a text or a message."""
        return {one for one in (self._tokenizer.eos_token_id,) if one is not None}

    def begun(self, text: str) -> list[int]:
        """Ids of the beginning of a text."""
        ids = [*self._tokenizer(text)["input_ids"]]
        while len(ids) > 1 and ids[-1] in {*self.ends, self._tokenizer.sep_token_id}:
            del ids[-1]
        return ids or [self.pad]

    def asked(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to where the assistant's message begins. Raises as `chats`."""
        if not self._tokenizer.chat_template:
            raise unusable_tokenizer(self.path, "it has no chat template", "use hetpeer generate")
        text = self._render("the chat", messages, add_generation_prompt=True)
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`, so that `Tokenizer(folder)` is the same one. Raises OSError."""
        try:
            self._tokenizer.save_pretrained(str(folder))
        except Exception as error:
            found = OS_ERROR.search(str(error))
            if found is None or isinstance(error, OSError):
                raise
            number = int(found[1])
            raise OSError(number, os.strerror(number)) from error

    def texts(self, texts: Sequence[str]) -> Iterator[Document]:
        """Documents of `texts`, tokenized in parallel, in order."""
        end = self._tokenizer.eos_token_id
        for ids in self._encoded(texts):
            if end is not None and ids[-1:] != [end]:
                ids.append(end)
            yield Document(ids)

    def _encoded(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Ids of each text with its special tokens."""
        if not self._plain:
            yield from self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
            return
        self._tokenizer([""])  # no truncation, no padding, and how special tokens are read
        for encoding in self._tokenizer.backend_tokenizer.encode_batch_fast(texts):
            yield encoding.ids

    @property
    def _plain(self) -> bool:
        """Whether a call of the tokenizer does no more than its Rust part: that is faster without offsets."""
        import transformers

        kind, plain = type(self._tokenizer), transformers.PreTrainedTokenizerFast
        return issubclass(kind, plain) and all(
            getattr(kind, name) is getattr(plain, name) for name in ("__call__", "_encode_plus")
        )

    def whole(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """Ids of each text with the special tokens that the model expects, cut to `length`."""
        found: list[list[int]] = self._tokenizer(
            texts, return_attention_mask=False, truncation=True, max_length=length, verbose=False
        )["input_ids"]
        return found

    def chats(self, chats: Sequence[tuple[str, Sequence[Message]]]) -> Iterator[Document]:
        """Documents of chats, each a place and its messages; only the assistant's words are targets.

        Raises `LocalError` HP-DATA-009 if there is no template, or it does not fit; HP-DATA-008 if it fails.
        """
        self.chatted = True
        template = self._tokenizer.chat_template
        if not template:
            raise unusable_tokenizer(
                self.path,
                "it has no chat template",
                "give the tokenizer's folder with its chat_template.jinja",
            )
        if not self._tokenizer.is_fast:
            raise unusable_tokenizer(self.path, "it does not say which token stands for which characters")
        marked = any(map(MARKED.search, template.values() if isinstance(template, dict) else [template]))
        if marked:
            for where, messages in chats:
                found = self._render(
                    where, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                yield Document(found["input_ids"], [bool(one) for one in found["assistant_masks"]])
            return
        spans = [self._spans(where, messages) for where, messages in chats]
        encoded = self._tokenizer(
            [text for text, _ in spans],
            add_special_tokens=False,  # the template has written them
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        for (_, parts), ids, offsets in zip(
            spans, encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            yield Document(ids, [any(begin <= at < end for begin, end in parts) for at, _ in offsets])

    def _spans(self, where: str, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """A chat as text, and the character ranges of the assistant's words in it, ends of turns included."""
        text, spans = self._render(where, messages), []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(where, messages[:number], add_generation_prompt=True) if number else ""
                until = self._render(where, messages[: number + 1])
                if not text.startswith(until) or not until.startswith(before):
                    raise unusable_tokenizer(
                        self.path,
                        f"its chat template writes messages of {where} in another way when more follow",
                        "mark the assistant's words in the template with {% generation %}",
                    )
                spans.append((len(before), len(until)))
        return text, spans

    def _render(self, where: str, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **({"tokenize": False} | options))
        except Exception as error:  # a template may raise anything
            why = f"the chat template of {self.path} fails: {_first_line(error)}"
            raise bad_record(where, why, "mend the messages, or the template") from error


def _load(path: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise not_installed("reading tokenizers", "transformers") from error
    if not path.exists():
        raise unusable_tokenizer(path, "there is no such file or folder")
    transformers.logging.set_verbosity_error()
    try:
        if path.is_dir():
            return transformers.AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # its many libraries raise anything
        raise unusable_tokenizer(path, _first_line(error)) from error


def _of_hub(name: str, revision: str | None) -> Any:
    """The tokenizer of a model of the hub."""
    try:
        import transformers

        where = {"revision": revision} if revision else {}
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except ImportError as error:
        raise not_installed("reading tokenizers", "transformers") from error
    except Exception as error:  # its many libraries raise anything
        raise unusable_tokenizer(name, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def unusable_tokenizer(
    path: Path | str, why: str, fix: str = "give --tokenizer a tokenizer.json, or the folder of one"
) -> LocalError:
    """HP-DATA-009: the tokenizer at `path` cannot be used."""
    what = f"cannot use the tokenizer {path}"
    return LocalError("HP-DATA-009", what, why=why, fix=fix, exit_code=ExitCode.CONFIG)
