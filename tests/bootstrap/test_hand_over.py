"""The last holder of a block leaves in good order: its state is stored before it goes."""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.effects import CoordinatorState, Disconnect
from tests.bootstrap.court import Court, kinds, sole_holder

LEAVES = m.Farewell(within_s=6.0)


def unsaved() -> Court:
    """`b` alone holds the second block of version 1, which is not stored; a step runs."""
    court = sole_holder()
    court.commit("a", "b")
    assert court.core.state is CoordinatorState.TRAINING
    assert not court.core.history.stored
    return court


def rolled_back_to(court: Court) -> list[int]:
    return [record["to_version"] for record in court.records if record["kind"] == "rollback"]


def test_the_last_holder_is_released_once_its_state_is_stored() -> None:
    court = unsaved()
    effects = court.tell("b", LEAVES)
    assert court.told("b", effects) == ["save"]
    assert "b" in court.core.members.volunteers
    court.save()
    assert court.sent["b", "released"] == m.Released(safe=True)
    assert "b" not in court.core.members.volunteers
    assert all(version == 1 for version in rolled_back_to(court))
    assert court.core.done == 1


def test_a_step_that_is_committed_meanwhile_is_stored_as_well() -> None:
    court = unsaved()
    court.tell("b", LEAVES)
    court.commit("a", "b")
    assert court.core.state is CoordinatorState.WAITING
    assert court.order.version == 2
    assert ("b", "released") not in court.sent
    court.save()
    assert court.sent["b", "released"].safe
    assert court.core.history.checkpoint_version == court.core.done == 2


def test_a_store_that_takes_too_long_is_not_waited_for() -> None:
    court = unsaved()
    court.tell("b", LEAVES)
    court.tell("b", m.Farewell(within_s=600.0))  # a later word prolongs nothing
    court.tick(5.6)
    assert "b" in court.core.members.volunteers
    court.tick(0.8)
    assert not court.sent["b", "released"].safe
    assert rolled_back_to(court) == [0]


def test_a_failed_save_is_tried_again_at_once() -> None:
    court = unsaved()
    court.tell("b", LEAVES)
    first = court.order
    court.do(court.core.not_saved(first, court.now))
    court.order = None
    court.tick()
    assert court.order is not None
    court.save()
    assert court.sent["b", "released"].safe


@pytest.mark.parametrize("message", [LEAVES, m.Farewell()])
def test_a_volunteer_that_is_not_needed_goes_at_once(message: m.Farewell) -> None:
    court = Court().begin("a", "b")
    court.commit("a", "b")
    effects = court.tell("b", message)
    assert Disconnect("b") in effects
    assert court.told("b", effects) == ([] if message.within_s == 0.0 else ["released"])
    court.tell("a", LEAVES)
    assert "a" in court.core.members.volunteers


def test_of_two_holders_that_leave_the_second_stays_until_all_is_stored() -> None:
    court = Court().begin("a", "b")
    court.commit("a", "b")
    court.tell("b", LEAVES)
    court.tell("a", LEAVES)
    assert sorted(court.core.members.volunteers) == ["a"]
    court.save()
    assert court.sent["a", "released"].safe
    assert all(version == 1 for version in rolled_back_to(court))


def test_a_leaving_volunteer_that_dies_is_lost_like_others() -> None:
    court = unsaved()
    court.tell("b", m.Farewell(within_s=200.0))
    court.do(court.core.broken("b", court.now))
    effects = court.tick(3.0)
    assert kinds(effects)[0] == "gone"
    assert "b" not in court.core.members.volunteers


def test_without_time_left_the_last_holder_is_lost_at_once() -> None:
    court = unsaved()
    court.tell("b", m.Farewell())
    assert rolled_back_to(court) == [0]
