"""Which tests run in one process of pytest-xdist, and in which order; what no test is failed for."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from hetpeer.bootstrap.audit import grouped_replay, segment_replay
from tests.amounts import EXAMPLES, PROOF_PROFILE, SHARE
from tests.reference import reference_run
from tests.swarm.forkserver import ForkServer

# No deadline: a busy machine is no bug, and pytest bounds the whole test.
settings.register_profile(PROOF_PROFILE, deadline=None, max_examples=EXAMPLES)
settings.register_profile("hetpeer", deadline=None, max_examples=EXAMPLES // SHARE)
settings.load_profile("hetpeer")
# A p2pd of a test lives for seconds: a quarter of its processor time went into collecting garbage.
os.environ.setdefault("GOGC", "off")
os.environ.setdefault("GOMEMLIMIT", "128MiB")
ALONE = "mark.alone"
LONG = {
    "zoo",
    "models",
    "dht-network",
    "nat",
    "trained run",
    "test_any_model",
    "test_daemon",
    "test_data_source",
}
LONG |= {"test_earlier_versions", "test_reliable", "test_spotchecks"}
LONG |= {"test_demo_command", "test_fetching", "test_leftovers", "test_overlap", "test_simulate_command"}
LONG |= {"test_chaos", "test_doc_commands", "test_grid", "test_histories", "test_mutants", "test_versions"}
"""Files and groups with what takes a minute or more: begun first, as what is begun last keeps one process
busy and the others idle.
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Server that has imported torch and hetpeer, and forks processes for tests."""
    server = ForkServer(tmp_path_factory.mktemp("statuses"))
    yield server
    server.close()


@pytest.fixture
def forked_replay(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute replays in forks of the server."""
    for module in (reference_run, segment_replay, grouped_replay):
        monkeypatch.setattr(module, "run_child", server.run_child)


def pytest_runtest_setup() -> None:
    """A test that takes random numbers gets the same ones each time, alone or after others."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m alone` imports only the files that have such tests: importing the others takes half a minute."""
    if not config.option.markexpr.startswith("alone") or collection_path.suffix != ".py":
        return None
    return True if ALONE not in collection_path.read_text() else None


def pytest_collection() -> None:
    """Keep the garbage collector off what stays for the whole run: the modules and the tests themselves."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on it collects, but for what there is already: looking through that costs a second.

    And more rarely than usual: torch, imported by a test, is looked through as well, a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(5000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share its fixtures and its traced models, so they run in one process; some files
    share a group.

    A swarm test shares nothing and mostly waits; so these and the others, which compute, take turns.
    """
    swarms, others = dict[str, int](), dict[str, int]()
    for item in items:
        if item.get_closest_marker("alone") and ALONE not in item.path.read_text():
            raise pytest.UsageError(
                f"{item.nodeid}: its file has to say {ALONE}, or `-m alone` does not find it"
            )
        if not (_is_swarm(item) or item.get_closest_marker("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    for item in sorted(items, key=lambda item: not {item.path.stem, _scope(item)} & LONG):
        kind = swarms if _is_swarm(item) else others
        kind.setdefault(_scope(item), len(kind))
    turn = {scope: number / len(kind) for kind in (swarms, others) for scope, number in kind.items()}
    items.sort(key=lambda item: turn[_scope(item)])


def _is_swarm(item: pytest.Item) -> bool:
    return item.get_closest_marker("swarm") is not None


def _scope(item: pytest.Item) -> str:
    """What pytest-xdist gives to one process."""
    group = item.get_closest_marker("xdist_group")
    return group.args[0] if group else item.nodeid
