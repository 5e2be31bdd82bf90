"""What is predicted from adverts, and what is said while they do not tell enough."""

import json
from dataclasses import replace
from itertools import permutations

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.discovery import Advert, LinkNote
from hetpeer.peer.cli.swarm.plan_command import _lines
from hetpeer.peer.planning.step_prediction import predict, reduce_bytes
from hetpeer.peer.training.volunteer_figures import VolunteerFigures
from hetpeer.stages.pipeline.routes import Hop
from tests.bootstrap.engine import make_run

FRONT, BACK = "QmTheFrontPeer", "QmTheBackPeer1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Steps of four microbatches of two sequences of 16 tokens."""
    return make_run(tmp_path_factory.mktemp("predicting"))


def volunteer(begin: int, end: int, to: str, **fields: object) -> Advert:
    link = LinkNote(to=to[-8:], rate=1000.0, trip_s=0.2, activation_bytes=500, gradient_bytes=500)
    known: dict[str, object] = {"role": "volunteer", "state": "training", "links": (link,)}
    known |= {"block_begin": begin, "block_end": end, "forward_s": 0.1, "backward_s": 0.2, "between_s": 0.5}
    return Advert(**(known | fields))


def swarm(run: RunDirectory, **fields: object) -> dict[str, Advert]:
    """Two stages; `fields` are the front one's."""
    boss = Advert(role="coordinator", state="training", tokens_per_second=32.0)
    blocks = len(run.manifest.blocks)
    return {
        run.manifest.coordinators[0]: boss,
        FRONT: volunteer(0, 2, BACK, name="front", **fields),
        BACK: volunteer(2, blocks, FRONT, name="back", between_s=3.0),
        "QmTheOnlooker": Advert(role="volunteer", state="syncing", block_begin=0, block_end=2),
    }


def test_a_swarm_of_two(run: RunDirectory) -> None:
    """Four bundles take 2 s on the line; the first one's work before, the last gradient's after it, twice
    the way.
    """
    found = predict(run.signed, swarm(run))
    assert found.estimate.seconds == pytest.approx(0.1 + 4 * 0.5 + 0.1 + 0.3 + 0.5 + 0.1 + 0.2 + 0.5)
    assert (found.measured_s, found.estimate.between_s) == (4.0, 0.5)
    assert [member.name for member in found.members] == ["front", "back"]
    lines = list(_lines(found))
    assert (
        lines[1]
        == "step      3.80 s predicted, 0.50 s of it between two steps; the last one took 4.00 s (+5%)"
    )
    assert lines[-1] == "slowest   back, which is sending" or lines[-1] == "slowest   front, which is sending"
    document = json.loads(json.dumps(found.document()))
    assert document["predicted_s"] == found.estimate.seconds
    assert {row["name"] for row in document["members"]} == {"front", "back"}


def test_a_swarm_of_two_whose_steps_overlap(run: RunDirectory) -> None:
    """What is busiest sets the pace: four bundles of half a second on the line, both ways; nobody waits
    for what lies between.
    """
    manifest = run.manifest
    training = manifest.training.model_copy(update={"staleness": 1, "fresh_steps": 3})
    signed = replace(run.signed, manifest=manifest.model_copy(update={"training": training}))
    found = predict(signed, swarm(run))
    assert found.estimate.seconds == pytest.approx(4 * 0.5, rel=0.01)
    assert (found.estimate.staleness, found.document()["staleness"]) == (1, 1)
    assert found.document()["fresh_steps"] == 3
    assert list(_lines(found))[1].startswith(
        "step      2.00 s predicted, 2 steps at a time after the first 3; the last one took 4.00 s"
    )
    updating = predict(signed, swarm(run, forward_s=0.2, backward_s=0.3, update_s=0.5)).estimate
    assert updating.seconds == pytest.approx(4 * 0.5 + 0.5, rel=0.01)
    assert updating.bottleneck == ("computing", FRONT)


@pytest.mark.parametrize("rate", [5e-324, 1000.0, 1e18])
@pytest.mark.parametrize("uplink", [0.0, 5e-324, 1e18])
def test_what_nobody_can_be_does_not_keep_others_from_predicting(
    run: RunDirectory, rate: float, uplink: float
) -> None:
    """One peer's claims about its line and its uplink count as far as they are believed."""
    link = LinkNote(to=BACK[-8:], rate=rate, activation_bytes=500, gradient_bytes=500)
    found = predict(run.signed, swarm(run, links=(link,), uplink=uplink))
    assert 0.0 < found.estimate.seconds < 4 * 500 / 125.0 + 10.0


def test_microbatches_keep_to_the_lines_that_were_used(run: RunDirectory) -> None:
    """Two pipelines on fast lines: nothing goes from one to the other, over a line of which nobody knows
    anything; and who has a slow line gets less.
    """
    blocks = len(run.manifest.blocks)

    def two(slow: float) -> dict[str, Advert]:
        pairs = {"QmFrontOfOne1": "QmBackOfOne22", "QmFrontOfTwo3": "QmBackOfTwo44"}
        adverts = {run.manifest.coordinators[0]: Advert(role="coordinator", state="training")}
        for (front, back), rate in zip(pairs.items(), (1e6, slow), strict=True):
            for peer, to, place in ((front, back, (0, 2)), (back, front, (2, blocks))):
                link = LinkNote(to=to[-8:], rate=rate, activation_bytes=500, gradient_bytes=500)
                adverts[peer] = volunteer(*place, to, links=(link,), name=peer)
        return adverts

    alike = {member.name: member.computing for member in predict(run.signed, two(1e6)).members}
    assert alike["QmFrontOfOne1"] == pytest.approx(alike["QmFrontOfTwo3"], rel=0.01)
    slower = {member.name: member.computing for member in predict(run.signed, two(800.0)).members}
    assert slower["QmFrontOfOne1"] > 2.5 * slower["QmFrontOfTwo3"], "three of four go the fast way"


def test_who_holds_the_same_blocks_adds_up(run: RunDirectory) -> None:
    """Two pipelines: as many bytes leave everybody as a ring takes, and nothing goes between pipelines
    where nothing is shared.
    """
    manifest = run.manifest
    blocks = len(manifest.blocks)
    holders = {"a": (0, 2), "b": (2, blocks), "c": (0, 2), "d": (2, blocks)}
    ways = [tuple(Hop(peer, *holders[peer]) for peer in pair) for pair in ("ab", "cd")]
    sent = reduce_bytes(manifest, {number: ways[number % 2] for number in range(4)}, holders, {})
    assert sent.keys() == set(permutations("ac", 2)) | set(permutations("bd", 2))
    for one, other, (begin, end) in (("a", "c", (0, 2)), ("b", "d", (2, blocks))):
        ring = 2 * 4 * sum(block.vector_count for block in manifest.blocks[begin:end])
        assert sent[one, other] + sent[other, one] == ring
    alone = reduce_bytes(manifest, dict.fromkeys(range(4), ways[0]), {p: holders[p] for p in "ab"}, {})
    assert not alone, "nobody shares a block, and nothing is tied"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"block_end": 1}, "nobody holds block 1"),
        ({"state": "syncing"}, "nobody holds block 0"),
        ({"forward_s": 0.0}, "front has not computed anything yet"),
        ({"links": ()}, "the link from front to back is not measured yet"),
        ({"links": (LinkNote(to=BACK[-8:]),)}, "the link from front to back is not measured yet"),
    ],
)
def test_too_early(run: RunDirectory, fields: dict[str, object], why: str) -> None:
    with pytest.raises(LocalError, match="nothing can be predicted yet") as caught:
        predict(run.signed, swarm(run, **fields))
    assert (caught.value.code, caught.value.exit_code, caught.value.why) == (
        "HP-PLAN-001",
        ExitCode.TRY_LATER,
        why,
    )


# ── what it is made of ──────────────────────────────────────────────────────────────────────────────────────


def test_between_two_steps() -> None:
    figures = VolunteerFigures()
    figures.updated(3, 1.0)  # of a step in which nothing was done here
    assert figures.between_s == 0
    for step, worked, updated in ((4, 5.0, 5.5), (5, 9.0, 10.0), (6, 12.0, 20.0), (7, 21.0, 22.0)):
        figures.worked(step, worked)
        figures.updated(step, updated)
    figures.updated(8, 30.0)
    assert figures.between_s == 1.0
    assert figures.microbatches == 4


def test_between_two_steps_that_overlap() -> None:
    """Work on later ones is no work on this one; and one that is done early waits for those before it."""
    figures = VolunteerFigures()
    for step, now in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0)):
        figures.worked(step, now)
    figures.updated(0, 6.0)
    assert figures.between_s == 3.0
    figures.worked(2, 7.0)
    figures.updated(1, 8.0)
    assert figures.between_s == (3.0 + 2.0) / 2, "not from 4.0: until 6.0 it was not its turn"
    figures.updated(2, 8.5)
    assert figures.between_s == 2.0
