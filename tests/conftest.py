"""Which tests run in one process of pytest-xdist, and in which order; what no test is failed for."""

import pytest
from hypothesis import settings

settings.register_profile("hetpeer", deadline=None)  # a busy machine is no bug; pytest bounds the whole test
settings.load_profile("hetpeer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share its fixtures and its traced models, so they run in one process; some files share a group.

    A swarm test shares nothing and mostly waits; so these and the others, which compute, take turns.
    """
    swarms, others = dict[str, int](), dict[str, int]()
    for item in items:
        if not (_is_swarm(item) or item.get_closest_marker("xdist_group")):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
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
