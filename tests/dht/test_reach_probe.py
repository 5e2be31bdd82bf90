"""What p2pd is told, by what others have found, and what a peer says that cannot relay."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetpeer.dht.base.runtime import SystemClock
from hetpeer.dht.identity.addresses import Address, at_socket
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.node.node import Node
from hetpeer.dht.p2pd import p2pd_process as p2pd_config
from hetpeer.dht.p2pd.p2pd_process import NodeConfig
from hetpeer.dht.reach.reach_probe import ReachProbe
from hetpeer.dht.reach.reachability import ReachEstimate, ReachKind

US = "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"
HOME = at_socket("192.168.1.7", 4001, US)
RELAYS = tuple(
    at_socket(f"51.51.51.{i}", 4001, peer)
    for i, peer in enumerate(
        (
            "QmYG4YGDaDq3ihz6Bckyrvjog93qU9PcjBxC3AM3UtPLSK",
            "QmeNvnSXr2Jat1GCWdm8eQHDxBmNgxnUaHeduw8t9wXuKQ",
            "Qma5XXqWbUfpEjPYcACsyQzvJXdfq1xYQRBHWhpiKEmFRA",
        )
    )
)


def told(
    estimate: ReachEstimate, config: NodeConfig, own: tuple[Address, ...] = (HOME,), **how: Any
) -> NodeConfig:
    """What p2pd is told after `config`, where it listens at `own` and others find `estimate`."""
    reaching = ReachProbe(NodeConfig(reachability="ask", relays=RELAYS), US, SystemClock())
    reaching.core.estimate = estimate
    return reaching.adapted(config, SimpleNamespace(addresses=list(own)), **{"served": True, **how})


def test_a_closed_peer_is_announced_at_its_relays_and_at_home() -> None:
    asked = NodeConfig(reachability="ask", relays=RELAYS)
    private = told(ReachEstimate(reach=ReachKind.PRIVATE, peers=2, ip="51.51.51.9", outside=True), asked)
    assert (private.reachability, private.relays, private.announce) == ("private", RELAYS, (HOME,))
    closed = ReachEstimate(reach=ReachKind.PRIVATE, peers=1, ip="51.51.51.9", outside=True)
    assert told(closed, private) == private
    assert told(closed, private, served=False) == private  # no relay that it did not know
    opened = ReachEstimate(reach=ReachKind.PUBLIC, peers=2, ip="192.168.1.7", port=4001)
    assert told(opened, private) == asked
    assert told(ReachEstimate(), private) == private


def test_a_port_that_a_router_forwards_is_announced() -> None:
    asked = NodeConfig(reachability="ask", relays=RELAYS)
    there = at_socket("51.51.51.9", 4002, US)
    estimate = ReachEstimate(
        reach=ReachKind.PUBLIC, peers=2, ip="51.51.51.9", port=4002, outside=True, alike=2
    )
    forwarded = told(estimate, asked)
    assert (forwarded.reachability, forwarded.announce) == ("ask", (there, HOME))
    assert told(estimate, forwarded, (there, HOME)) == forwarded
    assert told(estimate, asked, (there,)) == asked


def test_relays_of_our_user_come_first_and_strangers_are_few() -> None:
    reaching = ReachProbe(NodeConfig(reachability="ask", peers=RELAYS[2:]), US, SystemClock())
    for number in range(9):
        stranger = f"Qm{'abcdefghi'[number] * 44}"
        reaching._note_relay(Address(text=f"/ip4/51.51.52.{number}/tcp/1/p2p/{stranger}", peer_id=stranger))
    reaching._note_relay(at_socket("6.6.6.6", 6, RELAYS[2].peer_id))
    reaching._note_relay(HOME)
    reaching.core.estimate = ReachEstimate(reach=ReachKind.PRIVATE, peers=1, ip="51.51.51.9", outside=True)
    session: Any = SimpleNamespace(addresses=[HOME])
    relays = reaching.adapted(NodeConfig(reachability="ask"), session, served=True).relays
    assert relays[0] == RELAYS[2]
    assert len(relays) == 5


@pytest.mark.swarm
@pytest.mark.xdist_group("dht-network")
async def test_a_reliable_peer_that_cannot_relay_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(p2pd_config, "_RELAY_SERVICE", ("-relayDataLimit=131072",))
    node = await Node.start(NodeConfig(reachability="public"), Identity.create(tmp_path / "key"))
    await node.close()
    assert "this peer relays too little for peers that accept no connections" in caplog.text
