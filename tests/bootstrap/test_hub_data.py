"""Data sets by name: folders as the hub has them, read as a stream; nothing is fetched in these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import absolute_data
from hetpeer.bootstrap.samples.documents import records
from hetpeer.bootstrap.samples.formats import data_files
from hetpeer.bootstrap.samples.hub_name import HubName
from hetpeer.bootstrap.samples.record import Progress
from hetpeer.dht.base.errors import LocalError
from tests.bootstrap.engine import TRAINING
from tests.bootstrap.pretrained_models import llama
from tests.bootstrap.written_data import CHATS, TEXTS, written

CARD = """---
configs:
- config_name: long
  data_files: [{split: train, path: "long/*.parquet"}]
- config_name: short
  data_files: [{split: train, path: "short/*.parquet"}, {split: test, path: "short/*.parquet"}]
---
"""


def contents(name: str, field: str | None = None) -> list[Any]:
    (name,) = absolute_data([name])
    progress = Progress(print, total=7)
    found = [record.content for record in records(data_files([Path(name)], print), field, progress)]
    assert progress.total == 0
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set with a card and two configurations."""
    for part in ("long", "short"):
        (tmp_path / "set" / part).mkdir(parents=True)
    written(tmp_path / "set" / "long" / "a.parquet", TEXTS * 300)
    written(tmp_path / "set" / "short" / "a.parquet", CHATS, "messages")
    (tmp_path / "set" / "README.md").write_text(CARD)
    return tmp_path / "set"


def test_each_configuration_gives_its_training_split_in_order(folder: Path) -> None:
    assert contents(f"hf:{folder}:long") == TEXTS * 300
    assert contents(f"hf:{folder}:short") == CHATS


def test_a_folder_without_a_card(tmp_path: Path) -> None:
    written(tmp_path / "a.csv", TEXTS, "body")
    assert contents(f"hf:{tmp_path}", "body") == TEXTS


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("hf:{}", "HP-DATA-001", "Config name is missing. Please pick one among the available configs"),
        ("hf:{}:none", "HP-DATA-001", "'none' not found"),
        ("hf:{}/none", "HP-DATA-001", "there is no folder"),
        ("hf:", "HP-DATA-001", "it names no data set"),
        ("hf:{}:short", "HP-DATA-008", "it has no field 'body'"),
    ],
)
def test_what_cannot_be_read_is_one_line(folder: Path, name: str, code: str, why: str) -> None:
    with pytest.raises(LocalError) as caught:
        contents(name.format(folder), "body")
    assert caught.value.code == code
    assert why in caught.value.why
    assert "\n" not in str(caught.value)


def test_several_splits_without_one_for_training(folder: Path) -> None:
    (folder / "README.md").write_text(CARD.replace("split: train", "split: dev"))
    with pytest.raises(LocalError, match="none called train: dev, test"):
        contents(f"hf:{folder}:short")


def test_records_are_not_read_as_texts(tmp_path: Path) -> None:
    """datasets 5.2.0 takes the format of the configuration that the card lists first for all of them."""
    card = (
        "---\nconfigs:\n- {config_name: a, data_files: a.txt}\n- {config_name: b, data_files: b.jsonl}\n---\n"
    )
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "a.txt").write_text("a line\n")
    written(tmp_path / "b.jsonl", TEXTS)
    assert contents(f"hf:{tmp_path}:a") == ["a line"]
    with pytest.raises(LocalError, match=r"HP-DATA-007.*b\.jsonl has records"):
        contents(f"hf:{tmp_path}:b")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocalError, match=r"HP-DATA-001.*the hub cannot be reached"):
        contents("hf:openai/gsm8k:main")


def test_names() -> None:
    assert HubName.parse("hf:openai/gsm8k:main@v1") == HubName("openai/gsm8k", "main", "v1")
    assert str(HubName.parse("hf:openai/gsm8k:main@v1")) == "hf:openai/gsm8k:main@v1"
    assert HubName.parse("hf:squad@v1") == HubName("squad", None, "v1")


def test_a_run_of_a_data_set_by_name(folder: Path, tmp_path: Path) -> None:
    model = f"hf:{llama(tmp_path / 'model')}"
    runs = [
        create_run(tmp_path / str(n), model=model, data=[data], sequence_length=32, training=TRAINING)
        for n, data in enumerate([f"hf:{folder}:short", folder / "short"])
    ]
    first, second = (run.manifest.data.train for run in runs)
    assert [shard.blake3 for shard in first] == [shard.blake3 for shard in second]
    assert runs[0].author().data == (f"hf:{folder}:short",)
