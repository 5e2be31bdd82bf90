from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.identity.addresses import EXAMPLE, address_from_bytes, parse_address

PEER = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
RELAY = "QmZsazs9sT4ZLVPTSftwyq9MUdQuY7dGHGZovdzWqLAM8A"


@pytest.mark.parametrize(
    "text",
    [
        EXAMPLE,
        f"/ip6/2001:db8::1/tcp/31330/p2p/{PEER}",
        f"/dns4/peer.example.org/tcp/31330/p2p/{PEER}",
        f"/ip4/1.2.3.4/udp/31330/quic-v1/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/31330/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_an_address_keeps_its_text_and_names_the_last_peer(text: str) -> None:
    address = parse_address(f" {text}\n")
    assert str(address) == text
    assert address.peer_id == PEER
    assert f"{address.transport}/p2p/{PEER}" == text
    assert address_from_bytes(address.transport_bytes(), PEER) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not begin with /"),
        ("peer.example.org:31330", "does not begin with /"),
        ("/ip4/1.2.3.4/tcp/31330", "does not end in /p2p/"),
        (f"/ip4/300.1.1.1/tcp/1/p2p/{PEER}", "not IPv4"),
        (f"/ip4/1.2.3.4/tcp/99999/p2p/{PEER}", "not in range"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "port 0"),
        (f"/ip4/1.2.3.4/p2p/{PEER}", "names no port"),
        (f"/ip4/1.2.3.4/tcp/31330/p2p/{PEER[:-5]}", "Invalid"),
        (
            "/ip4/1.2.3.4/tcp/31330/p2p/16Uiu2HAmLhLvBoYaoZfaMUKuibM6ac163GwKY74c5kiSLg5KvLpY",
            "neither Qm nor",
        ),
        (f"/ip4/1.2.3.4/tcp/31330/p2p/{PEER}" * 20, "longer than"),
    ],
)
def test_a_wrong_address_says_what_is_wrong_and_shows_a_right_one(text: str, reason: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_address(text)
    assert (caught.value.code, caught.value.exit_code) == ("HP-ADDR-001", ExitCode.USAGE)
    assert reason in caught.value.why
    assert EXAMPLE in caught.value.fix


@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(st.sampled_from(["ip4", "1.2.3.4", "tcp", "udp", "p2p", PEER, "9", ""])).map("/".join),
    )
)
def test_no_text_gives_another_error(text: str) -> None:
    try:
        address = parse_address(text)
    except LocalError:
        return
    assert parse_address(str(address)) == address


def test_the_command_line_can_import_it_without_any_heavy_library() -> None:
    code = (
        "import sys, hetpeer.dht.identity.addresses, hetpeer.dht.identity;"
        "print([m for m in ('torch', 'hivemind', 'multiaddr', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PYTHONPATH": "."},
        capture_output=True,
        check=True,
        timeout=30,
    )
    assert done.stdout == b"[]\n"
