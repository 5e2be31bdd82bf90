"""Clusters of real processes that train batches of their own and average (mode `grouped`)."""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.grouped.recut import WHY
from hetpeer.bootstrap.log.history import Means
from hetpeer.bootstrap.run.settings import AveragingSettings, LinkSettings, Outer
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.peer.watching.perfetto import perfetto
from hetpeer.stages.worker.holding.movement import CODEC as MOVEMENTS
from tests.bootstrap.engine import rewrite_log
from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
ENDLESS = 100_000
PAIRS = AveragingSettings(span=2)


async def clusters_of_two(
    swarm: Swarm,
    names: str,
    averaging: AveragingSettings = PAIRS,
    links: LinkSettings | None = None,
    options: Sequence[str] = (),
    before: str = "",
    **training: Any,
) -> list[Child]:
    """Two stages are a cluster, so four volunteers are two; none begins before all are there.

    `before` is what is wrong with the bootstrap node.
    """
    settings = swarm.run.manifest.training.model_copy(update=training)
    swarm.run = resign(swarm.run, averaging=averaging, training=settings, links=links or LinkSettings())
    divides = () if before in ("soon_enough", "divides_anew") else ("--keep-places",)
    await swarm.bootstrap(*divides, together=len(names) // 2 * 2, before=before)
    return [swarm.volunteer(name, *options) for name in names]


def averaged(swarm: Swarm, clusters: set[int]) -> bool:
    """Whether these have averaged with each other."""
    return any({number for number, _ in r["clusters"]} == clusters for r in swarm.records("average"))


def own_cuts(swarm: Swarm) -> list[tuple[int, Any]]:
    """Cluster and layout of those that cut the model otherwise than the manifest says."""
    return [(r["cluster"], r["layout"]) for r in swarm.records("founded") if "layout" in r]


def averaged_with_a_new_one(swarm: Swarm) -> bool:
    """Whether two have averaged one of which is not of the first two."""
    groups = [[number for number, _ in r["clusters"]] for r in swarm.records("average")]
    return any(len(group) == 2 and max(group) > 1 for group in groups)


def is_said(swarm: Swarm, peer: str, why: str) -> bool:
    return any(why in record["why"] and peer in record["why"] for record in swarm.records("quarrel"))


def all_batches_once(swarm: Swarm) -> None:
    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    assert verdict.steps == verdict.steps_planned
    told = verdict.contributed
    assert (sum(told.used.values()), told.waiting, told.silent) == (verdict.counted, 0, 0)
    losses = [record["loss"] for record in swarm.records("evaluation")]
    assert losses[-1] < losses[0], losses
    lines = [json.loads(line) for line in swarm.run.metrics_path.read_text().splitlines()]
    batches = [line["batch"] for line in lines if line["kind"] == "step"]
    assert sorted(batches) == [*range(swarm.run.manifest.training.steps)], "the written curve has each once"
    assert lines[-1]["kind"] == "evaluation"


def computed_again(swarm: Swarm) -> None:
    """One machine gets the bits of every batch and every installed mean."""
    replayed = replay(swarm.run.path)
    assert replayed.ok, replayed.problems
    installed = [
        one for r in swarm.records() if r["kind"] in ("average", "installed") for one in r["installed"]
    ]
    assert replayed.equal == replayed.steps == len(swarm.records("commit")) + len(installed)
    assert replayed.evaluations == len(swarm.records("evaluation"))


async def test_two_clusters_share_the_batches_and_one_machine_gets_the_same(swarm: Swarm) -> None:
    """With an outer optimizer, and second moments for their mean: what these keep is in the checkpoint."""
    outer = Outer(learning_rate=0.7, momentum=0.5)
    settings = AveragingSettings(span=2, corrected=True, outer=outer)
    volunteers = await clusters_of_two(swarm, "abcd", settings, before="patient")
    await swarm.finished(swarm.children[0], *volunteers)
    all_batches_once(swarm)
    assert {record.get("cluster", 0) for record in swarm.records("commit")} == {0, 1}
    assert not swarm.records("dissolved")
    averages = swarm.records("average")
    assert len(averages[-1]["clusters"]) == 2
    computed_again(swarm)
    assert {record["workers"] for record in swarm.records("commit")} == {1, 2}
    store, stored = CheckpointStore(swarm.run, swarm.run.layouts()), swarm.records("checkpoint")[-1]
    for block in range(len(swarm.run.manifest.blocks)):
        kept = store.load_state(stored, block).optimizer
        assert all(kept[name].any() for name in ("exp_avg_beta2", "outer_anchor", "outer_momentum")), block
    assert all(sorted(record["sums"], key=int) for record in averages)


SPARSE = (
    AveragingSettings(window_s="all", interval=2, outer=Outer(learning_rate=0.7, momentum=0.5)),
    LinkSettings(reduce="topk2"),
)


async def test_two_clusters_that_send_the_largest_of_what_they_have_moved(swarm: Swarm) -> None:
    """Checkpoints hold what was not sent, one machine gets every bit, and parts have the promised size."""
    volunteers = await clusters_of_two(swarm, "abcd", *SPARSE, ("--trace",), before="patient")
    await swarm.finished(swarm.children[0], *volunteers)
    all_batches_once(swarm)
    assert not swarm.records("dissolved")
    assert all(
        len(record["installed"]) == len(record["clusters"]) == 2 for record in swarm.records("average")
    )
    computed_again(swarm)
    store, stored = CheckpointStore(swarm.run, swarm.run.layouts()), swarm.records("checkpoint")[-1]
    for block in range(len(swarm.run.manifest.blocks)):
        state = store.load_state(stored, block)
        kept = state.optimizer
        assert all(kept[name].any() for name in ("outer_anchor", "outer_momentum")), block
        assert (state.parameters != kept["outer_anchor"]).any(), block
    sent = [
        event["args"]["bytes"]
        for event in perfetto(swarm.folder)["traceEvents"]
        if event["ph"] == "X" and event["name"].split()[0] == "part"
    ]
    vectors = {block.vector_count for block in swarm.run.manifest.blocks}
    assert set(sent) == {MOVEMENTS.nbytes(count) for count in vectors}


@pytest.mark.proof
async def test_sparse_updates_survive_a_killed_cluster(swarm: Swarm) -> None:
    """A new cluster begins with the checkpoint's anchor, that of all others in the next averaging."""
    volunteers = await clusters_of_two(swarm, "abcd", *SPARSE, steps=ENDLESS, checkpoint_every=4)
    await until(lambda: averaged(swarm, {0, 1}), "they have averaged", 100.0)
    await volunteers.pop().kill()
    await until(lambda: swarm.records("dissolved"), "its cluster has fallen apart")
    volunteers.append(swarm.volunteer("e"))
    await until(lambda: averaged_with_a_new_one(swarm), "a new one has taken its place", within_s=100.0)
    await swarm.left_in_order(volunteers)
    replayed = replay(swarm.run.path)
    assert replayed.ok, replayed.problems
    assert replayed.equal == replayed.steps > 0


@pytest.mark.proof
async def test_what_falls_apart_with_a_killed_volunteer_is_trained_again(swarm: Swarm) -> None:
    """While averagings are delayed, and rounded."""
    delayed, rounded = AveragingSettings(span=2, delayed=True), LinkSettings(reduce="int8")
    volunteers = await clusters_of_two(
        swarm, "abcd", delayed, rounded, ("--trace",), steps=ENDLESS, checkpoint_every=4
    )
    await until(lambda: averaged(swarm, {0, 1}), "they have averaged", 100.0)
    await volunteers.pop().kill()
    await until(lambda: swarm.records("dissolved"), "its cluster has fallen apart")
    volunteers.append(swarm.volunteer("e"))
    await until(lambda: averaged_with_a_new_one(swarm), "a new one has taken its place", within_s=100.0)
    await until(
        lambda: any(r["installed"] for r in swarm.records("installed")), "a mean was installed later", 100.0
    )
    await swarm.left_in_order(volunteers)
    sent = [
        event["args"]["bytes"]
        for event in perfetto(swarm.folder)["traceEvents"]
        if event["ph"] == "X" and event["name"].split()[0] in ("part", "result")
    ]
    vectors = [4 * block.vector_count for block in swarm.run.manifest.blocks]
    assert sent
    assert max(sent) < 0.3 * max(vectors)


@pytest.mark.proof
async def test_one_machine_gets_the_bits_of_clusters_that_come_and_go(swarm: Swarm) -> None:
    """With overlapping steps, and means that are installed later than they were taken."""
    outer = Outer(learning_rate=0.7, momentum=0.5)
    settings = AveragingSettings(span=2, interval=2, delayed=True, corrected=True, outer=outer)
    training = {"steps": ENDLESS, "checkpoint_every": 4, "staleness": 1}
    volunteers = await clusters_of_two(swarm, "abcd", settings, **training)
    await until(lambda: averaged(swarm, {0, 1}), "they have averaged", 100.0)
    await volunteers.pop().kill()
    await until(lambda: swarm.records("dissolved"), "its cluster has fallen apart")
    volunteers.append(swarm.volunteer("e"))
    await until(lambda: averaged_with_a_new_one(swarm), "a new one has taken its place", within_s=100.0)
    await until(lambda: any(r["installed"] for r in swarm.records("installed")), "one was installed later")
    await swarm.left_in_order(volunteers)
    replayed = replay(swarm.run.path)
    assert replayed.ok, replayed.problems
    decided = len(swarm.records("commit")) + sum(
        len(r["installed"]) for r in swarm.records() if r["kind"] in ("average", "installed")
    )
    assert replayed.equal == replayed.steps
    assert replayed.steps >= 0.8 * decided, "the killed volunteer's last lines may be missing"

    def edit(records):
        late = [r for r in records if r["kind"] == "commit" and r.get("cluster", 0) > 1]
        late[0]["loss"] = math.nextafter(late[0]["loss"], math.inf)

    rewrite_log(swarm.run, edit)
    (problem,) = replay(swarm.run.path).problems
    assert problem.endswith("the loss is not what one machine gets")
    assert "of cluster" in problem


@pytest.mark.proof
async def test_one_machine_gets_the_bits_of_clusters_that_never_stop(swarm: Swarm) -> None:
    """Averagings after every batch, whose means are installed among overlapping steps with a head start."""
    outer = Outer(learning_rate=0.7, momentum=0.5)
    settings = AveragingSettings(span=2, interval=1, delayed=True, corrected=True, outer=outer)
    training = {"steps": 60, "eval_every": 60, "staleness": 1, "head_start": 1}
    volunteers = await clusters_of_two(swarm, "abcd", settings, before="patient", **training)
    await swarm.finished(swarm.children[0], *volunteers)
    all_batches_once(swarm)
    computed_again(swarm)
    assert not swarm.records("dissolved")
    means, steps = Means(swarm.records()), swarm.records("commit")
    behind = [one.get("behind", 0) for one in steps]
    updates = [
        means.updates_behind(one.get("cluster", 0), one["view"], one["step"], versions)
        for one, versions in zip(steps, behind, strict=True)
    ]
    assert max(updates) == 1
    assert statistics.fmean(updates) >= 0.8
    assert sum(versions > stale for versions, stale in zip(behind, updates, strict=True)) >= 5


@pytest.mark.proof
async def test_living_clusters_change_volunteers_without_losing_a_batch(swarm: Swarm) -> None:
    volunteers = await clusters_of_two(swarm, "abcdef", before="divides_anew", steps=60)
    await swarm.finished(swarm.children[0], *volunteers)
    all_batches_once(swarm)
    dissolved = swarm.records("dissolved")
    assert [record["why"] for record in dissolved] == [WHY] * 2
    at, records = dissolved[0], swarm.records()
    trained = {r.get("cluster", 0) for r in records[records.index(at) :] if r["kind"] == "commit"}
    gone = {record.get("cluster", 0) for record in dissolved}
    assert not trained & gone
    assert len(trained) == 3, "the two new ones, and the one that stayed"
    batches = [record["batch"] for record in swarm.records("commit")]
    assert len(set(batches)) == len(batches), "none is trained again"
    computed_again(swarm)


@pytest.mark.proof
async def test_who_waits_alone_and_has_the_memory_is_a_cluster(swarm: Swarm) -> None:
    """Three for two stages: the third, or whoever comes so much earlier than the next, holds all of the
    model in one stage, and averages with the others.
    """
    volunteers = await clusters_of_two(swarm, "abc", steps=ENDLESS, checkpoint_every=4, before="soon_enough")
    await until(lambda: own_cuts(swarm), "a cluster has a cut of its own", 100.0)
    number, cut = own_cuts(swarm)[0]
    assert cut == [[0, len(swarm.run.manifest.blocks)]]
    await until(
        lambda: any(
            number in (group := dict(r["clusters"])) and len(group) > 1 for r in swarm.records("average")
        ),
        "it has averaged with others",
        100.0,
    )
    await swarm.left_in_order(volunteers)


def held_twice(swarm: Swarm) -> list[str]:
    """Members of a cluster in the last averaging whose blocks others hold, too."""
    held = swarm.records("average")[-1]["held"] if swarm.records("average") else []
    places = [(cluster, *place) for cluster, _, *place in held]
    return [peer for (_, peer, *_), place in zip(held, places, strict=True) if places.count(place) > 1]


def held_twice_in_training(swarm: Swarm) -> bool:
    """Whether three volunteers trained the last batch, in two places."""
    last = (swarm.records("commit") or [{}])[-1]
    return len(last.get("held", ())) == 3 * 3


@pytest.mark.proof
async def test_a_spare_becomes_a_replica_and_a_death_beside_it_stops_nothing(swarm: Swarm) -> None:
    settings = AveragingSettings(span=2, interval=2)
    volunteers = await clusters_of_two(swarm, "abcd", settings, steps=ENDLESS, checkpoint_every=10)
    await until(lambda: averaged(swarm, {0, 1}), "they have averaged", 100.0)
    volunteers.append(swarm.volunteer("e"))
    await until(lambda: held_twice(swarm), lambda: f"e is a replica; {swarm.voices()}", 75.0)
    one, other = held_twice(swarm)
    assert volunteers[-1].peer_id in (one, other)
    first = next(child for child in volunteers[:-1] if child.peer_id in (one, other))
    volunteers.remove(first)
    await first.kill()
    await swarm.gone(first)
    trained = len(swarm.records("commit"))
    await until(lambda: len(swarm.records("commit")) > trained + 10, "all go on", 60.0)
    assert not swarm.records("dissolved")
    await swarm.left_in_order(volunteers)


@pytest.mark.proof
async def test_a_replica_and_one_that_comes_later_become_a_cluster(swarm: Swarm) -> None:
    """In a run whose volunteers come one by one. Nobody is lost for it, and no batch is."""
    settings = AveragingSettings(span=2, interval=2)
    volunteers = await clusters_of_two(swarm, "abc", settings, steps=ENDLESS, checkpoint_every=10)
    await until(lambda: held_twice_in_training(swarm), "c is a replica", 100.0)
    volunteers.append(swarm.volunteer("d"))
    await until(lambda: averaged(swarm, {0, 1}), lambda: f"two clusters average; {swarm.voices()}", 120.0)
    assert not swarm.records("dissolved")
    assert not swarm.records("gone")
    await swarm.left_in_order(volunteers)


@pytest.mark.proof
async def test_a_spare_takes_the_leftovers_of_a_cluster_that_has_lost_a_holder(swarm: Swarm) -> None:
    """In its first step, whose state is in the store. Every batch is in the result once."""
    swarm.run = resign(swarm.run, averaging=PAIRS)
    await swarm.bootstrap("--keep-places", before="patient")
    dying = swarm.volunteer("dying", fail="send_gradient:3")
    await dying.says("blocks")
    others = [swarm.volunteer(name) for name in "abcd"]
    await dying.ended(120.0)
    await swarm.finished(swarm.children[0], *others, within_s=240.0)
    assert not swarm.records("dissolved")
    assert audit(swarm.run.path).leftovers > 0
    all_batches_once(swarm)


async def test_the_only_cluster_goes_back_to_its_checkpoint_when_a_holder_dies(swarm: Swarm) -> None:
    """In the seventh step of two volunteers for two stages. It comes back without its state."""
    training = swarm.run.manifest.training.model_copy(update={"steps": 16, "checkpoint_every": 4})
    swarm.run = resign(swarm.run, averaging=PAIRS, training=training)
    await swarm.bootstrap("--keep-places", together=2, before="patient")
    dying = swarm.volunteer("dying", fail=f"send_gradient:{6 * training.microbatches + 3}")
    await dying.blocks()
    other = swarm.volunteer("other")
    await dying.ended(120.0)
    again = swarm.volunteer("dying")
    await swarm.finished(swarm.children[0], other, again)
    all_batches_once(swarm)
    assert not swarm.records("dissolved")
    records = swarm.records()
    (back,) = [record for record in records if record["kind"] == "rollback"]
    before = records[: records.index(back)]
    stored = [record["version"] for record in before if record["kind"] == "checkpoint"]
    trained = [record["step"] for record in before if record["kind"] == "commit"]
    assert back["to_version"] == stored[-1] <= trained[-1]
    replayed = replay(swarm.run.path)
    assert replayed.ok, replayed.problems
    assert replayed.equal == replayed.steps >= training.steps, "with those that were trained twice"


@pytest.mark.proof
async def test_who_sends_what_cannot_be_averaged_is_named_and_others_add_up(swarm: Swarm) -> None:
    volunteers = await clusters_of_two(swarm, "abc", steps=ENDLESS, checkpoint_every=4)
    wrongs = {"sends_nan_parameters": "its parameters are not finite", "sends_a_short_part": "a shard of"}
    for wrong, why in wrongs.items():
        liar = swarm.volunteer(wrong, before=wrong)
        await liar.says("computes on")
        accused = {"peer": liar.peer_id, "why": f"cannot be added: {why}"}
        await until(lambda accused=accused: is_said(swarm, **accused), f"{wrong} is named", within_s=90.0)
        await liar.kill()
    await swarm.left_in_order(volunteers)


@pytest.mark.proof
async def test_a_coordinator_that_dies_goes_on_with_the_clusters_that_are_there(swarm: Swarm) -> None:
    """With an outer optimizer, whose state is in the checkpoints, and after two batches each."""
    outer = Outer(learning_rate=0.7, momentum=0.5)
    settings = AveragingSettings(span=2, interval=2, outer=outer)
    volunteers = await clusters_of_two(swarm, "abcd", settings, before="patient")
    await until(lambda: swarm.records("average"), "they have averaged", 100.0)
    await swarm.children[0].kill()
    bootstrap = await swarm.bootstrap("--keep-places", before="patient")
    await swarm.finished(bootstrap, *volunteers)
    all_batches_once(swarm)
    assert not swarm.records("dissolved")
    computed_again(swarm)


@pytest.mark.proof
async def test_a_false_gradient_of_one_cluster_is_found_by_one_machine(swarm: Swarm) -> None:
    """A flipped bit in a sum that no other volunteer has computed."""
    averaging = AveragingSettings(span=2, interval=4)
    volunteers = await clusters_of_two(swarm, "abc", averaging)
    volunteers.append(swarm.volunteer("liar", before="folds_falsely:bit"))
    await swarm.finished(swarm.children[0], *volunteers)
    all_batches_once(swarm)
    replayed = replay(swarm.run.path)
    (problem,) = replayed.problems
    assert problem.startswith("step 3"), problem
    assert "the gradient of block" in problem
    assert volunteers[-1].peer_id in problem
    assert 0 < replayed.equal < replayed.steps
