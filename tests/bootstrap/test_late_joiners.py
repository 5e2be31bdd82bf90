"""Late joiners: volunteers that enter a step while it runs, in a lost one's place or to share its work."""

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.state.effects import CoordinatorState
from tests.bootstrap.court import Court, kinds, one_each


def test_a_step_waits_for_a_new_holder_while_its_state_can_be_had():
    court = one_each()
    court.sealed("a", (0, 1), blocks=(0, 1))
    effects = court.tell("b", m.Farewell())
    assert (kinds(effects), court.core.state) == (["gone"], CoordinatorState.TRAINING)
    assert court.told("c", court.prepare("c")) == ["fetch"]
    effects = court.ready("c")
    begin = court.sent["c", "begin"]
    assert (begin.entry, set(begin.roster), begin.incarnations) == (1, {"a", "c"}, {"a": 1, "c": 1})
    assert court.told("a", effects) == []  # nobody is told: a peer that needs it hears it from the newcomer
    court.sealed("c", (0, 1), blocks=(1, 2))
    assert court.core.state is CoordinatorState.REDUCING
    assert kinds([*court.vote("a"), *court.vote("c")]) == ["commit"]


def test_a_holder_that_comes_back_with_its_state_goes_on_with_the_step():
    court = one_each()
    court.sealed("b", (0, 1), blocks=(1, 2))
    court.do(court.core.broken("b", court.now))
    assert kinds(court.tick(2.5)) == ["gone"]
    held = (m.Held(block=1, version=2, digest="state 1"),)
    court.hello("b", place=(1, 2), held=held)
    court.ready("b")
    assert court.sent["b", "begin"].entry == 1
    court.sealed("a", (0, 1), blocks=(0, 1))
    # what it had counted was lost with its place in the step
    assert court.core.state is CoordinatorState.TRAINING
    effects = court.sealed("b", (0, 1), blocks=(1, 2))
    assert court.sent["b", "settled"].refused == ()
    assert "plan" in court.told("b", effects)


def test_microbatches_that_begin_at_an_orphaned_block_are_handed_to_the_newcomer():
    court = one_each()
    effects = court.tell("a", m.Farewell())
    assert court.told("b", effects) == ["gone"]
    court.prepare("c")
    effects = court.ready("c")
    assert court.told("c", effects) == ["begin", "reroute"]
    assert [task.id for task in court.sent["c", "reroute"].tasks] == [0, 1]


def test_who_came_in_is_made_known_when_the_step_makes_no_progress():
    court = one_each()
    court.tell("b", m.Farewell())
    court.prepare("c")
    court.ready("c")
    for _ in range(4):
        for peer in ("a", "c"):
            court.tell(peer, m.Heartbeat())
        effects = court.tick(4.0)
    assert court.told("a", effects) == ["joined", "reroute"]
    assert court.sent["a", "joined"].entrants == (m.Entrant(peer="c", incarnation=1, begin=1, end=2),)


def test_an_orphaned_step_is_given_up_for_somebody_who_can_be_spared():
    court = Court(layouts=(((0, 1), (1, 2)),)).begin("a", "b", "c")
    assert court.core.members.volunteers["c"].place == (0, 1)
    court.tell("b", m.Farewell())
    court.tick(4.0)
    assert court.core.state is CoordinatorState.TRAINING
    assert kinds(court.tick(2.0)) == ["rollback"]


def test_a_state_that_differs_does_not_enter_a_step():
    court = one_each()
    court.tell("b", m.Farewell())
    court.prepare("c")
    assert court.told("c", court.ready("c", digest="wrong")) == ["fenced"]


def test_a_newcomer_comes_into_the_running_step_and_gets_its_part():
    court = Court(sizes=(1,) * 40).begin("a")
    court.prepare("b")
    assert court.sent["b", "fetch"].sources == {0: ("a",), 1: ("a",)}
    court.sealed("a", range(10))
    court.ready("b")
    assert (court.sent["b", "begin"].entry, court.sent["b", "begin"].tasks) == (1, ())
    assert [entrant.peer for entrant in court.sent["a", "joined"].entrants] == ["b"]
    mine = court.sent["b", "reroute"].tasks
    assert [task.id for task in mine] == list(range(25, 40))
    assert all((task.route[0].peer, task.attempt) == ("b", 0) for task in mine)
    assert court.sent["a", "reroute"].tasks == mine  # they are not to be begun there
    court.sealed("a", range(10, 25), slot=1)
    court.sealed("b", range(25, 40))
    assert set(court.sent["b", "plan"].covers[0].receivers) == {"a", "b"}


def test_who_is_twice_as_fast_gets_twice_as_much():
    court = Court(sizes=(1,) * 40)
    court.prepare("a", flops_per_second=100.0)
    court.begin_prepared("a")
    court.prepare("b", flops_per_second=200.0)
    court.ready("b")
    assert len(court.sent["b", "reroute"].tasks) == 27


def test_nobody_comes_into_a_step_that_is_being_reduced():
    court = Court().begin("a")
    court.prepare("b")
    court.sealed("a", (0, 1))
    court.ready("b")
    assert ("b", "begin") not in court.sent
    court.vote("a")
    assert court.core.state is CoordinatorState.SYNCING  # it was too late: the next step waits for it
    court.ready("b")
    assert "b" in court.sent["a", "begin"].roster


def test_nobody_fetches_for_the_rest_of_a_step_that_is_almost_done():
    court = Court(sizes=(1,) * 40).begin("a")
    court.prepare("b")
    court.tick(8.0)
    court.ready("b")
    court.sealed("a", range(38), slot=1)
    court.prepare("c")
    assert ("c", "fetch") not in court.sent
    court.sealed("b", (38, 39))
    for peer in "ab":
        court.vote(peer)
    assert court.core.state is CoordinatorState.TRAINING  # a volunteer that can enter later is not waited for
    assert court.sent["c", "fetch"].version == 1
