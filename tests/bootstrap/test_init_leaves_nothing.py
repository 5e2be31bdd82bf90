"""`hetpeer init` leaves nothing if it is interrupted at any line it says, or the disk is full at any file."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.authoring.run_data import DataOptions
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from tests.bootstrap.engine import TRAINING
from tests.bootstrap.written_data import TEXTS, own_model, tokenizer_folder, written

Init = Callable[[str, Callable[[str], None]], RunDirectory]


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    """Makes a run of a name from tokenized texts."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    model, data = own_model(tmp_path), written(tmp_path / "a.jsonl", TEXTS)
    reading = DataOptions(tokenizer=tokenizer_folder(tmp_path / "tokenizer"))

    def make(name: str, tell: Callable[[str], None]) -> RunDirectory:
        where = tmp_path / "runs" / name
        options = {"model": model, "data": [data], "reading": reading, "sequence_length": 32}
        return create_run(where, training=TRAINING, tell=tell, **options)

    return make


def left(tmp_path: Path) -> list[str]:
    """Files that are there, without the cache that importing torch makes."""
    there = [path for name in ("runs", "temporary") for path in (tmp_path / name).rglob("*")]
    return [str(path) for path in there if not path.name.startswith("torchinductor")]


def test_an_interrupt_at_any_line(tmp_path: Path, init: Init) -> None:
    lines: list[str] = []
    whole = init("whole", lines.append)
    assert len(lines) > 5
    files = [path for path in whole.path.rglob("*") if path.is_file()]
    whole.path.rename(tmp_path / "whole")
    assert len(files) > 10
    for number in range(len(lines)):
        said: list[str] = []

        def tell(line: str, number: int = number, said: list[str] = said) -> None:
            said.append(line)
            if len(said) == number + 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            init("run", tell)
        assert left(tmp_path) == [], said[-1]


def test_a_disk_that_is_full_at_any_file(tmp_path: Path, init: Init) -> None:
    whole = init("whole", lambda _line: None).path
    first = (whole / "identity.key").stat().st_size  # without room for that it is HP-ID-001
    found = {path.stat().st_size for path in whole.rglob("*") if path.is_file()}
    sizes = sorted(size for size in found if size > first)
    whole.rename(tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in {*sizes[:: max(1, len(sizes) // 3)], sizes[-1]}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
        try:
            with pytest.raises(LocalError) as caught:
                init("run", lambda _line: None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (caught.value.code, caught.value.exit_code) == ("HP-DISK-002", ExitCode.TOO_SMALL), size
        assert left(tmp_path) == [], size
