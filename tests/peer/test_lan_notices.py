"""What is believed of what anybody in the local network says: runs' ids and addresses, nothing else, and
not too many of them.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import Address, parse_address
from hetpeer.peer.arrival.destinations import MAX_ADDRESSES, MAX_SHOWN
from hetpeer.peer.arrival.lan_notices import MAX_TEXT, Notice, chosen, notice, told, understood

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
OTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
RUN, FOREIGN = "3f0c" * 8, "a1" * 16


def at(ip: str, port: int = 31330, peer: str = PEER) -> Address:
    return parse_address(f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}/p2p/{peer}")


def entries(**texts: str) -> dict[bytes, bytes | None]:
    return {key.replace("_", "-").encode(): text.encode() for key, text in texts.items()}


GOOD = {"v": "1", "run": RUN, "name": "tiny", "address": str(at("192.168.1.4"))}


def test_a_peer_says_where_the_house_finds_it() -> None:
    circuit = parse_address(f"{at('198.51.100.2', peer=OTHER)}/p2p-circuit/p2p/{PEER}")
    own = [at("127.0.0.1"), at("1.1.1.1"), circuit, at("192.168.1.4"), at("10.0.0.9"), at("fe80::1")]
    said = notice(RUN, "tiny", own)
    assert said is not None
    assert said.addresses == (at("192.168.1.4"), at("10.0.0.9"), at("fe80::1")), (
        "those of the house first, three at most"
    )
    assert understood({key.encode(): text.encode() for key, text in told(said).items()}) == said
    alone = notice(RUN, "tiny", [at("127.0.0.1")])
    assert alone is not None
    assert alone.addresses == (at("127.0.0.1"),), "this machine's, where there is nothing else"
    assert notice(RUN, "tiny", [circuit]) is None


def test_a_name_carries_nothing_any_further() -> None:
    said = notice(RUN, "\x1b[31m<b>tïny</b>\n" * 9, [at("10.0.0.9")])
    assert said is not None
    assert said.name == "[31mbtny/b[31mbtny/b[31mbtny/b[3"
    heard = understood(entries(**{**GOOD, "name": "\x1b]0;x\x07`rm`<script>" + "y" * 200}))
    assert heard is not None
    assert heard.name == "]0;xrmscript" + "y" * 20


@pytest.mark.parametrize(
    "changed",
    [
        {"v": "2"},
        {"run": RUN.upper()},
        {"run": RUN + "\n"},
        {"run": "../" + RUN[3:]},
        {"address": ""},
        {"address": f"/dns4/a.example/tcp/1/p2p/{PEER}"},
        {"address": f"{at('10.0.0.9', peer=OTHER)}/p2p-circuit/p2p/{PEER}"},
        {"address": f"/ip4/10.0.0.9/tcp/0/p2p/{PEER}"},
        {"address": "/ip4/10.0.0.9/tcp/22"},
        {"address": str(at("10.0.0.9")) + "/" * MAX_TEXT},
    ],
)
def test_what_is_wrong_is_nothing(changed: dict[str, str]) -> None:
    assert understood(entries(**GOOD)) is not None
    assert understood(entries(**{**GOOD, **changed})) is None


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"run", b"name", b"address", b"address-2", b"other"]),
        st.none()
        | st.binary(max_size=300)
        | st.sampled_from([b"1", RUN.encode(), str(at("10.0.0.9")).encode(), b"/ip4/1.2.3.4/tcp/1"]),
    )
)
def test_whatever_is_said_is_printable_or_nothing(said: dict[bytes, bytes | None]) -> None:
    heard = understood(said)
    if heard is not None:
        assert heard.run == RUN
        assert len(heard.name) <= 32
        assert heard.name.isprintable()
        assert heard.addresses == (at("10.0.0.9"),) * len(heard.addresses)


def test_one_run_is_taken_and_each_of_its_peers_is_asked_before_any_is_asked_twice() -> None:
    crowd = [Notice(RUN, "tiny", (at("10.0.0.1", 100 + n), at("10.0.0.2", 100 + n))) for n in range(6)]
    goal = chosen(crowd)
    assert goal.run == RUN
    assert len(goal.addresses) == MAX_ADDRESSES
    assert goal.addresses[:6] == tuple(one.addresses[0] for one in crowd)


def test_of_several_runs_one_has_to_be_named() -> None:
    both = [Notice(RUN, "tiny", (at("10.0.0.1"),)), Notice(FOREIGN, "", (at("10.0.0.2"),))]
    with pytest.raises(LocalError, match="HP-ADDR-004") as caught:
        chosen(both)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.why == f"tiny (--run {RUN}), one without a name (--run {FOREIGN})"
    assert chosen(both, FOREIGN).addresses == (at("10.0.0.2"),)
    many = [Notice(f"{n:032x}", "x", (at("10.0.0.1"),)) for n in range(MAX_SHOWN + 3)]
    with pytest.raises(LocalError, match="HP-ADDR-004") as caught:
        chosen(many)
    assert caught.value.why.endswith(" and 3 more")


def test_nobody_is_said_in_one_line() -> None:
    with pytest.raises(LocalError, match="HP-NET-016") as caught:
        chosen([])
    assert caught.value.exit_code == ExitCode.NETWORK
    with pytest.raises(LocalError, match="HP-NET-016") as caught:
        chosen([Notice(FOREIGN, "other", (at("10.0.0.2"),))], RUN)
    assert f"in run {RUN}; there are other (--run {FOREIGN})" in caught.value.why
