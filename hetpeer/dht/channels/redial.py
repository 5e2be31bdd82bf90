"""Pauses between two tries to reach a peer, and a bound on the wait for a peer that is away.

Pure. A coordinator that was away must wait longer for its volunteers than their longest pause between two
tries. So both sides take their numbers from here: `channel_server.dial` and the sessions of volunteers try
again by them, and `longest_absence_s` is what a coordinator waits for at least.
"""

from __future__ import annotations

REDIAL_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between two tries to open a stream; the last value repeats."""
TRY_S = 5.0
"""Seconds that one try may take, from the dial to the answer to our hello."""
RENEWAL_S = 0.2
"""Seconds between two sessions: a coordinator that forgets us again and again is not asked in a hot loop."""
REACH_TIMEOUT_S = 3.0
"""Seconds to reach a reliable peer before the next one is tried; no limit if it is the only one."""
LONGEST_PAUSE_S = TRY_S + REDIAL_S[-1]
"""Seconds from the beginning of a try that fails to the beginning of the next one, at most."""
SPARE_S = 9.0
"""Reserve for the session itself: handshakes, slow lines, a busy machine."""


def pause_s(attempt: int) -> float:
    """Seconds before the next try after `attempt` failed ones in a row, counted from 0."""
    return REDIAL_S[min(attempt, len(REDIAL_S) - 1)]


def longest_absence_s(reliable_peers: int) -> float:
    """Seconds within which each volunteer has a session with a coordinator that can be reached.

    At worst it has just begun to try another of `reliable_peers`, and tries all of them before.
    """
    turn_s = REACH_TIMEOUT_S + LONGEST_PAUSE_S + RENEWAL_S
    return (reliable_peers - 1) * turn_s + LONGEST_PAUSE_S + SPARE_S
