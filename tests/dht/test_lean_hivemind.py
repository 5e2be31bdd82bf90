import subprocess
import sys
from pathlib import Path

import pytest

from tests.amounts import mostly_proof

ROOT = Path(__file__).parents[2]


def printed(code: str) -> str:
    """By a fresh interpreter."""
    path = {"PYTHONPATH": str(ROOT), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=path
    )
    return result.stdout.strip()


def test_daemons_start_without_torch():
    """It takes longer to import than all else together, and more memory; no daemon needs it."""
    modules = (
        "hetpeer.dht.kademlia.network_session, hetpeer.dht.kademlia.records, hivemind.dht.node, "
        "hivemind.proto.dht_pb2, hetpeer.peer.daemon.volunteer_life, hetpeer.peer.web.daemon_web, "
        "hetpeer.peer.reliable.reliable_peer"
    )
    heavy = "{'torch', 'scipy', 'hivemind.optim', 'hivemind.averaging'}"
    assert printed(f"import sys, {modules}\nprint({heavy} & set(sys.modules) or 'none')") == "none"


@pytest.mark.parametrize(
    "name",
    mostly_proof(["hivemind.Optimizer", "hivemind.dht.DHT", "hivemind.utils.MPFuture"], ["hivemind.dht.DHT"]),
)
def test_who_asks_for_more_gets_it_and_what_there_is_not_is_not_made_up(name):
    package, _, attribute = name.rpartition(".")
    there = "hasattr(hivemind.utils, 'nothing'), hasattr(hivemind.utils, 'timed')"
    first, then = printed(
        f"import hetpeer.dht, hivemind.utils\nprint({there})\nimport {package}\nprint({name})"
    ).splitlines()
    assert first == "False False"
    assert attribute in then


def test_what_is_imported_already_stays_as_it_is():
    code = """
import hivemind
before = hivemind.DHT
import hetpeer.dht.kademlia.network_session
from hivemind.dht import DHT
print(DHT is before)
"""
    assert printed(code) == "True"
