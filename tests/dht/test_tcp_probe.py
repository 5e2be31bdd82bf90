"""Whose a libp2p certificate is; whatever else the bytes are, they prove nothing."""

from pathlib import Path

import pytest

from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.tcp_probe import owner_of
from tests.dht.certificates import certificate

VERSION = b"\xa0\x03\x02\x01\x02"
ED25519 = b"\x06\x03\x2b\x65\x70"


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(Path(tmp_path_factory.mktemp("peer")) / "key")


def test_a_certificate_is_that_of_its_peer(peer: Identity) -> None:
    assert owner_of(certificate(peer)) == peer.peer_id


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (VERSION, VERSION[:-1] + b"\x05"),
        (VERSION, VERSION[:-1] + b"\x00"),
        (ED25519, b"\x06\x03\x2b\x65\x03"),
    ],
    ids=["version 6", "version 1", "a key of no known kind"],
)
def test_what_cannot_be_read_proves_nothing(peer: Identity, part: bytes, other: bytes) -> None:
    good = certificate(peer)
    assert part in good
    assert owner_of(good.replace(part, other)) == ""


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_changed_byte_makes_it_anothers(peer: Identity) -> None:
    good = certificate(peer)
    for at in range(len(good)):
        for bit in (0x01, 0x04, 0x80):
            assert owner_of(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :]) in ("", peer.peer_id)
