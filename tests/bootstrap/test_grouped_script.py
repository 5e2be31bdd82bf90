"""The script of one machine for a grouped run, read from its log and the volunteers' lines."""

from typing import Any

from hetpeer.bootstrap.audit.grouped_script import GroupedScript
from hetpeer.bootstrap.log.evidence import Evidence
from hetpeer.bootstrap.log.history import Means
from tests.bootstrap.test_replay import line

HASH = "0" * 64


def founded(cluster: int, version: int = 0) -> dict[str, Any]:
    return {"kind": "founded", "cluster": cluster, "version": version}


def commit(cluster: int, step: int, batch: int, behind: int = 0) -> dict[str, Any]:
    fields = {"term": 1, "view": 0, "plan": 1, "loss": 1.0, "norm": 1.0, "coefficient": 1.0}
    names = {"cluster": cluster, "step": step, "batch": batch, "behind": behind}
    return {"kind": "commit", **fields, **names, "gradients": {"0": HASH}}


def average(kind: str, group: int, clusters: dict[int, int], installed: dict[int, int]) -> dict[str, Any]:
    """`clusters`: cluster → version of its copy; `installed`: cluster → its step."""
    pairs = {"clusters": [*map(list, clusters.items())], "installed": [*map(list, installed.items())]}
    return {"kind": kind, "term": 1, "group": group, "plan": 1, "sums": {"0": HASH}, **pairs}


CHECKPOINT = {"kind": "checkpoint", "cluster": 1, "version": 2}
LOG = [
    founded(0),
    founded(1),
    commit(0, 0, 0),
    commit(1, 0, 1),
    commit(0, 1, 2, behind=1),
    average("average", 1, {0: 1, 1: 1}, {1: 1}),
    average("installed", 1, {0: 1, 1: 1}, {0: 2}),
    commit(1, 2, 3),
    CHECKPOINT,
    {"kind": "evaluation", "cluster": 1, "step": 2, "batch": 3, "loss": 0.5},
    {"kind": "dissolved", "cluster": 0},
    founded(2, version=2),
    commit(2, 2, 4),
]
"""Two clusters average their versions 1; cluster 0 trains on meanwhile. A third begins with cluster 1's."""
BATCHES = [(record["cluster"], record["step"]) for record in LOG if record["kind"] == "commit"]
MEANS = [(1, 1), (0, 2)]


def lines(*without: tuple[int, int]) -> Evidence:
    """Signed lines of all updates but `without`; the mean was added from cluster 1 on."""
    evidence = Evidence()
    for cluster, step in (*BATCHES, *MEANS):
        mean = {"cover": [["b", [1]], ["a", [0]]], "group": 1}
        how = mean if (cluster, step) in MEANS else {"runs": [[2, 1], [1]]}
        event = line(cluster=cluster, step=step, **how)
        if (cluster, step) not in without:
            evidence.applied[event.key].append(event)
    return evidence


def told(script: GroupedScript) -> list[tuple[Any, ...]]:
    """The tasks in order, without numbers to compare."""
    names = ("cluster", "step", "version", "group")
    return [(task["do"], *(task[name] for name in names if name in task)) for task in script.tasks]


def test_clusters_are_computed_in_the_order_of_the_log() -> None:
    script = GroupedScript.of(LOG, lines(), 1)
    assert told(script) == [
        ("begin", 0),
        ("begin", 1),
        ("train", 0, 0),
        ("copy", 0, 1),
        ("train", 1, 0),
        ("copy", 1, 1),
        ("train", 0, 1),
        ("average", 1),
        ("install", 1, 1),
        ("evaluate", 1, 2),
        ("keep", 1, 2),
        ("install", 0, 1),
        ("train", 1, 2),
        ("end", 0),
        ("begin", 2),
        ("train", 2, 2),
    ]
    assert script.steps == len(BATCHES) + len(MEANS)
    begun = [task["base"] for task in script.tasks if task["do"] == "begin"]
    assert begun == [None, None, (1, 0, 2)]
    (mean,) = (task for task in script.tasks if task["do"] == "average")
    assert mean["orders"] == [[(1, 0, 1), (0, 0, 1)]], "as it was signed, of the versions that were copied"
    assert [task["of"] for task in script.tasks if task["do"] == "install"] == [2, 2]


def test_versions_are_kept_as_long_as_a_stale_step_needs_them() -> None:
    tasks = GroupedScript.of(LOG, lines(), 1).tasks
    oldest = {(task["cluster"], task["step"]): task["oldest"] for task in tasks if task["do"] == "train"}
    assert oldest == {(0, 0): 0, (0, 1): 2, (1, 0): 1, (1, 2): 3, (2, 2): 3}


def test_what_nobody_signed_is_left_out_with_all_that_needs_it() -> None:
    script = GroupedScript.of(LOG, lines((1, 0)), 1)
    assert told(script) == [
        ("begin", 0),
        ("begin", 1),
        ("train", 0, 0),
        ("copy", 0, 1),
        ("train", 0, 1),
        ("end", 0),
    ]


def test_a_mean_that_one_cluster_has_signed_is_installed_there() -> None:
    script = GroupedScript.of(LOG, lines((0, 2)), 1)
    assert ("install", 0, 1) not in told(script)
    assert ("install", 1, 1) in told(script)
    assert script.steps == len(BATCHES) + 1


def test_a_mean_that_has_a_stranger_in_it_is_not_computed() -> None:
    evidence = lines()
    for step in MEANS:
        (event,) = evidence.applied[(step[0], 0, step[1], 1, 0)]
        event.cover.append(("c", [7]))
    script = GroupedScript.of(LOG, evidence, 1)
    assert not [task for task in script.tasks if task["do"] in ("average", "install")]


def test_a_mean_is_installed_between_overlapping_steps() -> None:
    """Step 3 of cluster 0 began with version 1, before step 1 was committed and the mean installed."""
    log = [
        founded(0),
        founded(1),
        commit(0, 0, 0),
        commit(1, 0, 1),
        average("average", 1, {0: 1, 1: 1}, {1: 1}),
        commit(0, 1, 2, behind=1),
        average("installed", 1, {0: 1, 1: 1}, {0: 2}),
        commit(0, 3, 3, behind=2),
    ]
    evidence = Evidence()
    for cluster, step, group in ((0, 0, 0), (1, 0, 0), (1, 1, 1), (0, 1, 0), (0, 2, 1), (0, 3, 0)):
        mean = {"cover": [["b", [1]], ["a", [0]]], "group": group} if group else {"runs": [[2, 1], [1]]}
        event = line(cluster=cluster, step=step, **mean)
        evidence.applied[event.key].append(event)
    script = GroupedScript.of(log, evidence, 1)
    assert told(script)[-3:] == [("train", 0, 1), ("install", 0, 1), ("train", 0, 3)]
    made = [task for task in script.tasks if task["do"] in ("train", "install") and task["cluster"] == 0]
    assert [task["oldest"] for task in made] == [0, 1, 1, 4], "version 1 is needed to the end"
    means = Means(log)
    stale = [means.updates_behind(0, 0, one["step"], one["behind"]) for one in log if "behind" in one]
    assert stale == [0, 0, 1, 1]


def test_a_cluster_goes_back_to_its_checkpoint_and_makes_other_versions() -> None:
    """Cluster 1 averages its first version 3, and goes on from version 2; nobody copies its second 3."""
    back = {"kind": "rollback", "cluster": 1, "view": 1, "to_version": 2, "term": 1}
    log = [
        founded(0),
        founded(1),
        commit(0, 0, 0),
        commit(1, 0, 1),
        commit(1, 1, 2),
        CHECKPOINT,
        commit(1, 2, 3),
        average("average", 1, {0: 1, 1: 3}, {0: 1}),
        back,
        {**commit(1, 2, 4), "view": 1},
        {**commit(1, 3, 5), "view": 1},
    ]
    evidence = Evidence()
    for cluster, step, view in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 2, 1), (1, 3, 1)):
        event = line(cluster=cluster, step=step, view=view, runs=[[2, 1], [1]])
        evidence.applied[event.key].append(event)
    mean = line(cluster=0, step=1, cover=[["b", [1]], ["a", [0]]], group=1)
    evidence.applied[mean.key].append(mean)
    script = GroupedScript.of(log, evidence, 1)
    assert told(script)[6:] == [
        ("keep", 1, 2),
        ("train", 1, 2),
        ("copy", 1, 3),
        ("average", 1),
        ("install", 0, 1),
        ("begin", 1),
        ("train", 1, 2),
        ("train", 1, 3),
    ]
    assert [task["base"] for task in script.tasks if task["do"] == "begin"] == [None, None, (1, 0, 2)]
    assert [task["orders"] for task in script.tasks if task["do"] == "average"] == [[[(1, 0, 3), (0, 0, 1)]]]
    oldest = [task["oldest"] for task in script.tasks if task["do"] == "train" and task["cluster"] == 1]
    assert oldest == [1, 2, 3, 3, 4], "it needs nothing older than its checkpoint in its second life"
