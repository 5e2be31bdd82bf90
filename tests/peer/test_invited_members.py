"""The members in an invite: few, proved, sticky, and of use to those that the invite is for."""

from __future__ import annotations

from pathlib import Path

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.identity.addresses import Address, at_socket, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node, NodeConfig
from hetpeer.peer.arrival.destinations import Invite, parse_invite
from hetpeer.peer.arrival.invite_file import Inviting, carried_members
from hetpeer.peer.reliable.invited_members import MAX_MEMBERS, STALE_S, InvitedMembers, is_as_public
from tests.bootstrap.engine import make_run
from tests.dht.identities import identities

PEERS = [one.peer_id for one in identities(6)]


def member(n: int, ip: str = "8.8.8.8") -> Address:
    return at_socket(ip, 4000 + n, PEERS[n])


def there(*numbers: int) -> dict[str, Address]:
    return {PEERS[n]: member(n) for n in numbers}


def test_a_few_are_taken_and_stay_although_others_come() -> None:
    members = InvitedMembers((), 0.0)
    assert members.candidates(there(*range(6)), 0.0).keys() == there(*range(6)).keys()
    members.proved(there(0, 1, 2, 3), 0.0)
    assert members.addresses == [member(n) for n in range(MAX_MEMBERS)]
    assert members.candidates(there(5, 1, 4), STALE_S / 2).keys() == {PEERS[1]}
    members.proved(there(1, 5), STALE_S / 2)
    assert members.addresses == [member(n) for n in range(MAX_MEMBERS)]


def test_one_that_is_away_for_long_makes_room_for_one_that_answers() -> None:
    members = InvitedMembers([member(n) for n in range(MAX_MEMBERS)], 0.0)
    members.proved(there(0, 2), STALE_S - 1)
    assert members.addresses == [member(0), member(1), member(2)]
    assert PEERS[4] in members.candidates(there(0, 2, 4), STALE_S)
    members.proved(there(0, 2, 4), STALE_S)
    assert sorted(map(str, members.addresses)) == sorted(map(str, (member(0), member(2), member(4))))
    members.proved({}, 10 * STALE_S)
    assert len(members.addresses) == MAX_MEMBERS, "an address that may be old is better than none"


def test_a_member_with_another_address_is_carried_with_it() -> None:
    members = InvitedMembers([member(0)], 0.0)
    moved = at_socket("9.9.9.9", 4000, PEERS[0])
    members.proved({PEERS[0]: moved}, 1.0)
    assert members.addresses == [moved]


def test_an_invite_for_the_internet_carries_no_address_of_a_house() -> None:
    far, near, here = (at_socket(ip, 4000, PEERS[5]) for ip in ("8.8.4.4", "192.168.1.7", "127.0.0.1"))
    assert [is_as_public([far, near], address) for address in (far, near, here)] == [True, False, False]
    assert [is_as_public([near], address) for address in (far, near, here)] == [True, True, False]
    assert is_as_public([here], here)


async def test_members_are_kept_in_the_file_and_only_other_changes_are_told(tmp_path: Path) -> None:
    run: RunDirectory = make_run(tmp_path / "run")
    node = await Node.start(NodeConfig(alone_ok=True), Identity.create(tmp_path / "identity.key"))
    try:
        own, meeting, present = parse_address(node.addresses()[0]), member(5), [member(0)]
        inviting = Inviting(node, run, [meeting], lambda: present)
        first = inviting.renewed()
        assert first is not None
        assert first.addresses == (own, meeting, member(0))
        present.append(member(1))
        more = inviting.renewed()
        assert more is not None
        assert not inviting.tells(more, first)
        assert parse_invite(run.invite_path.read_text()).addresses == (own, meeting, member(0), member(1))
        assert inviting.tells(Invite(more.name, more.run, more.addresses[1:]), more)
        assert carried_members(run, node.peer_id, [meeting]) == present
        run.invite_path.unlink()
        assert carried_members(run, node.peer_id, [meeting]) == []
    finally:
        await node.close()
