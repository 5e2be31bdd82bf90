"""Every decoder of bytes that come from outside, by package and name: from the network, the compute worker
and files of others.
"""

from __future__ import annotations

from importlib import import_module

from tests.fuzz.target import Target

ROOMS = ("dht", "averaging", "bootstrap", "stages", "peer")
"""Each has a module of its own, as some load torch."""


def room(name: str) -> dict[str, Target]:
    """The targets of one package."""
    targets = import_module(f"tests.fuzz.of_{name}").TARGETS
    return {f"{name}/{target}": one for target, one in targets.items()}


def every() -> dict[str, Target]:
    """All of them."""
    return {target: one for name in ROOMS for target, one in room(name).items()}
