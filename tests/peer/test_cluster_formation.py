"""From what waiting volunteers say of themselves to clusters."""

import itertools

import pytest

from hetpeer.bootstrap.grouped.formation import Formation
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import AveragingSettings
from hetpeer.bootstrap.run.step_workload import of_manifest
from hetpeer.dht.discovery import Advert
from hetpeer.peer.planning.cluster_formation import (
    GAIN,
    PAUSE_S,
    FoundFormation,
    FoundRecut,
    formation,
    recut,
)
from tests.bootstrap.engine import make_run

BLOCKS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four blocks, in halves."""
    return make_run(tmp_path_factory.mktemp("formation"))


def advert(flops_per_second: float, memory_bytes: int = 1 << 30, uplink: float = 12.5e6) -> Advert:
    return Advert(
        role="volunteer",
        memory_bytes=memory_bytes,
        flops_per_second=flops_per_second,
        uplink=uplink,
        downlink=4 * uplink,
    )


def found(run: RunDirectory, adverts: dict[str, Advert], *peers: str) -> FoundFormation | None:
    manifest = run.manifest.model_copy(update={"averaging": AveragingSettings(interval=10)})
    left = iter(range(500))
    return formation(manifest, adverts, peers, seed=1, on=lambda: next(left, None) is not None)


def room(run: RunDirectory, part: float) -> int:
    """Memory for this part of the model."""
    work = of_manifest(run.manifest, run.manifest.training.microbatches)
    return int(part * (work.memory.sum() + 8 * work.kept.sum()))


def test_who_waits_and_has_the_memory_gets_all_of_the_model(run: RunDirectory) -> None:
    one = found(run, {"a": advert(1e9)}, "a")
    assert one is not None
    assert one.formation == Formation(clusters=[[("a", (0, BLOCKS))]])
    assert one.clusters.imbalance_s == 0.0


def test_those_who_wait_share_the_model_by_their_speed_or_are_two_clusters(run: RunDirectory) -> None:
    """Both are needed where each has too little memory for all of it; otherwise each is a cluster."""
    each = room(run, 0.45)
    both = found(run, {"fast": advert(1e7, each), "slow": advert(1e6, each)}, "fast", "slow")
    assert both is not None
    assert both.formation.fault(BLOCKS) is None
    assert len(both.formation.clusters) == 1
    assert both.formation.peers == {"fast", "slow"}
    two = found(run, {"fast": advert(1e7), "slow": advert(1e7)}, "fast", "slow")
    assert two is not None
    assert [len(seats) for seats in two.formation.clusters] == [1, 1]


def test_what_others_reach_on_blocks_counts_for_those_that_have_not_tried(run: RunDirectory) -> None:
    """Also if the others wait for nothing: the first cluster's speed tells about all that come later."""
    new = advert(1e9).model_copy(update={"product_flops": 1e9})
    alone = found(run, {"new": new}, "new")
    tried = {
        "trains": advert(0.25e9).model_copy(update={"product_flops": 1e9}),
        "node": Advert(role="coordinator"),
    }
    beside = found(run, {"new": new, **tried}, "new")
    assert alone is not None
    assert beside is not None
    assert beside.formation.peers == {"new"}
    assert beside.clusters.batch_s[0] == pytest.approx(4 * alone.clusters.batch_s[0])


def test_nobody_is_spared_who_could_be_in_a_cluster(run: RunDirectory) -> None:
    """Five that hold three quarters each, one far too small, and one with a line that makes averages slow."""
    names = "abcde"
    adverts = {name: advert(1e7 * number, room(run, 0.45)) for number, name in enumerate(names, 1)}
    adverts |= {"tiny": advert(1e7, 100_000), "far": advert(1e7, room(run, 2.0), uplink=1e4)}
    one = found(run, adverts, *adverts)
    assert one is not None
    assert one.formation.peers == set(adverts)
    assert "tiny" in one.formation.spared
    assert "far" not in one.formation.spared
    assert len(one.formation.spared) <= 2


def test_those_who_cannot_hold_it_together_or_have_not_said_what_they_can_wait_on(run: RunDirectory) -> None:
    assert found(run, {"a": advert(1e9, 100_000)}, "a") is None
    assert found(run, {"a": advert(1e9), "b": Advert(role="volunteer")}, "a", "b") is None
    assert found(run, {"a": advert(1e9)}, "a", "b") is None


def test_the_order_of_arrival_decides_nothing(run: RunDirectory) -> None:
    adverts = {
        name: advert(1e7 * number, room(run, 0.45), 1e6 * number) for number, name in enumerate("abcd", 1)
    }
    rates = set()
    for order in itertools.islice(itertools.permutations(adverts), 0, 24, 7):
        one = found(run, {peer: adverts[peer] for peer in order}, *order)
        assert one is not None
        rates.add(one.clusters.batches_per_s)
    assert len(rates) == 1


SLOW, FAST = 1e6, 1e7


def divided(run: RunDirectory, left: int, *, replica: bool = False, **changed: Advert) -> FoundRecut | None:
    """A search for three clusters of two halves each, with a fast and a slow volunteer in each of the first
    two: "b" and "d" are slow. The state of a half is fetched at once.
    """
    each = room(run, 0.45)
    speeds = {"a": FAST, "b": SLOW, "c": FAST, "d": SLOW, "e": FAST, "f": FAST, "g": FAST}
    adverts = {peer: advert(speed, each, uplink=1e9) for peer, speed in speeds.items()} | changed
    first, last = (0, BLOCKS // 2), (BLOCKS // 2, BLOCKS)
    standing = {n: {x: first, y: last} for n, (x, y) in {3: "ab", 5: "cd", 8: "ef"}.items()}
    if replica:
        standing[3]["g"] = last
    manifest = run.manifest.model_copy(update={"averaging": AveragingSettings(interval=10)})
    looks = iter(range(1000))
    on = lambda: next(looks, None) is not None  # noqa: E731
    return recut(manifest, adverts, standing, (), left=left, seed=1, on=on)


def test_two_fast_ones_that_wait_for_slow_ones_form_a_cluster(run: RunDirectory) -> None:
    one = divided(run, 100_000)
    assert one is not None
    assert one.recut.retiring == {3, 5}
    assert one.recut.formation.fault(BLOCKS) is None
    assert {frozenset(peer for peer, _ in seats) for seats in one.recut.formation.clusters} == {
        frozenset("ac"),
        frozenset("bd"),
    }
    assert one.found.gain > GAIN


def test_clusters_are_left_alone_if_it_does_not_pay_or_somebody_is_unknown(run: RunDirectory) -> None:
    one = divided(run, 100_000)
    assert one is not None
    rate = one.found.before.batches_per_s
    assert divided(run, int(PAUSE_S * rate)) is None
    assert divided(run, 100_000, a=advert(0.0)) is None


def test_a_cluster_with_replicas_is_left_alone(run: RunDirectory) -> None:
    one = divided(run, 100_000, replica=True)
    assert one is None or 3 not in one.recut.retiring
