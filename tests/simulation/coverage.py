"""Which cells of the protocol's state machines the simulated histories have reached."""

from __future__ import annotations

import typing
from collections import Counter
from dataclasses import dataclass, field
from itertools import product

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.state.effects import CoordinatorState

Cell = tuple[str, str]
"""(state, event), by their names."""


def _kinds(union: object) -> list[str]:
    return [message.model_fields["kind"].default for message in typing.get_args(union)]


COORDINATOR_EVENTS = [
    *(kind for kind in _kinds(m.FromVolunteer) if kind != "event"),
    "broken",
    "resumed",
    "saved",
    "not_saved",
    "tried",
    "arrange",
    "tick",
]
"""`event` messages are for the driver and never reach the core."""
MEMBER_MESSAGES = [
    kind for kind in _kinds(m.FromCoordinator) if kind not in ("heartbeat", "kept", "amended", "released")
]
"""Heartbeats from the coordinator never reach the core either: the driver's channel watches for silence.

`kept`, `amended` and `released` are for the driver, too.
"""


@dataclass(slots=True)
class Coverage:
    """How often each cell of the coordinator and of the members was reached."""

    coordinator: Counter[Cell] = field(default_factory=Counter)
    member: Counter[Cell] = field(default_factory=Counter)

    def unreached_coordinator(self) -> set[Cell]:
        cells = product((state.value for state in CoordinatorState), COORDINATOR_EVENTS)
        return set(cells) - set(self.coordinator)

    def unreached_member(self) -> set[Cell]:
        cells = product((phase.value for phase in Phase), MEMBER_MESSAGES)
        return set(cells) - set(self.member)
