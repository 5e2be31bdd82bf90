"""What a volunteer expects to be given while no coordinator answers."""

import pytest

from hetpeer.averaging.member.position import choose_place
from hetpeer.bootstrap.authoring.create import create_run
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.run.settings import TrainingSettings
from hetpeer.dht.discovery import Advert
from hetpeer.peer.training.early_placement import places_seen
from hetpeer.peer.training.volunteer_figures import Offer
from hetpeer.stages.pipeline.place_memory import Offered

OFFER = Offer(memory=Offered(device=1 << 40), flops_per_second=1e12)


def holder(begin: int, end: int) -> Advert:
    return Advert(role="volunteer", state="training", block_begin=begin, block_end=end)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return create_run(
        tmp_path_factory.mktemp("placement") / "run",
        model="hetpeer/examples/gpt.py:build",
        training=TrainingSettings(steps=2, batch_size=4, microbatch_size=2, slot_size=1),
        stages=(2,),
    )


def test_the_least_held_place_is_expected(run: RunDirectory) -> None:
    first, second = run.manifest.layouts[0]
    adverts = {"a": holder(*first), "b": holder(*second), "c": holder(*first)}
    place = choose_place(places_seen(run, adverts, OFFER), OFFER.memory)
    assert (place.begin, place.end) == second
    nobody = choose_place(places_seen(run, {}, OFFER), OFFER.memory)
    assert (nobody.begin, nobody.end) in (first, second)
    coordinator = {"x": Advert(role="coordinator")}
    assert places_seen(run, coordinator, OFFER) == places_seen(run, {}, OFFER)


def test_of_places_that_are_held_the_one_that_a_step_waits_for_is_expected(run: RunDirectory) -> None:
    first, second = run.manifest.layouts[0]
    for slow in (first, second):
        adverts = {
            peer: holder(*place).model_copy(
                update={"forward_s": 20.0 if place == slow else 0.02, "memory_bytes": 1 << 40}
            )
            for peer, place in (("a", first), ("b", second))
        }
        place = choose_place(places_seen(run, adverts, OFFER), OFFER.memory)
        assert (place.begin, place.end) == slow
