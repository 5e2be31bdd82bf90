"""Texts and chats become tokens, and tokens samples: borders, masks, loss on the assistant's words alone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hetpeer.bootstrap.samples.documents import documents, records
from hetpeer.bootstrap.samples.formats import data_files
from hetpeer.bootstrap.samples.packing import OPEN, packed, padded, pieces, shifted
from hetpeer.bootstrap.samples.record import Progress
from hetpeer.bootstrap.samples.tokenizer import Document, Tokenizer
from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.data.extremes import IGNORED
from tests.amounts import examples
from tests.bootstrap.written_data import CHATS, MARKED, TEMPLATE, TEXTS, VOCABULARY, tokenizer_folder, written


def made(path: Path, tokenizer: Path) -> list[Document]:
    return [*documents(records(data_files([path], print), None, Progress(print)), Tokenizer(tokenizer))]


def test_texts_are_tokenized_as_transformers_does_and_end(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    found = made(written(tmp_path / "a.jsonl", ["", *TEXTS]), folder)
    own = AutoTokenizer.from_pretrained(folder)
    assert [document.ids for document in found] == [
        [*own(text)["input_ids"], own.eos_token_id] for text in TEXTS
    ]
    assert {document.learned for document in found} == {None}
    assert Tokenizer(folder).vocabulary == len(own) <= VOCABULARY


def test_a_file_alone_is_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path / "tokenizer") / "tokenizer.json"
    folder, alone = Tokenizer(file.parent), Tokenizer(file)
    for whole, part in zip(folder.texts(TEXTS), alone.texts(TEXTS), strict=True):
        assert [*whole.ids] == [*part.ids, 1]
    with pytest.raises(LocalError, match=r"HP-DATA-009.*it has no chat template"):
        made(written(tmp_path / "a.jsonl", CHATS, "messages"), file)


def test_a_truncation_that_the_tokenizer_stores_cuts_no_text(tmp_path: Path) -> None:
    """`whole` leaves a truncation behind, too; a text of special tokens is read as transformers reads it."""
    folder = tokenizer_folder(tmp_path / "tokenizer")
    made = AutoTokenizer.from_pretrained(folder)
    made.backend_tokenizer.enable_truncation(3)
    made.backend_tokenizer.enable_padding(length=50)
    made.save_pretrained(folder)
    ours, texts = Tokenizer(folder), [*TEXTS, "", "<|user|>a<|end|>"]
    assert [len(ids) for ids in ours.whole(texts, 2)][:3] == [2, 2, 2]
    wanted = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    assert [[*document.ids] for document in ours.texts(texts)] == [
        [*ids, 1][: len(ids) + (ids[-1:] != [1])] for ids in wanted
    ]


def test_a_tokenizer_with_a_call_of_its_own_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Tokenizer(tokenizer_folder(tmp_path / "tokenizer"))
    kind = type(ours._tokenizer)
    before = kind.__call__

    class Lower(kind):  # type: ignore[misc, valid-type]
        def __call__(self, text: list[str], **options: object) -> object:
            return before(self, [one.lower() for one in text], **options)

    ours._tokenizer.__class__ = Lower
    (document,) = ours.texts(["THE FOX"])
    assert ours.decoded(document.ids) == "the fox"


def test_a_bad_line_far_behind_is_met_when_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetpeer.bootstrap.samples.documents.BATCH_RECORDS", 8)
    path = written(tmp_path / "a.jsonl", TEXTS)
    path.write_text(path.read_text() + "{no\n")
    folder = tokenizer_folder(tmp_path / "tokenizer")
    read = documents(records(data_files([path], print), None, Progress(print)), Tokenizer(folder))
    seen = [next(read) for _ in TEXTS[:56]]
    with pytest.raises(LocalError, match=r"HP-DATA-008.*line 61 of"):
        next(read)
    assert len(seen) == 56
    assert not [one for one in threading.enumerate() if one.name.startswith("tokenizing")]


def learned(document: Document, folder: Path) -> str:
    assert document.learned is not None
    ids = [one for one, counts in zip(document.ids, document.learned, strict=True) if counts]
    return AutoTokenizer.from_pretrained(folder).decode(ids)


@pytest.mark.parametrize("marked", [False, True])
def test_only_the_assistants_words_are_targets(tmp_path: Path, marked: bool) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", MARKED if marked else TEMPLATE)
    end = "" if marked else "<|end|>"
    found = made(written(tmp_path / "a.parquet", CHATS, "messages"), folder)
    own = AutoTokenizer.from_pretrained(folder)
    for document, chat, text in zip(found, CHATS, TEXTS, strict=True):
        assert own.decode(document.ids) == own.apply_chat_template(chat, tokenize=False)
        assert learned(document, folder) == f"{text}{end}no more{end}"


LATER = "{% for message in messages %}{% if loop.last %}!{% endif %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "code", "why"),
    [
        (None, "HP-DATA-009", "it has no chat template"),
        ("{{ messages[0]['content'] + 7 }}", "HP-DATA-008", "fails"),
        ("{{ raise_exception('no system prompt') }}", "HP-DATA-008", "no system prompt"),
        ("{% if %}", "HP-DATA-008", "fails"),
        (LATER, "HP-DATA-009", "in another way when more follow"),
    ],
)
def test_a_template_that_does_not_work(tmp_path: Path, template: str | None, code: str, why: str) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", template)
    with pytest.raises(LocalError) as caught:
        made(written(tmp_path / "a.jsonl", CHATS, "messages"), folder)
    assert caught.value.code == code
    assert why in caught.value.why
    assert code == "HP-DATA-009" or "line 1 of" in caught.value.what


BAD_CONTENTS = [
    (None, "a message of the chat has no content"),
    (7, "the content of a message is a value of type int, and no text"),
    ([{"type": "image"}, {"type": "text", "text": "x"}], "the content of a message is a value of type list"),
    ("\ud800", "its text is no Unicode"),
]


@pytest.mark.parametrize(("content", "why"), BAD_CONTENTS)
def test_a_message_without_a_text_is_refused(tmp_path: Path, content: object, why: str) -> None:
    """A template would write such a value as Python shows it."""
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    with pytest.raises(LocalError, match=r"HP-DATA-008.*line 1 of") as caught:
        made(written(tmp_path / "a.jsonl", [chat], "messages"), tokenizer_folder(tmp_path / "tokenizer"))
    assert caught.value.why.startswith(why)


def test_parts_of_a_text_are_put_together(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    parts = [
        [{**one, "content": [{"type": "text", "text": text} for text in one["content"]]} for one in chat]
        for chat in CHATS
    ]
    found = [made(written(tmp_path / "a.jsonl", chats, "messages"), folder) for chats in (CHATS, parts)]
    assert found[0] == found[1]


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    with pytest.raises(LocalError, match=r"HP-DATA-008.*line 2 of.*its text is no Unicode"):
        made(written(tmp_path / "a.jsonl", ["good", "\ud800"]), folder)


@pytest.mark.parametrize("chat", [[], [{"content": "x"}], ["x"], [7]])
def test_messages_that_are_none(tmp_path: Path, chat: list[object]) -> None:
    with pytest.raises(LocalError, match=r"HP-DATA-008.*line 1 of"):
        made(written(tmp_path / "a.jsonl", [chat], "messages"), tokenizer_folder(tmp_path / "tokenizer"))


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": {"type": "none"}}'])
def test_what_is_no_tokenizer(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LocalError, match=r"HP-DATA-009: cannot use the tokenizer"):
        Tokenizer(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LocalError, match=r"HP-DATA-009: cannot use the tokenizer"):
        Tokenizer(tmp_path / "empty")


LENGTHS = st.lists(st.integers(0, 40), max_size=100)


@examples(200)
@given(lengths=LENGTHS, length=st.integers(2, 16), pack=st.booleans())
def test_every_target_is_in_one_sample_and_sees_its_own_document(
    lengths: list[int], length: int, pack: bool
) -> None:
    """Each id is a number of its own, so that nothing can be mistaken for something else."""
    begins = np.cumsum([1, *lengths])
    given_ids = [list(range(begin, begin + size)) for begin, size in zip(begins, lengths, strict=False)]
    parts = [*pieces((Document(ids) for ids in given_ids), length)]
    samples = [*(packed if pack else padded)(iter(parts), length, 0)]
    found: list[int] = []
    for sample in samples:
        ids, labels = sample["input_ids"], sample["labels"]
        assert {array.shape for array in sample.values()} == {(length,)}
        assert {array.dtype for array in sample.values()} == {np.dtype(np.int64)}
        counted = labels != IGNORED
        assert (labels[counted] == ids[counted]).all()
        assert (ids[np.flatnonzero(counted) - 1] == ids[counted] - 1).all()  # the token before is its own
        found += labels[counted].tolist()
        if pack:
            places = sample["position_ids"]
            assert (places[counted] > 0).all()
            assert (np.diff(places)[counted[1:]] == 1).all()
            assert places[0] == 0
        else:
            assert (sample["attention_mask"] == (ids != 0)).all()
        own = shifted(sample)
        assert (own["targets"][:-1] == labels[1:]).all()
        assert own["targets"][-1] == IGNORED
    firsts = {ids[begin] for ids in given_ids for begin in range(0, len(ids), length)}
    assert sorted(found) == sorted(one for ids in given_ids for one in ids if one not in firsts)


def test_packing_leaves_little_room() -> None:
    sizes = np.random.default_rng(0).integers(2, 100, 2000)
    parts = [*pieces((Document(range(1, 1 + size)) for size in sizes), 128)]
    samples = [*packed(iter(parts), 128, 0)]
    assert len(samples) * 128 <= 1.03 * sizes.sum() + OPEN * 128
