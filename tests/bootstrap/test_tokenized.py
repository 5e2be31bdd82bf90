"""Texts and chats become tokens, and tokens samples: borders, masks, loss on the assistant's words alone."""

from __future__ import annotations

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
