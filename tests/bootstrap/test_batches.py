"""Which batch is in whose parameters."""

import random

import pytest

from hetpeer.bootstrap.audit.log_checks import out_of_order
from hetpeer.bootstrap.log.batches import BatchLineage
from hetpeer.bootstrap.log.history import decisions_of


def founded(cluster, version=0):
    return {"kind": "founded", "cluster": cluster, "version": version}


def commit(cluster, step, batch):
    return {"kind": "commit", "cluster": cluster, "step": step, "batch": batch}


def average(*copies, installed=None):
    """Of clusters at these versions, which install the mean at once unless `installed` says otherwise."""
    steps = list(copies if installed is None else installed)
    return {"kind": "average", "group": 1, "clusters": list(copies), "installed": steps}


def install(cluster, step):
    return {"kind": "installed", "group": 1, "installed": [(cluster, step)]}


def books(*records, count=6):
    batches = BatchLineage(count)
    for record in records:
        batches.add(record)
    return batches


def test_each_batch_is_handed_out_once():
    batches = books(founded(0), founded(1), count=3)
    assert [batches.take(0), batches.take(1)] == [0, 1]
    batches.add(commit(0, 0, 0))
    assert batches.take(0) == 2
    batches.add(commit(0, 1, 2))
    assert batches.take(0) is None
    assert not batches.exhausted
    batches.add(commit(1, 0, 1))
    assert batches.exhausted


def test_what_was_only_in_a_cluster_that_fell_apart_is_trained_again():
    batches = books(founded(0), founded(1), count=4)
    batches.take(0), batches.take(1)
    batches.add(commit(1, 0, 1))
    assert batches.take(1) == 2
    batches.add({"kind": "dissolved", "cluster": 1})
    batches.add(commit(0, 0, 0))
    assert [batches.take(0), batches.take(0), batches.take(0)] == [1, 2, 3]


def test_a_cluster_that_begins_anew_hands_its_batches_back():
    batches = books(founded(0), founded(1), count=4)
    assert [batches.take(0), batches.take(0), batches.take(1)] == [0, 1, 2]
    batches.add({"kind": "rollback", "cluster": 0, "view": 1, "to_version": 0})
    assert [batches.take(0), batches.take(1)] == [0, 1]


def back(cluster, version, view=1):
    return {"kind": "rollback", "cluster": cluster, "view": view, "to_version": version, "term": 1}


def test_a_cluster_that_goes_back_to_its_checkpoint_loses_what_came_since():
    """Cluster 1 has, or is promised, all of it. When that promise is void, too, batch 2 is trained again."""
    stored = {"kind": "checkpoint", "cluster": 0, "version": 1}
    log = [founded(0), founded(1), commit(0, 0, 0), stored, commit(1, 0, 1), average((0, 1), (1, 1))]
    batches = books(*log, commit(0, 2, 2), commit(1, 2, 3), count=4)
    batches.add({**average((0, 3), (1, 3), installed=[]), "group": 2})
    assert batches.exhausted
    batches.add(back(0, 1))
    assert (batches.inside(0).keys(), batches.inside(1).keys()) == ({0}, {0, 1, 2, 3})
    assert batches.exhausted
    batches.add(back(1, 3))
    assert batches.inside(1).keys() == {0, 1, 3}
    assert batches.are_saved_elsewhere(0)
    assert [batches.take(0), batches.take(1)] == [2, None]


def test_the_only_cluster_is_at_its_checkpoint_once_it_has_gone_back():
    batches = books(founded(0), commit(0, 0, 0), {"kind": "checkpoint", "cluster": 0, "version": 1}, count=3)
    batches.add(commit(0, 1, 1))
    assert batches.take(0) == 2
    batches.add(back(0, 1))
    assert (batches.unsaved, batches.commits(), batches.known) == (0, {1}, 1)
    assert [batches.take(0), batches.take(0)] == [1, 2]


def test_a_cluster_goes_back_to_a_checkpoint_of_its_own_only():
    reign, other = {"kind": "reign", "term": 1}, {"kind": "checkpoint", "cluster": 2, "version": 1}
    trained = [{"term": 1, "view": 0, **commit(c, s, 2 * s + c)} for s in range(2) for c in (1, 2)]
    log = [reign, founded(1), founded(2), *trained, other]
    assert not list(out_of_order([*log, back(2, 1)]))
    assert [rule for _, rule in out_of_order([*log, back(1, 1)])] == ["I5"]
    assert not list(
        out_of_order([*log, founded(3, 1), {"term": 1, "view": 0, **commit(3, 1, 5)}, back(3, 1)])
    )


def test_each_cluster_has_views_of_its_own():
    told = {"kind": "rollback", "cluster": 2, "view": 1, "to_version": 1, "term": 1}
    reign = {"kind": "reign", "term": 1}
    first = {"term": 1, "view": 0, **commit(1, 0, 0)}, {"term": 1, "view": 0, **commit(2, 0, 1)}
    later = {"term": 1, "view": 1, **commit(2, 1, 2)}, {"term": 1, "view": 0, **commit(1, 1, 3)}
    log = [reign, founded(1), founded(2), *first, told, *later]
    assert not list(out_of_order(log))
    assert [rule for _, rule in out_of_order([*log, {"term": 1, "view": 0, **commit(2, 2, 4)}])] == ["F6"]
    both = {**average((1, 2), (2, 2)), "plan": 1, "sums": {}, "views": [(2, 1)]}
    assert [one.view for one in decisions_of(both)] == [0, 1]


def test_what_was_averaged_lives_on_in_the_others():
    batches = books(
        founded(0), founded(1), commit(0, 0, 0), commit(1, 0, 1), average((0, 1), (1, 1)), count=2
    )
    batches.add({"kind": "dissolved", "cluster": 0})
    assert batches.exhausted
    assert batches.inside(1).keys() == {0, 1}


def test_a_cluster_may_fall_apart_when_clusters_that_stay_have_all_of_it():
    book = books(founded(0), founded(1), founded(2), commit(0, 0, 0))
    assert not book.are_elsewhere(0, {0})
    assert book.are_elsewhere(1, {1})  # it has trained nothing
    book.add(average((0, 1), (1, 0), installed=[]))
    assert not book.are_elsewhere(0, {0}), "the mean is only promised"
    book.add(install(1, 0))
    assert book.are_elsewhere(0, {0})
    assert not book.are_elsewhere(0, {0, 1}), "cluster 1 leaves, too"
    assert not book.are_elsewhere(2, {0, 1, 2}), "nobody stays"
    assert book.take(2) == 1
    assert not book.are_elsewhere(2, {2}), "a batch is being trained"


def test_what_is_decided_and_not_installed_is_nobody_elses_to_train():
    both = founded(0), founded(1), commit(0, 0, 0), commit(1, 0, 1)
    batches = books(*both, average((0, 1), (1, 1), installed=()), count=3)
    batches.add({"kind": "dissolved", "cluster": 0})
    assert batches.take(1) == 2, "batch 0 comes in with the mean"
    batches.add(commit(1, 1, 2))
    assert batches.exhausted
    batches.add(install(1, 2))
    assert batches.exhausted


def test_a_copy_has_what_was_in_when_it_was_taken():
    batches = books(founded(0), founded(1), commit(0, 0, 0), commit(0, 1, 1), commit(1, 0, 2))
    batches.add(average((0, 1), (1, 1), installed=((1, 1),)))
    assert batches.inside(1).keys() == {0, 2}
    assert batches.inside(0).keys() == {0, 1, 2}, "as promised"


def test_a_checkpoint_has_nothing_of_what_is_only_promised():
    batches = books(founded(0), founded(1), commit(0, 0, 0), commit(1, 0, 1))
    batches.add(average((0, 1), (1, 1), installed=()))
    batches.add({"kind": "checkpoint", "cluster": 0, "version": 1})
    batches.add(founded(2, version=1))
    assert batches.inside(2).keys() == {0}


def test_a_promise_is_void_when_the_coordinator_dies():
    batches = books(founded(0), founded(1), commit(0, 0, 0), commit(1, 0, 1), count=2)
    batches.add(average((0, 1), (1, 1), installed=()))
    batches.add({"kind": "dissolved", "cluster": 0})
    assert batches.exhausted
    batches.add({"kind": "reign", "term": 2})
    assert not batches.exhausted
    assert batches.take(1) == 0


def test_a_new_cluster_has_what_is_in_the_checkpoint_as_it_was_at_its_version():
    checkpoint = {"kind": "checkpoint", "cluster": 0, "version": 1}
    batches = books(founded(0), commit(0, 0, 0), commit(0, 1, 1), checkpoint, founded(1, version=1))
    assert batches.inside(1).keys() == {0}
    assert batches.inside(0).keys() == {0, 1}


def test_nobody_begins_from_a_checkpoint_whose_batches_are_trained_again():
    batches = books(
        founded(0), founded(1), commit(0, 0, 0), commit(1, 0, 1), {"kind": "checkpoint", "version": 1}
    )
    assert batches.compatible
    batches.add({"kind": "dissolved", "cluster": 0})
    assert batches.compatible
    assert batches.take(1) == 0
    assert not batches.compatible, "somebody is about to train it again"
    batches.add(commit(1, 1, 0))
    assert not batches.compatible, "somebody has"
    batches.add({"kind": "checkpoint", "cluster": 1, "version": 2})
    assert batches.compatible


def test_a_log_that_is_read_again_leaves_open_what_nobody_committed():
    batches = books(founded(0), founded(1), commit(0, 0, 3), commit(1, 0, 1), count=5)
    assert [batches.take(0) for _ in range(4)] == [0, 2, 4, None]


@pytest.mark.parametrize("seed", range(20))
def test_all_batches_come_in_whatever_falls_apart(seed):
    """Against sets: a batch is trained only when it is in nobody, and in the end all are in."""
    choose, batches, inside, versions = random.Random(seed), BatchLineage(30), {}, {}
    stored, training, next_cluster = (0, frozenset()), {}, 0
    promised = {}
    for _ in range(2000):
        match choose.randrange(7):
            case 0 if len(inside) < 4 and batches.compatible:
                batches.add(founded(next_cluster, stored[0]))
                inside[next_cluster], versions[next_cluster] = set(stored[1]), stored[0]
                next_cluster += 1
            case 1 if inside and choose.random() < 0.2:
                fallen = choose.choice(list(inside))
                batches.add({"kind": "dissolved", "cluster": fallen})
                del inside[fallen]
                training.pop(fallen, None)
                promised.pop(fallen, None)
            case 2 if len(inside) > 1:
                group = choose.sample(list(inside), 2)
                if not promised.keys() & set(group):
                    promised |= dict.fromkeys(group, inside[group[0]] | inside[group[1]])
                    ready = [c for c in group if c not in training]
                    steps = [(c, versions[c]) for c in ready]
                    batches.add(average(*((c, versions[c]) for c in group), installed=steps))
                    for c in ready:
                        versions[c] += 1
                        inside[c] = inside[c] | promised.pop(c)
            case 4 if promised.keys() - training.keys():
                ready = choose.choice(sorted(promised.keys() - training.keys()))
                batches.add(install(ready, versions[ready]))
                versions[ready] += 1
                inside[ready] = inside[ready] | promised.pop(ready)
            case 5 if choose.random() < 0.1:
                batches.add({"kind": "reign", "term": 2})
                for cluster, batch in training.items():
                    batches.add(commit(cluster, versions[cluster], batch))
                    inside[cluster].add(batch)
                    versions[cluster] += 1
                training.clear()
                promised.clear()
            case 3 if inside:
                saver = choose.choice(list(inside))
                batches.add({"kind": "checkpoint", "cluster": saver, "version": versions[saver]})
                stored = (versions[saver], frozenset(inside[saver]))
            case _:
                for cluster, known in inside.items():
                    if cluster in training:
                        batches.add(commit(cluster, versions[cluster], training[cluster]))
                        known.add(training.pop(cluster))
                        versions[cluster] += 1
                    elif (batch := batches.take(cluster)) is not None:
                        assert all(batch not in known for known in (*inside.values(), *promised.values()))
                        assert batch not in training.values()
                        training[cluster] = batch
        assert all(batches.inside(c).keys() == inside[c] | promised.get(c, set()) for c in inside)
        everywhere = set().union(*inside.values(), *promised.values())
        assert batches.exhausted == (len(everywhere) == 30 and not training)
        if batches.exhausted:
            return
    raise AssertionError("it does not end")
