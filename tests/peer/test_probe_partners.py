"""Who is probed, with how many bytes, what it costs others, and for how long a line is kept."""

import math
from pathlib import Path

from hetpeer.dht.discovery import LEFT, Advert
from hetpeer.peer.daemon.measured_line import keep_traffic, line_text
from hetpeer.peer.probing.kept_line import FRESH_S, KeptLine, network_of
from hetpeer.peer.probing.line_estimate import LineRate
from hetpeer.peer.probing.line_probe import BYTES, ProbedLine
from hetpeer.peer.probing.probe_allowance import PER_PEER, PERIOD_S, ProbeAllowance
from hetpeer.peer.probing.probe_partners import METERED, RELIABLE, VOLUNTEERS, partners, probe_bytes
from hetpeer.peer.process.home import Home

NOW = 1.8e9
PEER = "QmXhZcB1yzVSZT5gPConbbjWqZNy3wmut4xD3AEYHCWoAU"
HERE = network_of(["192.168.1.7", "2001:db8:1:2:aaaa::1"])
FOUND = ProbedLine(
    uplink=LineRate(rate=2.5e6, error=0.04),
    downlink=LineRate(rate=12.5e6, error=0.1),
    trips={"a": 0.03, "b": 0.02},
    nbytes=3_000_000,
)


def test_an_allowance_is_shared_by_peers_and_networks() -> None:
    allowance = ProbeAllowance(40_000_000)
    first = allowance.grant("a", "net", 4_000_000, 0.0)
    assert first.nbytes == 4_000_000
    assert allowance.grant("a", "net", 4_000_000, 1.0).nbytes == 4_000_000
    assert allowance.grant("a", "net", 4_000_000, 2.0).nbytes == 0, f"more than {PER_PEER}"
    assert allowance.grant("b", "net", 4_000_000, 3.0).nbytes == 0, "a quarter is that network's"
    allowance.ended(first, 1_000_000)
    assert allowance.grant("b", "net", 4_000_000, 4.0).nbytes == 4_000_000, "what was not used is given back"
    granted = sum(allowance.grant(f"p{n}", f"net{n}", 4_000_000, 5.0).nbytes for n in range(20))
    assert granted <= 40_000_000 - 9_000_000, "keys are cheap, so the total counts"
    assert allowance.grant("c", "", 4_000_000, 6.0).nbytes == 0
    assert allowance.grant("a", "net", 4_000_000, PERIOD_S + 5.0).nbytes == 4_000_000


def volunteer(place: str = "", **fields: object) -> Advert:
    return Advert(**{"role": "volunteer", "addresses": (place,) if place else ()} | fields)


def test_reliable_peers_and_some_volunteers_are_probed() -> None:
    adverts = {f"v{n}": volunteer() for n in range(9)}
    adverts |= {"gone": volunteer(state=LEFT), "closed": volunteer(reach="private")}
    reliable = [f"r{n}" for n in range(5)]
    chosen = partners("me", reliable, adverts | {"me": volunteer()})
    assert len(chosen) == RELIABLE + VOLUNTEERS
    assert set(chosen[:RELIABLE]) <= set(reliable)
    assert set(chosen[RELIABLE:]) <= {f"v{n}" for n in range(9)}
    every = {peer for own in range(60) for peer in partners(f"newcomer {own}", reliable, adverts)}
    assert every == {*reliable, *(f"v{n}" for n in range(9))}, "not all newcomers choose the same"
    assert partners("r0", ["r0"], {}) == []


def test_neighbours_are_left_out_if_there_is_anybody_far_away() -> None:
    home, far = (f"/ip4/{ip}/tcp/1/p2p/{PEER}" for ip in ("192.168.1.9", "8.8.8.8"))
    near = {"near": volunteer(home), "odd": volunteer("/nonsense")}
    assert partners("me", ["server"], near) == ["server", *sorted(near, key=partners("me", [], near).index)]
    assert partners("me", [], near | {"far": volunteer(far)}) == ["far"]
    server = Advert(role="coordinator", addresses=(home,))
    assert partners("me", ["server"], {"server": server, "far": volunteer(far)}) == ["far"]
    assert partners("me", ["server"], {"far": volunteer(far)}) == ["server", "far"], (
        "nobody knows where it is"
    )


def test_a_metered_line_is_probed_with_less() -> None:
    assert probe_bytes(BYTES, math.inf, 1e12) == BYTES
    assert probe_bytes(BYTES, 300e9, 0) == BYTES // METERED
    assert probe_bytes(BYTES, 300e9, 299.9e9) == 100_000
    assert probe_bytes(BYTES, 300e9, 301e9) == 0


def test_a_line_is_kept_for_a_day_in_its_network(tmp_path: Path) -> None:
    assert not KeptLine.load(tmp_path).is_fresh(NOW, HERE)
    KeptLine().probed(FOUND, NOW, HERE).save(tmp_path)
    kept = KeptLine.load(tmp_path)
    assert (kept.uplink, kept.downlink, kept.trip_s) == (2.5e6, 12.5e6, 0.02)
    assert (tmp_path / "line.json").stat().st_mode & 0o077 == 0
    assert kept.is_fresh(NOW + FRESH_S - 1, network_of(["2001:db8:1:2:bbbb::9", "192.168.1.7"]))
    assert not kept.is_fresh(NOW + FRESH_S, HERE), "too old"
    assert not kept.is_fresh(NOW - 1, HERE), "the clock was put back"
    assert not kept.is_fresh(NOW, network_of(["10.0.0.7"])), "another network"
    for damaged in ("", "{", '{"uplink": "fast"}', '{"uplink": -1}', '{"downlink": NaN}'):
        (tmp_path / "line.json").write_text(damaged)
        assert KeptLine.load(tmp_path) == KeptLine()
    KeptLine(uplink=1.0).save(tmp_path / "nowhere")


def test_a_probe_that_found_half_is_made_again_and_forgets_nothing() -> None:
    kept = KeptLine().probed(FOUND, NOW, HERE)
    half = kept.probed(ProbedLine(downlink=LineRate(rate=1e6)), NOW + 9, HERE)
    assert (half.uplink, half.downlink, half.trip_s) == (2.5e6, 1e6, 0.02)
    assert not half.is_fresh(NOW + 10, HERE)
    elsewhere = kept.probed(ProbedLine(), NOW + 9, network_of(["10.0.0.7"]))
    assert (elsewhere.uplink, elsewhere.downlink) == (0.0, 0.0), "the other network's line is not this one's"


def test_traffic_wins_over_a_probe(tmp_path: Path) -> None:
    kept = KeptLine().probed(FOUND, NOW, HERE)
    assert kept.seen(0.0, NOW) == kept
    near = kept.seen(2.2e6, NOW + 60)
    assert (near.uplink, near.uplink_error) == (2.2e6, 0.0)
    assert near.is_fresh(NOW + 60, HERE)
    slow = kept.seen(0.5e6, NOW + 60)
    assert not slow.is_fresh(NOW + 60, HERE), "what else the probe found is not believed either"
    again = slow.probed(FOUND, NOW + 120, HERE)
    assert (again.uplink, again.downlink) == (0.5e6, 12.5e6)
    assert again.is_fresh(NOW + 121, HERE)
    later = slow.probed(FOUND, NOW + 60 + FRESH_S, HERE)
    assert later.uplink == 2.5e6, "traffic of long ago tells no more than a probe of now"
    keep_traffic(Home(tmp_path), 3e6)
    keep_traffic(Home(tmp_path), 0.0)  # a life in which nothing was measured
    assert KeptLine.load(tmp_path).uplink == 3e6


def test_the_owner_is_told_what_was_found() -> None:
    told = line_text(KeptLine().probed(FOUND, NOW, HERE), 3 << 20)
    assert told == (
        "measured the line with 3 MiB: 20.0 Mbit/s up (± 4%), 100.0 Mbit/s down (± 10%),"
        " 20 ms to the nearest peer and back"
    )
    assert "could not be measured" in line_text(KeptLine(), 0)
