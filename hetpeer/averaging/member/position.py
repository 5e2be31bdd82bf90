"""Where a volunteer stands in a run: its term-view, its place, and the version of the state that its worker
holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpeer.averaging import messages as m


@dataclass(slots=True)
class Position:
    """Written by member.py alone; tensors are fenced against it (early_tensors.py)."""

    line: m.TermView = field(default_factory=lambda: m.TermView(term=0, view=0))
    place: m.Range | None = None
    """Blocks [begin, end) that the volunteer holds."""
    version: int | None = None
    """Version of the state in the worker; None while there is none that can be trusted."""
    digests: dict[int, str] = field(default_factory=dict)
    """Block → digest of its state at `version`."""
    group: tuple[int, int] = (0, 0)
    """Term and number of the last group that the volunteer averaged with."""

    def distrust(self) -> None:
        """What the worker holds is not, or will not stay, the state of one known version."""
        self.version, self.digests = None, {}

    def held(self) -> tuple[m.Held, ...]:
        """The states that the volunteer vouches for, as messages name them; () if there is no version."""
        if self.version is None:
            return ()
        version = self.version
        return tuple(m.Held(block=b, version=version, digest=d) for b, d in sorted(self.digests.items()))
