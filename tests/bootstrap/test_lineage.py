"""The updates and averagings, by the log, that led to the final parameters of a grouped run."""

from hetpeer.bootstrap.log.lineage import lineage


def founded(cluster, version=0):
    return {"kind": "founded", "cluster": cluster, "version": version}


def commit(cluster, step, batch, view=0):
    fields = {"plan": 1, "gradients": {}, "view": view}
    return {"kind": "commit", "cluster": cluster, "step": step, "batch": batch, **fields}


def average(kind, copies, installed):
    fields = {"group": 1, "plan": 1, "sums": {}}
    return {"kind": kind, "clusters": copies, "installed": installed, **fields}


def back(cluster, version, view=1):
    return {"kind": "rollback", "cluster": cluster, "view": view, "to_version": version}


def batches(log):
    return sorted(record["batch"] for record in lineage(log).records if record["kind"] == "commit")


STORED = {"kind": "checkpoint", "cluster": 0, "version": 1}
BOTH = [founded(0), founded(1), commit(0, 0, 0), STORED, commit(1, 0, 1), commit(0, 1, 2)]


def test_what_came_after_the_checkpoint_is_not_in_a_cluster_that_went_back():
    assert batches([*BOTH, back(0, 1)]) == [0, 1]
    assert batches([*BOTH, back(0, 1), commit(0, 1, 3, view=1)]) == [0, 1, 3]


def test_another_cluster_has_what_it_was_given_before_the_roll_back():
    """Cluster 1 has installed the mean of cluster 0's first version 2, and does so before or after that has
    another one.
    """
    at_once = [average("average", [(0, 2), (1, 1)], [(1, 1)]), back(0, 1), commit(0, 1, 3, view=1)]
    assert batches([*BOTH, *at_once]) == [0, 1, 2, 3]
    later = [average("average", [(0, 2), (1, 1)], []), back(0, 1), commit(0, 1, 3, view=1)]
    assert batches([*BOTH, *later, average("installed", [(0, 2), (1, 1)], [(1, 1)])]) == [0, 1, 2, 3]
    assert batches([*BOTH, *at_once, {"kind": "dissolved", "cluster": 1}]) == [0, 3]


def test_steps_begun_anew_from_the_same_version_change_nothing():
    assert batches([*BOTH, back(0, 2), commit(0, 2, 3, view=1)]) == [0, 1, 2, 3]
