"""Whether a run's door lets somebody in, as far as that is known without asking a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hetpeer.bootstrap.run.amendment import Amendment, sign_amendment
from hetpeer.bootstrap.run.manifest import SignedManifest, sign
from hetpeer.bootstrap.run.manifest import read as read_manifest
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AdmissionSettings
from hetpeer.bootstrap.run.vouchers import new_voucher, sign_voucher
from hetpeer.peer.daemon.presence import refusal
from tests.bootstrap.engine import make_run

ME, OTHER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC", f"Qm{'A' * 44}"


@pytest.fixture
def author(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "author")


def door(author: RunDirectory, here: Path, admission: dict[str, Any], **said: Any) -> RunDirectory:
    """Of a run of that admission; `said` is what its author amended."""
    key = author.owner_key()
    settings = AdmissionSettings(**admission)
    signed: SignedManifest = read_manifest(
        sign(author.manifest.model_copy(update={"admission": settings}), key)
    )
    if said:
        fields = {"run_id": signed.run_id, "sequence": 1, "coordinators": author.manifest.coordinators}
        signed = signed.amended(sign_amendment(Amendment(**fields, **said), key))
    here.mkdir(exist_ok=True)
    return RunDirectory(here, signed)


@pytest.mark.parametrize(
    ("admission", "said", "reason"),
    [
        ({}, {}, None),
        ({"work_bits": 20, "per_network": 1}, {}, None),
        ({}, {"banned": (ME,)}, "banned"),
        ({}, {"banned": (OTHER,)}, None),
        ({"policy": "listed"}, {}, "uninvited"),
        ({"policy": "listed"}, {"listed": (ME,)}, None),
        ({"policy": "invited"}, {"listed": (ME,)}, None),
        ({"policy": "invited"}, {}, "uninvited"),
    ],
)
def test_the_authors_word(
    author: RunDirectory,
    tmp_path: Path,
    admission: dict[str, Any],
    said: dict[str, Any],
    reason: str | None,
) -> None:
    found = refusal(door(author, tmp_path / "here", admission, **said), ME, b"")
    assert (None if found is None else found.reason) == reason


def test_an_invite_is_looked_at_but_not_its_date(author: RunDirectory, tmp_path: Path) -> None:
    """Who was admitted before it expired still is; only the log knows."""
    run = door(author, tmp_path / "here", {"policy": "invited"})
    voucher = new_voucher(run.run_id, 1, 1)
    mine, false = (sign_voucher(voucher, key) for key in (author.owner_key(), Ed25519PrivateKey.generate()))
    assert refusal(run, ME, mine) is None
    found = refusal(run, ME, false)
    assert found is not None
    assert "voucher is not valid" in found.why
    (run.path / "voucher").write_bytes(mine)
    assert refusal(run, ME, b"") is None, "that of the invite by which it came before"
