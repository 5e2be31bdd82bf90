"""Amendments of the manifest: the owner's word alone counts, and never an older one."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from hetpeer.bootstrap.admission.admission import Admission
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.run.amendment import Amendment, MembershipChange, sign_amendment
from hetpeer.bootstrap.run.membership_config import FILE, MembershipConfig, amend
from hetpeer.bootstrap.run.owner_signature import AMENDMENT
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError, ProtocolError
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.peer.cli import main


@pytest.fixture
def others(tmp_path: Path) -> list[str]:
    return [Identity.create(tmp_path / f"{number}.key").peer_id for number in range(3)]


def signed(fresh: RunDirectory, sequence: int, *peers: str) -> bytes:
    amendment = Amendment(run_id=fresh.run_id, sequence=sequence, coordinators=peers)
    return sign_amendment(amendment, fresh.owner_key())


def test_the_latest_amendment_counts(fresh: RunDirectory, others: list[str]) -> None:
    membership = MembershipConfig(fresh.signed, fresh.path)
    assert (membership.peers, membership.sequence, membership.data) == (fresh.manifest.coordinators, 0, b"")
    assert membership.learn(signed(fresh, 2, others[0]))
    assert not membership.learn(signed(fresh, 1, others[1]))
    assert not membership.learn(signed(fresh, 2, others[1]))
    assert (membership.peers, membership.sequence) == ((others[0],), 2)
    again = MembershipConfig(fresh.signed, fresh.path)
    assert (again.peers, again.data) == (membership.peers, membership.data)


def test_of_two_amendments_with_one_number_the_recorded_one_counts(
    fresh: RunDirectory, others: list[str]
) -> None:
    one, another, older, later = (
        signed(fresh, number, peer)
        for number, peer in ((2, others[0]), (2, others[1]), (1, *others[2:]), (3, others[2]))
    )
    membership = MembershipConfig(fresh.signed, fresh.path)
    assert membership.learn(one)
    assert [membership.learn(data, instead=True) for data in (one, older, another, another)] == [
        False,
        False,
        True,
        False,
    ]
    assert MembershipConfig(fresh.signed, fresh.path).data == membership.data == another
    records = [
        {"kind": "amendment", "sequence": n, "data": data.hex()}
        for n, data in ((2, another), (2, one), (1, older))
    ]
    assert History.of(records).amendment == another.hex()
    assert (
        History.of([*records, {"kind": "amendment", "sequence": 3, "data": later.hex()}]).amendment
        == later.hex()
    )


def test_an_amendment_is_seen_where_it_is_written(fresh: RunDirectory, others: list[str]) -> None:
    membership = MembershipConfig(fresh.signed, fresh.path)
    assert (
        amend(
            fresh.signed, fresh.path, fresh.owner_key(), MembershipChange(coordinators=tuple(others))
        ).sequence
        == 1
    )
    assert membership.sequence == 0
    membership.look()
    assert (membership.peers, membership.sequence) == (tuple(others), 1)
    assert (
        amend(
            fresh.signed, fresh.path, fresh.owner_key(), MembershipChange(coordinators=(others[2],))
        ).sequence
        == 2
    )


def test_an_amendment_changes_what_it_says_and_keeps_the_rest(fresh: RunDirectory, others: list[str]) -> None:
    first = fresh.signed.reliable
    for change, banned, listed, revoked in (
        (MembershipChange(ban=(others[0], others[1]), enlist=(others[2],)), others[:2], others[2:], ()),
        (MembershipChange(unban=(others[0],), revoke=("0" * 16,)), others[1:2], others[2:], ("0" * 16,)),
        (MembershipChange(ban=(others[1],), unlist=(others[2],)), others[1:2], [], ("0" * 16,)),
    ):
        membership = amend(fresh.signed, fresh.path, fresh.owner_key(), change)
        latest = membership.amendment
        assert latest is not None
        assert (latest.banned, latest.listed, latest.revoked) == (tuple(banned), tuple(listed), revoked)
        assert membership.peers == first
    assert len(membership.data) < 1000
    many = MembershipChange(ban=tuple(f"Qm{number:044}".replace("0", "A") for number in range(257)))
    with pytest.raises(LocalError, match="HP-RUN-001"):
        amend(fresh.signed, fresh.path, fresh.owner_key(), many)


def test_whoever_is_unbanned_is_pardoned_once(fresh: RunDirectory, others: list[str]) -> None:
    pardons = []
    for change in (
        MembershipChange(unban=(others[0],)),
        MembershipChange(enlist=(others[2],)),
        MembershipChange(unban=(others[0], others[1])),
        MembershipChange(ban=(others[1],)),
    ):
        latest = amend(fresh.signed, fresh.path, fresh.owner_key(), change).amendment
        assert latest is not None
        pardons.append(latest.pardoned)
    first, both = {others[0]: 1}, {others[0]: 3, others[1]: 3}
    assert pardons == [first, first, both, {others[0]: 3}]


def test_the_command_lets_in_again_whom_others_have_convicted(fresh: RunDirectory, others: list[str]) -> None:
    manifest, peer = fresh.manifest, others[0]
    banned = {"kind": "banned", "peer": peer, "why": "false sums", "step": 3}
    door = Admission(fresh.run_id, manifest.owner, manifest.admission, [banned])
    assert door.bans(peer)
    done = CliRunner().invoke(main.app, ["amend", str(fresh.path), "--unban", peer])
    assert f"pardoned {peer}" in done.stdout.splitlines()
    latest = MembershipConfig(fresh.signed, fresh.path).amendment
    assert latest is not None
    door.amended(latest)
    assert not door.bans(peer)


def test_who_is_told_keeps_it(fresh: RunDirectory, others: list[str], tmp_path: Path) -> None:
    told = fresh.signed.amended(signed(fresh, 1, others[0]))
    (folder := tmp_path / "home").mkdir()
    assert MembershipConfig(told, folder).peers == (others[0],)
    assert MembershipConfig(fresh.signed, folder).peers == (others[0],)


def test_a_wrong_number_of_peers_is_no_amendment(fresh: RunDirectory, others: list[str]) -> None:
    for peers in (others[:2], [others[0]] * 3, ["nobody"]):
        with pytest.raises(LocalError) as caught:
            amend(fresh.signed, fresh.path, fresh.owner_key(), MembershipChange(coordinators=tuple(peers)))
        assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-001", ExitCode.CONFIG)
    assert not (fresh.path / FILE).exists()


def test_strangers_cannot_amend(fresh: RunDirectory, others: list[str]) -> None:
    right = Amendment(run_id=fresh.run_id, sequence=1, coordinators=(others[0],))
    good = signed(fresh, 1, others[0])
    forged = [
        sign_amendment(right, Ed25519PrivateKey.generate()),
        sign_amendment(right.model_copy(update={"run_id": "0" * 32}), fresh.owner_key()),
        sign_amendment(right.model_copy(update={"coordinators": tuple(others[:2])}), fresh.owner_key()),
        good + bytes(AMENDMENT.max_bytes),
        b"",
        fresh.signed.data,
        *(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))),
    ]
    membership = MembershipConfig(fresh.signed, fresh.path)
    for data in forged:
        with pytest.raises(LocalError) as caught:
            membership.learn(data)
        assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-013", ExitCode.VERSION)
        with pytest.raises(ProtocolError) as offence:
            membership.hear(data, others[1])
        assert offence.value.peer == others[1]
    assert membership.sequence == 0
    (fresh.path / FILE).write_bytes(forged[0])
    with pytest.raises(LocalError, match="HP-RUN-013"):
        MembershipConfig(fresh.signed, fresh.path)


def test_of_many_wrong_fields_the_first_is_named(fresh: RunDirectory) -> None:
    data = AMENDMENT.seal({"run_id": 7, "sequence": 1, "coordinators": [7] * 500}, fresh.owner_key())
    with pytest.raises(LocalError, match="run_id: it must be a valid string") as caught:
        MembershipConfig(fresh.signed, fresh.path).learn(data)
    assert len(caught.value.line()) < 500


def test_amending_needs_the_owners_key(fresh: RunDirectory) -> None:
    (fresh.path / "owner.key").unlink()
    with pytest.raises(LocalError) as caught:
        fresh.owner_key()
    assert (caught.value.code, caught.value.exit_code) == ("HP-RUN-015", ExitCode.CONFIG)
