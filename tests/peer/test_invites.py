"""Invites: what is written is read, and nothing else is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import EXAMPLE, Address, at_socket, parse_address, through
from hetpeer.peer.arrival.destinations import (
    MAX_ADDRESSES,
    MAX_LENGTH,
    Destination,
    Invite,
    destination,
    make_invite,
    parse_invite,
    worth_giving,
)

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
RELAY = "QmZsazs9sT4ZLVPTSftwyq9MUdQuY7dGHGZovdzWqLAM8A"
RUN, OTHER_RUN = "3f" * 16, "a0" * 16
PLAIN = parse_address(EXAMPLE)
INVITE = make_invite("tiny-llm", RUN, [PLAIN])

hosts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).map(lambda ip: f"/ip6/{ip}"),
    st.sampled_from(["/dns4/peer.example.org", "/dns6/xn--bcher-kva.example", "/dns4/bücher.example"]),
)
ports = st.integers(1, 2**16 - 1).map(lambda port: f"/tcp/{port}")
beyond = st.sampled_from(["", "/http-path/a_b~..--", "/http-path/a,b%2Fc"])
direct = st.builds(
    lambda *parts: parse_address(f"{''.join(parts)}/p2p/{PEER}"),
    hosts,
    ports,
    beyond,
)
addresses = st.one_of(direct, direct.map(lambda relay: through(relay, RELAY)))
invites = st.builds(
    make_invite,
    st.text(max_size=80),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.lists(addresses, min_size=1, max_size=MAX_ADDRESSES),
)
in_time = settings(deadline=None)


def refusal(text: str) -> LocalError:
    with pytest.raises(LocalError) as caught:
        parse_invite(text)
    assert (caught.value.code, caught.value.exit_code) == ("HP-ADDR-003", ExitCode.USAGE)
    return caught.value


@in_time
@given(invites)
def test_what_is_written_is_read(invite: Invite) -> None:
    text = str(invite)
    assert len(text) <= MAX_LENGTH
    assert parse_invite(f" {text}\n") == invite


@in_time
@given(invites)
def test_nothing_in_it_is_mangled_on_its_way(invite: Invite) -> None:
    """No markup, no shell, no smart dashes and dots, no faces."""
    rest = str(invite).removeprefix("hetpeer://")
    assert re.fullmatch(r"[A-Za-z0-9/@,.%-]+", rest)
    assert not re.search(r"--|\.\.|^[.-]|[.-]@|@.*@", rest)


@in_time
@given(invites, st.data())
def test_one_changed_lost_or_added_character_is_found_out(invite: Invite, data: st.DataObject) -> None:
    text = str(invite)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("aZ09/@,.%-:_ é").filter(lambda c: c != text[at]))
    for damaged in (text[:at] + other + text[at + 1 :], text[:at] + text[at + 1 :], text[:at]):
        if damaged.strip() != text:
            refusal(damaged)


@in_time
@given(
    st.one_of(
        st.text(max_size=120),
        st.from_regex(r"hetpeer://[a-z.-]{0,4}@[0-9a-f]{0,33}/[ -~]{0,60},[0-9a-f]{6}", fullmatch=True),
        st.lists(st.sampled_from(["hetpeer://", "a", "@", RUN, EXAMPLE, ",", "%2F", "%ff", "%"])).map(
            "".join
        ),
    )
)
def test_no_text_gives_another_error(text: str) -> None:
    try:
        invite = parse_invite(text)
    except LocalError as error:
        assert error.code == "HP-ADDR-003"
    else:
        assert str(invite) == text.strip()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("tiny-llm", "tiny-llm"),
        ("my_run", "my-run"),
        ("v1.2", "v1.2"),
        ("a--b", "a-b"),
        ("a...b", "a-b"),
        ("a_-_.b", "a-b"),
        ("x" * 63 + "-", "x" * 63),
        ("x" * 63 + ".y", "x" * 63),
        ("_", "run"),
    ],
)
def test_a_name_is_made_for_people(name: str, label: str) -> None:
    invite = make_invite(name, RUN, [PLAIN])
    assert invite.name == label
    assert parse_invite(str(invite)) == invite


def test_it_is_short_enough_for_one_address_to_be_typed_and_bounded_for_many() -> None:
    assert len(str(INVITE)) < 150
    many = [parse_address(f"/dns4/{'x' * 60}.{'y' * 60}{i}.org/tcp/9/p2p/{PEER}") for i in range(20)]
    assert len(make_invite("a", RUN, many).addresses) == MAX_ADDRESSES
    long = [parse_address(f"/dns4/{'ü' * 50}{i}.org/tcp/9/p2p/{PEER}") for i in range(9)]
    invite = make_invite("a", RUN, long)
    assert 1 < len(invite.addresses) < MAX_ADDRESSES
    assert parse_invite(str(invite)) == invite


def test_each_rule_has_its_reason() -> None:
    text = str(INVITE)
    assert "longer than" in refusal(text + "a" * MAX_LENGTH).why
    assert "incomplete" in refusal(text[:60]).why
    assert "checksum is wrong" in refusal(text.replace("203.0", "203.1")).why
    assert "as hetpeer writes it" in refusal(str(Invite("a--b", RUN, (PLAIN,)))).why
    assert "more than" in refusal(str(Invite("a", RUN, (PLAIN,) * 9))).why
    neither = "16Uiu2HAmLhLvBoYaoZfaMUKuibM6ac163GwKY74c5kiSLg5KvLpY"
    address = Address(f"/ip4/1.2.3.4/tcp/1/p2p/{neither}", "")
    assert "neither Qm nor" in refusal(str(Invite("a", RUN, (address,)))).why


def test_several_of_both_lead_to_one_run() -> None:
    near = at_socket("192.168.1.9", 31330, PEER)
    assert destination([EXAMPLE]) == Destination((PLAIN,))
    assert destination([EXAMPLE], RUN) == Destination((PLAIN,), RUN)
    assert destination([str(near), f" {INVITE}\n", EXAMPLE], RUN) == Destination((near, PLAIN), RUN)
    for texts, run in (
        ([str(INVITE), str(make_invite("x", OTHER_RUN, [near]))], ""),
        ([str(INVITE)], OTHER_RUN),
        ([EXAMPLE], "3f3f"),
        ([EXAMPLE], RUN.upper()),
    ):
        with pytest.raises(LocalError, match="HP-ADDR-003"):
            destination(texts, run)
    with pytest.raises(LocalError, match="HP-ADDR-001"):
        destination(["hetpeer:/"])


def test_what_a_peer_gives_away_leads_to_it_from_elsewhere() -> None:
    def given(*ips: str) -> list[str]:
        found = worth_giving([*(at_socket(ip, 31330, PEER) for ip in ips), through(PLAIN, RELAY)])
        return [address.socket[0] for address in found if address.socket]

    assert given("127.0.0.1") == ["127.0.0.1"]
    everywhere = ("127.0.0.1", "192.168.1.9", "8.8.8.8", "10.0.0.1", "172.17.0.1", "::1")
    assert given(*everywhere) == ["8.8.8.8", "192.168.1.9", "10.0.0.1"]
