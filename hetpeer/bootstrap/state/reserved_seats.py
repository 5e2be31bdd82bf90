"""Places that are kept for the volunteers for which a plan names them.

Pure. planned_seats.py says which, and for how long; `Membership` asks here whenever it offers or gives a
place. A seat is a place of a cluster: (cluster, blocks). Docs: planning.md, "A plan that is enacted".
"""

from __future__ import annotations

from collections.abc import Collection

from hetpeer.averaging.messages import Range
from hetpeer.bootstrap.state.volunteer_state import VolunteerState

Seat = tuple[int, Range]


class ReservedSeats:
    """The seats that are kept now.

    >>> seats = ReservedSeats()
    >>> seats.reserve([(0, (0, 2)), (1, (0, 2))])
    >>> seats.clusters
    [0, 1]
    """

    def __init__(self) -> None:
        self._seats: frozenset[Seat] = frozenset()

    def reserve(self, seats: Collection[Seat]) -> None:
        """Keep these seats, and no others, from now on."""
        self._seats = frozenset(seats)

    @property
    def clusters(self) -> list[int]:
        """Cluster of each kept seat, in order."""
        return sorted(cluster for cluster, _ in self._seats)

    def closed_to(self, newcomer: VolunteerState | None) -> frozenset[Seat]:
        """Seats that `newcomer` may not take: those kept for others; None: somebody whom no plan names."""
        return self._seats - {None if newcomer is None else newcomer.planned}

    def rank(self, volunteer: VolunteerState, seat: Seat) -> int:
        """0: its own seat, 1: nobody's, 2: one that is kept for another volunteer."""
        return 0 if seat == volunteer.planned else 2 if seat in self._seats else 1
