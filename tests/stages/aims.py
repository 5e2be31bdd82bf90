"""What the links of one pipeline aim at."""

from collections.abc import Sequence

from hetpeer.bootstrap.state.link_targets import link_targets
from hetpeer.bootstrap.state.volunteer_state import VolunteerState


def target_of(links: Sequence[float], computing: Sequence[float], most: float) -> float:
    """One volunteer holds each block; `links` are what the lines from one to the next take uncompressed,
    `computing` what the first ones take. All aim at the same: that.
    """
    ready = []
    for number in range(max(len(links) + 1, len(computing))):
        one = VolunteerState(str(number), 1, 0.0, place=(number, number + 1))
        one.links = {str(number + 1): links[number]} if number < len(links) else {}
        one.computing = computing[number] if number < len(computing) else 0.0
        ready.append(one)
    found = link_targets(ready, most)
    assert max(found.values(), default=0.0) <= min(found.values(), default=0.0) * (1 + 1e-9)
    return max(found.values(), default=0.0)
