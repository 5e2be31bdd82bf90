from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.peer_identity import Identity, peer_id_of, verify


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("identity") / "key")


@pytest.fixture
def open_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def refusal(path: Path) -> LocalError:
    with pytest.raises(LocalError) as caught:
        Identity.load(path)
    assert (caught.value.code, caught.value.exit_code) == ("HP-ID-001", ExitCode.IDENTITY)
    return caught.value


def public_bytes(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


@pytest.mark.usefixtures("open_umask")
def test_a_key_file_is_private_whatever_the_umask_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    Identity.create(tmp_path / "new" / "key")
    assert (tmp_path / "new" / "key").stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "key"]


def test_the_same_file_gives_the_same_identity(identity: Identity) -> None:
    again = Identity.load(identity.path)
    assert (again.peer_id, again.public_bytes) == (identity.peer_id, identity.public_bytes)
    assert Identity.load_or_create(identity.path).peer_id == identity.peer_id
    assert peer_id_of(identity.public_bytes) == identity.peer_id
    assert identity.peer_id.startswith("Qm")


def test_an_existing_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"precious")
    with pytest.raises(LocalError, match="HP-ID-001"):
        Identity.create(path)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_of_several_creators_exactly_one_wins(tmp_path: Path) -> None:
    def create(_: int) -> str | None:
        try:
            return Identity.create(tmp_path / "key").peer_id
        except LocalError:
            return None

    with ThreadPoolExecutor(4) as pool:
        winners = [peer_id for peer_id in pool.map(create, range(4)) if peer_id]
    assert winners == [Identity.load(tmp_path / "key").peer_id]


def test_who_comes_second_has_the_identity_of_the_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: Identity.load_or_create(tmp_path / "key").peer_id, range(4))
    assert set(found) == {Identity.load(tmp_path / "key").peer_id}


def test_a_damaged_key_is_refused(identity: Identity, tmp_path: Path) -> None:
    whole = identity.path.read_bytes()
    path = tmp_path / "key"
    path.touch(mode=0o600)
    for damaged in (
        b"",
        whole[:-1],
        whole[:3],
        whole + b"\0",
        whole[1:],
        b"\x08\x01" + whole[2:],
        bytes(len(whole)),
        os.urandom(9000),
    ):
        path.write_bytes(damaged)
        assert "damaged" in refusal(path).why


def test_a_key_that_others_can_read_is_refused(identity: Identity, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o644)
    path.write_bytes(identity.path.read_bytes())
    assert refusal(path).fix == f"chmod 600 {path}"


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "none")
    refusal(tmp_path)


def test_a_signature_is_good_for_its_data_and_key_only(identity: Identity) -> None:
    signature = identity.sign(b"data")
    assert verify(identity.public_bytes, b"data", signature)
    assert not verify(identity.public_bytes, b"Data", signature)
    assert not verify(identity.public_bytes, b"data", signature[:-1])
    assert not verify(public_bytes(rsa.generate_private_key(65537, 2048)), b"data", signature)


def test_other_kinds_and_weak_keys_verify_nothing(identity: Identity) -> None:
    signature = identity.sign(b"data")
    assert not verify(public_bytes(ec.generate_private_key(ec.SECP256R1())), b"data", signature)
    assert not verify(public_bytes(rsa.generate_private_key(65537, 1024)), b"data", signature)


@given(key=st.binary(max_size=400), data=st.binary(max_size=50), signature=st.binary(max_size=300))
def test_junk_is_simply_no_signature(key: bytes, data: bytes, signature: bytes) -> None:
    assert not verify(key, data, signature)
