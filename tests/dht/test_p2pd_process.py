from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from hetpeer.dht.base.errors import LocalError
from hetpeer.dht.identity.addresses import EXAMPLE, parse_address
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.p2pd_process import NodeConfig, p2pd_arguments, sockets_folder


@pytest.mark.parametrize("wrong", [{"host": "localhost"}, {"port": 70000}, {"reachability": "private"}])
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalError, match="HP-NET-005"):
        NodeConfig(**wrong)


def test_a_private_node_announces_its_relays_and_a_public_one_relays(tmp_path: Path) -> None:
    identity = Identity.create(tmp_path / "key")
    private = NodeConfig(reachability="private", relays=(parse_address(EXAMPLE),))
    assert {f"-announceAddrs={EXAMPLE}/p2p-circuit", "-forceReachabilityPrivate=1"} < set(
        p2pd_arguments(private, identity, 1, tmp_path)
    )
    public = p2pd_arguments(NodeConfig(host="0.0.0.0", reachability="public"), identity, 31330, tmp_path)
    assert {"-hostAddrs=/ip4/0.0.0.0/tcp/31330", "-forceReachabilityPublic=1", "-natPortMap=1"} < set(public)


def test_a_folder_with_too_long_a_path_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(LocalError, match="HP-NET-003") as caught:
        sockets_folder()
    assert "(TMPDIR) has too long a path" in caught.value.why
    assert list(deep.iterdir()) == []
