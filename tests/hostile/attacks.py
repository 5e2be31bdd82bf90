"""The attacks of SECURITY.md that a live swarm is put through, and which of them is under way: a file says
so, which hostile processes look at.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HOSTILE_ATTACK"
"""In the environment of hostile processes: the path of the file with the name of the attack that is under
way; empty: none.
"""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Attack:
    """`row` of SECURITY.md. `volunteers`: by those who take part, who are changed; else by a stranger."""

    row: int
    name: str
    volunteers: bool
    lead_s: float = 5.0
    """So long it goes on before it is measured."""


NOTHING = Attack(0, "nothing", volunteers=True)
"""Three more who do as they should: what their processes cost where all share one machine."""

ATTACKS = (
    Attack(2, "nan", volunteers=True),
    Attack(2, "nan in a sum", volunteers=True),
    Attack(3, "huge", volunteers=True),
    Attack(3, "nonsense", volunteers=False),
    Attack(4, "replay", volunteers=True),
    Attack(4, "reports", volunteers=True),
    Attack(4, "early", volunteers=False),
    Attack(5, "hoard", volunteers=True, lead_s=150.0),
    Attack(6, "identities", volunteers=False),
    Attack(7, "poison", volunteers=False),
    Attack(8, "eclipse", volunteers=False),
    Attack(9, "drip", volunteers=False),
    Attack(10, "bomb", volunteers=True),
    Attack(12, "paths", volunteers=False),
    Attack(15, "names", volunteers=False),
    Attack(17, "sessions", volunteers=False),
    Attack(17, "evidence", volunteers=True),
)

WITHOUT_HELLO = Attack(17, "ten without a Hello", volunteers=False)
WITH_HELLO = Attack(17, "ten with a Hello", volunteers=False)
"""Ten attackers at once (ten_attackers.py), measured by benchmarks/besieged.py."""


class AttackSwitch:
    """A file in `folder` that says which attack is under way; processes that are started later know it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "attack"
        os.environ[VARIABLE] = str(self._path)
        self.say("")

    def say(self, name: str) -> None:
        """Have `name` under way from now on; empty: none."""
        self._path.write_text(name)


class UnderWay:
    """What the file at `path` says, looked at now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = float("-inf")
        self._name = ""

    @classmethod
    def told(cls) -> UnderWay:
        """The file that the environment names."""
        return cls(Path(os.environ[VARIABLE]))

    def __call__(self) -> str:
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._name = self._path.read_text() if self._path.exists() else ""
        return self._name
