"""Fingerprints that a volunteer shows when it is asked: each effect of the core becomes one message."""

from types import SimpleNamespace

from hetpeer.averaging import effects as e
from hetpeer.averaging import messages as m
from hetpeer.peer.training.check_answers import SumProofAnswers
from tests.averaging.rig import LINE, STEP


def test_a_volunteer_testifies_what_it_has_received():
    said = []
    answers = SumProofAnswers(SimpleNamespace(posts=None, schema=None, perform=said.extend))
    mark = m.Mark(block=0, begin=0, end=4, key=b"key of 16 bytes.")
    answers.testify(STEP, e.TestifyParts(m.Testify(line=LINE, step=STEP.number, plan=1, marks=(mark,))))
    assert said == [e.Tell(m.Testimony(line=LINE, step=STEP.number, plan=1, received=()))]
