"""Clusters that are late or compute nothing: others wait for them for a limited time, and willing volunteers
stay (docs/grouped.md).
"""

import pytest

from hetpeer.averaging import messages as m
from hetpeer.bootstrap.grouped.cluster import STALLS
from hetpeer.bootstrap.grouped.cluster_list import MAX_SYNC_FACTOR
from hetpeer.bootstrap.state.effects import CollectCheckpoint, CoordinatorState
from tests.bootstrap.clustered import FIRST, LAST, WHOLE, Waiting
from tests.bootstrap.court import BLOCKS


def commit(cluster=0, step=0, batch=0):
    return {
        "kind": "commit",
        "term": 1,
        "view": 0,
        "cluster": cluster,
        "step": step,
        "batch": batch,
        "plan": 1,
        "loss": 1.0,
        "norm": 1.0,
        "coefficient": 1.0,
        "gradients": {0: "x", 1: "y"},
        "counted": [],
        "seconds": 1.0,
        "workers": 1,
    }


def training(**more):
    """Cluster 0 of two volunteers, with its first step under way."""
    one = Waiting(**more).comes("a", "b")
    one.fetched(0, a=FIRST, b=LAST)
    return one


def test_a_grouped_run_says_that_it_trains_while_any_cluster_does():
    one = Waiting().comes("a", "b")
    assert one.core.state is CoordinatorState.WAITING
    one.fetched(0, a=FIRST, b=LAST)
    assert one.core.state is CoordinatorState.TRAINING
    one.comes("c")
    assert one.core.state is CoordinatorState.TRAINING
    averages = both_train(steps=2).core
    assert all(cluster.at_rest for cluster in averages.clusters)
    assert averages.state is CoordinatorState.TRAINING


def test_a_cluster_that_needs_longer_for_its_parameters_is_given_longer():
    """Twice as long each time.

    Otherwise a fetch that takes longer than the first timeout would begin again and again.
    """
    one = Waiting().comes("a", "b")
    waited = []
    for _ in range(6):
        waited.append(one.until_dissolved("a", "b"))
        one.again("a", "b")
        founded = len(one.founded)
        while len(one.founded) == founded:  # they rest
            one.passes(1.0, "a", "b")
    assert [round(later / waited[0]) for later in waited] == [1, 2, 4, 8, MAX_SYNC_FACTOR, MAX_SYNC_FACTOR]
    assert {record["why"] for record in one.of("dissolved")} == {
        "the holders of its blocks did not come in time"
    }


@pytest.mark.parametrize(("fresh_steps", "begun"), [(0, (1, 1)), (1, (1, 1)), (2, (0, 0))])
def test_a_cluster_trains_the_first_batches_one_after_the_other(fresh_steps, begun):
    run = Waiting(layout=(WHOLE,), staleness=1, fresh_steps=fresh_steps, averaging_interval=9).comes("a")
    run.fetched(0, a=WHOLE)
    begin = run.sent["a", "begin"]
    assert (begin.step, begin.behind) == begun


def test_a_cluster_in_which_nothing_is_computed_gives_its_batch_to_others():
    """All are heard, but one computes nothing: the others' averagings and the run's end would wait for it."""
    one = training()
    one.passes(1200.0, "a", "b")
    (gone,) = one.of("dissolved")
    assert gone["why"] == "nothing was computed for too long"
    assert [lost["batch"] for lost in gone["given_up"]] == [0]
    assert 15.0 * (2**STALLS - 1) < 1200.0


def test_who_was_there_rests_and_others_may_take_the_place():
    one = training()
    one.until_dissolved("a", "b")
    one.again("a", "b")
    one.passes(1.0, "a", "b")
    assert len(one.founded) == 1, "they rest"
    one.comes("c", "d")
    assert len(one.founded) == 2, "others come at once, and have their places"
    assert one.core.clusters.of("c") is one.core.clusters.of("d") is not None
    one.fetched(one.founded[-1]["cluster"], c=FIRST, d=LAST)
    one.again("a", "b")
    one.passes(200.0, *"abcd")
    assert len(one.founded) == 3, "who has rested may try again"


def test_those_who_rest_do_not_take_each_others_places():
    one = training()
    one.until_dissolved("a", "b")
    one.again("a", "b")
    there = one.core.clusters.of("a")
    one.passes(5.0, "a", "b")
    assert one.core.clusters.of("a") is one.core.clusters.of("b") is there
    one.hello("c")
    one.core.clusters._failures.rest(["c"], 100.0, one.now)
    one.claims("c")
    assert one.core.clusters.of("c") is not there


def test_who_does_not_fetch_in_time_rests():
    one = Waiting().comes("a", "b")
    one.fetched(0, a=FIRST)
    one.until_dissolved("a", "b")
    one.again("a", "b")
    one.passes(1.0, "a", "b")
    assert len(one.founded) == 1
    one.comes("c")
    assert len(one.founded) == 2, "somebody else has its place"
    assert one.core.clusters.of("c") is one.core.clusters.of("a")


def test_who_was_not_there_after_a_failover_was_not_late_for_a_founding():
    one = Waiting([*training().records, commit()])
    one.passes(30.0)
    assert one.of("dissolved")
    assert one.core.clusters.sync_factor == 1


def test_a_cluster_that_has_trained_for_long_is_not_late_for_its_founding():
    """A volunteer is lost when its lease runs out; later clusters get no longer time for that."""
    one = training()
    one.passes(200.0, *"ab")
    assert one.core.clusters.living[0].whole
    one.passes(22.0, "b")
    assert one.of("dissolved")
    assert one.core.clusters.sync_factor == 1


def test_holders_have_their_time_to_come_back_however_long_the_coordinator_slept():
    before = training()
    one = Waiting([*before.records, commit()])
    one.passes(1.0)
    one.now += 20.0
    one.do(one.core.tick(one.now))
    assert not one.of("dissolved")
    one.passes(20.0)
    assert one.of("dissolved")


def test_a_coordinator_that_slept_says_so_once():
    one = training()
    one.comes("c", "d")
    one.core.clusters._failures.rest(["x"], 100.0, one.now)
    one.passes(1.0, *"abcd")
    one.now += 3600.0
    one.do(one.core.tick(one.now))
    one.passes(110.0, *"abcd")
    assert "x" not in one.core.clusters._failures.resting


def test_who_never_gets_ready_does_not_hold_the_others_up():
    one = Waiting().comes("a")
    one.hello("slow")
    assert one.claims("slow") == (0, *LAST)
    one.passes(700.0, "a", "slow")
    assert not one.founded
    one.comes("c")
    assert [record["cluster"] for record in one.founded] == [0]
    assert one.core.clusters.of("c") is one.core.clusters.of("a")
    assert one.core.clusters.of("slow") is None
    assert one.claims("slow") == (1, *FIRST), "it may wait for others in the next one"


def test_a_small_machine_is_offered_a_place_that_fits_it():
    one = Waiting(memory=(2, 3))
    one.hello("one", memory_bytes=2)
    assert one.claims("one", 2) == (0, *FIRST)
    one.hello("other", memory_bytes=2)
    assert one.claims("other", 2) == (1, *FIRST)
    one.hello("large", memory_bytes=9)
    assert one.claims("large", 9) == (0, *LAST), "it completes a cluster, rather than to begin one"


def test_a_cut_goes_with_those_for_whom_it_was_made():
    one = Waiting(memory=(2, 3))
    one.hello("big")
    one.claims("big")
    one.form([("big", WHOLE)])
    one.tell("big", m.Farewell())
    one.hello("small", memory_bytes=2)
    assert one.claims("small", 2) == (0, *FIRST)


def goes_on():
    """The same cluster after a commit, whose state nobody has stored, with its next step under way."""
    one = Waiting([*training().records, commit()])
    for peer, blocks in (("a", FIRST), ("b", LAST)):
        held = tuple(m.Held(block=b, version=1, digest=f"state {b}") for b in range(*blocks))
        one.hello(peer, cluster=0, place=blocks, held=held)
        assert one.sent[peer, "welcome"].member
    one.fetched(0, 1, a=FIRST, b=LAST)
    return one


def test_a_stranger_does_not_take_the_place_of_who_comes_back():
    """After a change of coordinator a waiting volunteer is there before the holders of the place."""
    one = Waiting([*training().records, commit()])
    one.hello("stranger")
    assert one.claims("stranger") == (1, *FIRST)
    for peer, blocks in (("a", FIRST), ("b", LAST)):
        held = tuple(m.Held(block=b, version=1, digest=f"state {b}") for b in range(*blocks))
        one.hello(peer, cluster=0, place=blocks, held=held)
        assert one.sent[peer, "welcome"].member
    one.fetched(0, 1, a=FIRST, b=LAST)
    one.passes(30.0, "a", "b", "stranger")
    assert not one.of("dissolved")


def test_a_claim_on_a_place_of_a_cluster_that_trains_is_refused():
    one = Waiting([*training().records, commit()])
    one.hello("stranger")
    one.tell("stranger", m.Claim(cluster=0, begin=FIRST[0], end=FIRST[1]))
    assert one.core.clusters.of("stranger") is None


def test_nobody_is_lost_of_any_cluster_while_our_own_line_is_cut():
    one = training()
    one.passes(5.0, "a", "b")
    one.core.renewed(one.now)
    one.passes(14.0)
    assert not one.of("gone")
    one.passes(3.0)
    assert {record["peer"] for record in one.of("gone")} == {"a", "b"}


@pytest.mark.parametrize("how", ["farewell", "lease"])
def test_the_log_says_why_it_went_back_and_what_it_gave_up(how):
    """To version 0. When nobody comes for the block, it falls apart, and nothing more is lost."""
    one = goes_on()
    if how == "farewell":
        one.tell("b", m.Farewell())
        why = f"no holder is left of block {LAST[0]}"
    else:
        one.passes(19.0, "a")
        assert not one.of("rollback"), "it may come back"
        one.passes(4.0, "a")
        why = "the holders of its blocks did not come in time"
    (back,) = one.of("rollback")
    assert (back["why"], back.get("cluster", 0), back["to_version"]) == (why, 0, 0)
    assert [lost["batch"] for lost in back["given_up"]] == [1]
    assert one.sent["a", "rolled_back"].version == 0
    one.until_dissolved("a", within_s=60.0)
    (gone,) = one.of("dissolved")
    assert "given_up" not in gone


def test_it_goes_on_from_its_checkpoint_with_whoever_comes_and_trains_the_batch_again():
    one = goes_on()
    one.tell("b", m.Farewell())
    one.tell("a", m.Prepared())
    one.comes("c")
    one.passes(1.0, "a", "c")
    one.claims("c")
    assert one.core.clusters.of("c") is one.core.clusters[0]
    one.tell("c", m.Prepared())
    assert (one.sent["a", "fetch"].version, one.sent["c", "fetch"].version) == (0, 0)
    one.fetched(0, 0, a=FIRST, c=LAST)
    begin = one.sent["a", "begin"]
    assert (begin.line.view, begin.step, begin.batch) == (1, 0, 0)
    assert not one.of("dissolved")


def two_clusters(*more):
    """After a failover: each has trained a batch, and cluster 0 has stored it (`more` followed)."""
    stored = {"kind": "checkpoint", "version": 1, "blocks": ["state 0", "state 1"]}
    both = [{"kind": "founded", "cluster": number, "version": 0} for number in (0, 1)]
    log = [{"kind": "reign", "term": 1}, *both, commit(), commit(1, batch=1), stored, *more]
    one = Waiting(log, averaging_interval=9)
    for number, peers in enumerate(("ab", "cd")):
        version = one.core.clusters[number].history.version
        for peer, blocks in zip(peers, (FIRST, LAST), strict=True):
            held = tuple(m.Held(block=b, version=version, digest=f"{number} {b}") for b in range(*blocks))
            one.hello(peer, cluster=number, place=blocks, held=held)
            line = one.core.clusters[number].line
            one.tell(peer, m.Ready(line=line, version=version, held=held))
    return one


def test_beside_others_it_goes_back_if_nobody_else_has_what_is_in_its_checkpoint():
    one = two_clusters(commit(0, step=1, batch=2))
    one.tell("b", m.Farewell())
    assert [(back.get("cluster", 0), back["to_version"]) for back in one.of("rollback")] == [(0, 1)]
    assert not one.of("dissolved")


def test_a_cluster_whose_checkpoint_another_one_has_dissolves():
    """A new one begins with the other's newer parameters, and nothing more is lost."""
    mean = {"kind": "average", "term": 1, "group": 1, "plan": 1, "clusters": [[0, 1], [1, 1]], "sums": {}}
    one = two_clusters(mean | {"installed": [[0, 1], [1, 1]], "held": []}, commit(0, step=2, batch=2))
    one.tell("b", m.Farewell())
    assert not one.of("rollback")
    assert [gone["cluster"] for gone in one.of("dissolved")] == [0]


def test_a_cluster_that_has_stored_nothing_since_another_one_did_dissolves():
    one = two_clusters(commit(0, step=1, batch=2))
    one.tell("d", m.Farewell())
    assert not one.of("rollback")
    assert [gone["cluster"] for gone in one.of("dissolved")] == [1]


def test_a_holder_that_comes_back_without_its_state_is_not_awaited():
    one = goes_on()
    one.passes(15.0, "a")
    assert one.of("gone")
    one.hello("b")
    one.passes(1.0, "a", "b")
    assert one.of("rollback")


def test_a_volunteer_that_waits_is_offered_the_place_that_nobody_has_if_its_state_is_stored():
    one = training().comes("c")
    one.tell("b", m.Farewell())
    one.passes(1.0, "a", "c")
    assert [(p.cluster, p.begin) for p in one.sent["c", "welcome"].places] == [(0, LAST[0])]
    one.claims("c")
    assert one.sent["c", "granted"].line == one.core.clusters[0].line
    one.tell("c", m.Prepared())
    assert one.sent["c", "fetch"].origin == 0
    one.passes(40.0, "a", "c")
    assert not one.of("dissolved")


def test_a_volunteer_that_waits_long_enough_becomes_a_replica():
    one = goes_on().comes("c")
    one.passes(39.0, *"abc")
    assert one.core.waiting == {"c": (1, FIRST)}
    one.passes(2.0, *"abc")
    assert {(p.cluster, p.begin, p.open) for p in one.sent["c", "welcome"].places} == {
        (0, FIRST[0], True), (0, LAST[0], True),
    }  # fmt: skip
    one.claims("c")
    assert one.core.clusters.of("c") is one.core.clusters[0]


def test_a_replica_takes_no_checkpoint_of_another_cluster():
    """Of a version with the same number."""
    stored = {"kind": "checkpoint", "version": 1, "blocks": ["state 0", "state 1"]}
    both = [{"kind": "founded", "cluster": number, "version": 0} for number in (0, 1)]
    one = Waiting([{"kind": "reign", "term": 1}, *both, commit(), commit(1, batch=1), stored])
    for peer, blocks in (("a", FIRST), ("b", LAST)):
        held = tuple(m.Held(block=b, version=1, digest=f"other {b}") for b in range(*blocks))
        one.hello(peer, cluster=1, place=blocks, held=held)
        line = one.core.clusters[1].line
        one.tell(peer, m.Ready(line=line, version=1, held=held))
    one.comes("c")
    one.passes(41.0, *"abc")
    one.claims("c")
    one.tell("c", m.Prepared())
    order = one.sent["c", "fetch"]
    begin, end = one.core.clusters.of("c").members.volunteers["c"].place
    assert (order.version, order.origin) == (1, 1)
    assert order.digests == {block: f"other {block}" for block in range(begin, end)}


def test_a_holder_that_came_after_the_averaging_began_has_no_part_in_the_mean():
    one = Waiting([*training().records, commit()])
    for peer, blocks in (("a", FIRST), ("late", FIRST), ("b", LAST)):
        held = tuple(m.Held(block=b, version=1, digest=f"state {b}") for b in range(*blocks))
        one.hello(peer, cluster=0, place=blocks, held=held)
        one.fetched(0, 1, **{peer: blocks})
    cluster = one.core.clusters[0]
    assert cluster.members.roster().keys() == {"a", "late", "b"}
    mean = {
        "kind": "average",
        "term": 2,
        "group": 1,
        "plan": 1,
        "clusters": [(0, 1)],
        "sums": {0: "x", 1: "y"},
    }
    one.do([one.core.clusters.log(**mean, seconds=1.0, installed=[(0, 1)], held=[])])
    one.do(cluster.installs(["a", "b"], one.now))
    assert (one.sent["a", "commit"].group, one.sent["a", "commit"].step) == (1, 1)
    assert ("b", "commit") in one.sent
    assert ("late", "commit") not in one.sent
    assert cluster.members.roster().keys() == {"a", "b"}


def both_train(**more):
    """Clusters 0 and 1, of a and b, and of c and d, with one batch each."""
    both = [{"kind": "founded", "cluster": number, "version": 0} for number in (0, 1)]
    one = Waiting([{"kind": "reign", "term": 1}, *both, commit(), commit(1, batch=1)], **more)
    for number, peers in enumerate(("ab", "cd")):
        line = one.core.clusters[number].line
        for peer, blocks in zip(peers, (FIRST, LAST), strict=True):
            held = tuple(m.Held(block=b, version=1, digest=f"state {number}") for b in range(*blocks))
            one.hello(peer, cluster=number, place=blocks, held=held)
            one.tell(peer, m.Ready(line=line, version=1, held=held))
    return one


def test_one_cluster_at_a_time_stores_a_checkpoint():
    """Collecting another one would end the first without a word."""
    one = both_train()
    assert one.core.clusters.saver is one.core.clusters[1]
    stores, other = (one.core.clusters[number].coordinator.machine.checkpoints for number in (1, 0))
    other.soon()
    assert stores.under_way
    assert other.begin() == other.begin(wanted=True) == []
    order = CollectCheckpoint(one.core.clusters[1].line, 1, {0: "c", 1: "d"})
    for block in range(BLOCKS):
        one.do(one.core.saved(order, block, "state 1", one.now))
    one.passes(5.0, *"abcd")
    assert [record["cluster"] for record in one.of("checkpoint")] == [1]
    assert isinstance(other.begin()[0], CollectCheckpoint)


def test_a_holder_that_came_after_the_averaging_began_has_no_vote_on_it():
    one = both_train(steps=2)
    one.hello("late", cluster=0, place=FIRST)

    def votes(peer, digest):
        plan = one.sent["a", "plan"]
        cluster = one.core.clusters.of(peer)
        number, _ = cluster.members.volunteers[peer].place
        about = {"line": cluster.line, "step": 1, "group": plan.group, "plan": plan.plan}
        block = m.BlockVote(block=number, digest=digest, finite=True, squared_norm=1.0)
        one.tell(peer, m.Vote(**about, blocks=(block,)))

    votes("late", "another sum")
    for peer in "abcd":
        assert not one.of("average")
        votes(peer, "sum")
    assert one.of("average")[0]["sums"] == {0: "sum", 1: "sum"}


def test_with_too_little_memory_for_a_replica_it_goes_on_waiting():
    one = Waiting(memory=(2, 3))
    one.hello("big")
    one.claims("big")
    one.form([("big", WHOLE)])
    one.tell("big", m.Prepared())
    one.fetched(0, big=WHOLE)
    one.hello("small", memory_bytes=2)
    one.claims("small", 2)
    one.passes(60.0, "big", "small")
    assert one.core.waiting == {"small": (1, FIRST)}


def test_a_replica_comes_to_one_that_waits_if_they_can_be_a_cluster():
    one = goes_on().comes("c")
    one.passes(41.0, *"abc")
    one.claims("c")
    one.tell("c", m.Prepared())
    one.comes("d")
    one.passes(41.0, *"abcd")
    members = one.core.clusters.of("d").members.volunteers
    assert members.keys() == {"c", "d"}
    assert sorted(v.place for v in members.values()) == [FIRST, LAST]
    assert one.sent["c", "granted"].line == one.core.clusters.of("d").line
    assert not [record for record in one.of("gone") if record["peer"] == "c"]


def test_who_was_fenced_of_one_cluster_is_known_in_the_next():
    one = Waiting().comes("a", "b").comes("c", "d")
    first, second = one.core.clusters[0].context.disputed_pairs, one.core.clusters[1].context.disputed_pairs
    for _ in range(3):
        first.fenced("liar", shunned=True)
    assert second.is_done_with("liar")
    assert one.core.clusters[0].context.norm_outliers is one.core.clusters[1].context.norm_outliers
