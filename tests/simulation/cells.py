"""Cells of the protocol's state machines that no history can reach, each with its reason.

tests/simulation/test_histories.py fails for a cell that is neither reached nor listed, and for a listed one
that is.
"""

from hetpeer.averaging.member.member_life import Phase
from hetpeer.bootstrap.state.effects import CoordinatorState
from tests.simulation.coverage import MEMBER_MESSAGES

_OVER = "after Finished or Rejected the driver ends, and with it the core"
_FIRST_ANSWER = "only the answer to the first Hello, whose run and wire version never change"
_ONE_CLAIM = "the answer to a claim, made once per session while JOINING; a later one is not answered"

IMPOSSIBLE_COORDINATOR: dict[tuple[str, str], str] = {}

IMPOSSIBLE_MEMBER: dict[tuple[str, str], str] = {
    **{("stopped", kind): _OVER for kind in MEMBER_MESSAGES},
    **{
        (phase.value, "rejected"): _FIRST_ANSWER
        for phase in Phase
        if phase.value not in ("joining", "stopped")
    },
    **{(phase.value, "refused"): _ONE_CLAIM for phase in Phase if phase.value not in ("joining", "stopped")},
}

STEERED_COORDINATOR = {
    ("waiting", "farewell"),
    ("reducing", "farewell"),
    ("reducing", "resumed"),
    ("reducing", "not_saved"),
    ("finished", "farewell"),
    ("finished", "objection"),
    ("finished", "saved"),
    ("finished", "not_saved"),
    *((state.value, "paced") for state in CoordinatorState),
    *((state.value, "tried") for state in CoordinatorState),
    *(
        (state.value, kind)
        for state in CoordinatorState
        for kind in ("checked", "compared", "shown", "proved", "testimony")
    ),
}
"""Possible, but too rare in random histories, or said by the daemon alone:
tests/bootstrap/test_{coordinator,step}.py drive them by hand. Spot checks have histories of their own
(test_spotchecks.py), and so have samples that cannot be computed (test_bad_samples.py).
"""

_PAST = ("joined", "reroute", "gone", "settled", "evict", "plan", "commit", "save")

STEERED_MEMBER = {
    *(
        (phase.value, kind)
        for phase in Phase
        if phase is not Phase.STOPPED
        for kind in ("check", "show", "prove", "testify")
    ),
    *(("joining", kind) for kind in (*_PAST, "begin", "fenced", "finished")),
    *(("preparing", kind) for kind in (*_PAST, "welcome", "granted", "rolled_back", "fenced", "finished")),
    *(("syncing", kind) for kind in ("granted", "joined", "evict", "commit", "save")),
    *(("ready", kind) for kind in ("granted", "evict", "fenced", "finished")),
    *(("training", kind) for kind in ("granted", "begin", "evict", "save", "fenced")),
    *(("reducing", kind) for kind in ("granted", "begin", "evict", "save", "fenced", "finished")),
    *(("applying", kind) for kind in MEMBER_MESSAGES if kind not in ("begin", "rejected", "refused")),
}
"""The same for members, whose phases often last milliseconds: tests/averaging/test_member.py drives every
message in every phase by hand.
"""
