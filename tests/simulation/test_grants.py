"""Histories in which a link has room for one bundle of each kind: nothing waits for itself, whatever dies."""

import dataclasses

import pytest

from hetpeer.peer.transport.uplink import ACTIVATIONS
from tests.amounts import mostly_proof
from tests.simulation.coverage import Coverage
from tests.simulation.granted_links import GrantedLink
from tests.simulation.histories import HistoryOutcome, shape, simulate

SEEDS = range(2000, 2030)


def tight(seed: int) -> HistoryOutcome:
    return simulate(seed, Coverage(), config=dataclasses.replace(shape(seed), granted_frames=1))


@pytest.mark.parametrize("count", mostly_proof([8, len(SEEDS)], [8]))
def test_histories_with_room_for_one_bundle(count):
    for seed in SEEDS[:count]:
        outcome = tight(seed)
        assert outcome.violation is None, outcome


def far_and_near_together(monkeypatch):
    """Activations have one pool, however far they are from the loss."""
    send = GrantedLink.send
    monkeypatch.setattr(
        GrantedLink,
        "send",
        lambda self, frame: send(self, dataclasses.replace(frame, pool=min(frame.pool, ACTIVATIONS))),
    )


def no_nudge(monkeypatch):
    """An activation that is sent again has nothing to say before there is credit for it."""
    monkeypatch.setattr(GrantedLink, "nudge", lambda *_: None)


@pytest.mark.parametrize("mistake", [far_and_near_together, no_nudge])
def test_what_keeps_links_from_waiting_for_themselves_is_needed(mistake, monkeypatch):
    mistake(monkeypatch)
    caught = [
        seed for seed in (29, 35) if (tight(seed).violation or "").startswith("ViolationError: liveness")
    ]
    assert caught, mistake.__doc__
