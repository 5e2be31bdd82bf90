"""The token of a daemon's web server."""

from pathlib import Path

import pytest

from hetpeer.peer.web.access_token import FILE, token_of


def test_it_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    assert len(token) >= 20
    assert token_of(tmp_path) == token
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert token_of(other) != token


@pytest.mark.parametrize("content", [b"", b"short", b"<b>" * 10, b"\xff" * 30, b"a" * 65])
def test_one_that_is_none_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    (tmp_path / FILE).chmod(0o600)
    assert len(token_of(tmp_path)) == 24


def test_one_that_others_can_read_is_made_anew(tmp_path: Path) -> None:
    token = token_of(tmp_path)
    (tmp_path / FILE).chmod(0o644)
    assert token_of(tmp_path) != token
