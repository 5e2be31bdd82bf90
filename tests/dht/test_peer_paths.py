"""Which way leads to whom, by p2pd's list of connections."""

from hetpeer.dht.reach.reachability import PeerPath, PeerPaths

R = "QmRelay"
THROUGH = f"/ip4/51.51.51.1/tcp/4001/p2p/{R}/p2p-circuit"
DIRECT = "/ip4/51.51.51.2/tcp/4001"


def test_a_direct_connection_counts_more_than_a_relayed_one() -> None:
    paths = PeerPaths()
    assert not paths.update([("a", THROUGH), ("b", DIRECT), (R, DIRECT)])
    assert (paths.of("a"), paths.of("b"), paths.of("c")) == (PeerPath(relay=R), PeerPath(), None)
    assert (paths.relayed, paths.through(R)) == (["a"], ["a"])
    for both in ([("a", DIRECT), ("a", THROUGH)], [("a", THROUGH), ("a", DIRECT)]):
        paths.update([("a", THROUGH)])
        assert str(paths.of("a")) == f"through {R[-8:]}"
        assert paths.update(both) == ["a"]
        assert str(paths.of("a")) == "direct"
    assert not paths.update([("a", DIRECT)])
    assert not paths.update([])
    assert paths.of("a") is None
    assert not paths.update([("a", DIRECT), ("b", "")])
