"""What a home remembers of runs: bounded, private, and never in the way when it is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.discovery import Advert
from hetpeer.dht.identity.addresses import Address, at_socket
from hetpeer.peer.arrival.destinations import (
    FILE,
    MAX_PLACES,
    MAX_RUNS,
    MAX_SEEN,
    Destination,
    back_to,
    known_run,
    remember,
    remember_seen,
)
from hetpeer.peer.arrival.find_run import acquaintances
from hetpeer.peer.cli.options import joined_by

PEERS = [
    "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC",
    "QmZsazs9sT4ZLVPTSftwyq9MUdQuY7dGHGZovdzWqLAM8A",
    "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",
]
RUN, OTHER = "3f" * 16, "a0" * 16


def place(port: int, peer: str = PEERS[0], ip: str = "8.8.8.8") -> Address:
    return at_socket(ip, port, peer)


def advert(*addresses: Address, role: str = "volunteer", reach: str = "unknown") -> Advert:
    return Advert(addresses=tuple(map(str, addresses)), role=role, reach=reach)


def test_nothing_is_known_at_first(tmp_path: Path) -> None:
    assert known_run(tmp_path, Destination((place(1),), RUN)) is None
    with pytest.raises(LocalError) as caught:
        back_to(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("HP-ADDR-002", ExitCode.USAGE)


def test_a_run_is_found_again_by_its_id_or_where_it_was_found(tmp_path: Path) -> None:
    remember(tmp_path, RUN, [place(1), place(2)])
    remember(tmp_path, OTHER, [place(2)])
    assert back_to(tmp_path) == Destination((place(2),), OTHER)
    assert back_to(tmp_path, RUN).addresses == (place(1), place(2))
    for goal, run in (
        (Destination((), RUN), RUN),
        (Destination((place(1),)), RUN),
        (Destination((place(2),)), OTHER),  # where two were, the last one is meant
        (Destination((place(2),), RUN), RUN),
    ):
        known = known_run(tmp_path, goal)
        assert known is not None
        assert known.run == run
    assert known_run(tmp_path, Destination((place(1),), "00" * 16)) is None
    with pytest.raises(LocalError, match="HP-ADDR-002"):
        back_to(tmp_path, "00" * 16)


def test_who_was_seen_is_kept_after_who_is_there_and_outlives_a_new_start(tmp_path: Path) -> None:
    remember_seen(tmp_path, RUN, [place(9)])
    assert not (tmp_path / FILE).exists()  # of a run that was never joined nothing is kept
    remember(tmp_path, RUN, [place(1)])
    remember_seen(tmp_path, RUN, [place(2, PEERS[1])])
    remember_seen(tmp_path, RUN, [place(3, PEERS[2]), place(4, PEERS[2])])
    remember_seen(tmp_path, RUN, [])
    seen = (place(3, PEERS[2]), place(4, PEERS[2]), place(2, PEERS[1]))
    assert back_to(tmp_path).addresses == (place(1), *seen)
    remember_seen(tmp_path, RUN, [place(5, PEERS[1])])  # it has moved
    remember(tmp_path, RUN, [place(7)])
    assert back_to(tmp_path).addresses == (place(7), place(5, PEERS[1]), *seen[:2])


def test_who_goes_back_without_a_name_has_named_nothing(tmp_path: Path) -> None:
    remember(tmp_path, RUN, [place(1)])
    remember_seen(tmp_path, RUN, [place(2, PEERS[1])])
    remember(tmp_path, OTHER, [place(3)])
    goal = joined_by([], tmp_path, RUN)
    assert goal == Destination((), RUN)
    remember(tmp_path, RUN, goal.addresses)
    known = known_run(tmp_path, goal)
    assert known is not None
    assert (known.named, known.seen) == ((str(place(1)),), (str(place(2, PEERS[1])),))
    assert joined_by([], tmp_path) == Destination((), RUN)
    assert joined_by([str(place(4))], tmp_path, RUN) == Destination((place(4),), RUN)


def test_the_file_is_private_and_bounded(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        for number in range(3 * MAX_RUNS):
            remember(tmp_path, f"{number:032x}", [place(port) for port in range(1, 40)])
            for begin in range(1, 100, 20):
                remember_seen(tmp_path, f"{number:032x}", [place(begin + port) for port in range(20)])
    finally:
        os.umask(old)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    runs = json.loads((tmp_path / FILE).read_text())["runs"]
    assert [run["run"] for run in runs] == [f"{3 * MAX_RUNS - 1 - n:032x}" for n in range(MAX_RUNS)]
    assert max(len(run["seen"]) for run in runs) == MAX_SEEN * MAX_PLACES
    assert list(tmp_path.iterdir()) == [tmp_path / FILE]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60), cut=st.integers(0, 200), at=st.integers(0, 200))
def test_a_damaged_file_counts_as_none_and_is_replaced(
    tmp_path: Path, content: bytes, cut: int, at: int
) -> None:
    (tmp_path / FILE).unlink(missing_ok=True)
    remember(tmp_path, RUN, [place(1)])
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (content, whole[: min(cut, len(whole) - 1)], whole[:at] + content + whole[at + 1 :]):
        (tmp_path / FILE).write_bytes(damaged)
        known_run(tmp_path, Destination((place(1),), RUN))  # some damage is another sound file
        remember(tmp_path, OTHER, [place(2)])
        assert back_to(tmp_path) == Destination((place(2),), OTHER)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"runs": [{"run": "x", "named": []}]}',
        json.dumps({"runs": [{"run": RUN, "named": ["/ip4/1.2.3.4/tcp/1"]}]}),
        json.dumps({"runs": [{"run": RUN, "named": [str(place(1))], "seen": ["\u001b[31m"]}]}),
        json.dumps({"runs": [{"run": RUN, "named": [str(place(p)) for p in range(1, 99)]}]}),
        " " * (1 << 20) + "{}",
    ],
)
def test_what_is_out_of_bounds_counts_as_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert known_run(tmp_path, Destination((place(1),), RUN)) is None


def test_whom_to_remember() -> None:
    reliable, public, shy = PEERS
    adverts = {
        shy: advert(place(1, shy, "127.0.0.1"), place(2, shy, "10.0.0.1")),
        public: advert(place(3, public), place(4, public), place(5, public), reach="public"),
        reliable: advert(place(6, reliable), place(7, shy), role="reliable"),
    }
    assert acquaintances(adverts, [reliable]) == [
        place(6, reliable),  # what it says of others does not count
        place(3, public),
        place(4, public),
        place(2, shy, "10.0.0.1"),
    ]
    nonsense = Advert(addresses=("/nonsense", "/ip4/8.8.8.8/tcp/0/p2p/" + shy), role="coordinator")
    assert acquaintances({shy: nonsense}, []) == []
