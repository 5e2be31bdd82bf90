"""The month's bytes: over restarts, into the next month, and from a file that is damaged."""

from pathlib import Path

import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.limits.config_file import TRAFFIC_FILE, Month, load_month, save_month


def test_it_survives_a_restart_and_ends_with_the_month(tmp_path: Path) -> None:
    month = load_month(tmp_path, "2026-11").plus("2026-11", 10, 5).plus("2026-11", 1, 2)
    save_month(tmp_path, month)
    assert load_month(tmp_path, "2026-11") == Month(month="2026-11", sent=11, received=7)
    assert load_month(tmp_path, "2026-12").plus("2026-12", 3, 0).nbytes == 3
    assert [path.name for path in tmp_path.iterdir()] == [TRAFFIC_FILE]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"month": "2026-11", "sent": -1, "received": 0}', b'{"sent": 5}', b"\xff"]
)
def test_a_damaged_file_counts_from_nothing(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / TRAFFIC_FILE).write_bytes(data)
    assert load_month(tmp_path, "2026-11") == Month(month="2026-11")
    assert "damaged" in caplog.text


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="HP-DISK-001"):
        save_month(tmp_path / "gone", Month(month="2026-11"))
