"""What each peer may put into the arena: all of it together fits, and whoever has no part gets next to
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetpeer.averaging import messages as m
from hetpeer.averaging.member.tensor_heads import ActivationHead, Coded, GradientHead, ShardHead
from hetpeer.peer.transport.tensor_receiver import MAX_STRANGERS, MOST_LATELY, Intake
from hetpeer.peer.transport.tensor_schema import (
    TensorSchema,
    bundles_beside,
    cost_of,
    microbatches_in,
    pool_of,
    recomputing,
)
from hetpeer.peer.transport.uplink import ACTIVATIONS, GRADIENTS, SHARDS
from hetpeer.stages.pipeline.place_memory import Offered, Room
from hetpeer.stages.pipeline.routes import Hop
from tests.bootstrap.engine import make_run

ARENA = 64 << 20
OWN = {"line": m.TermView(term=1, view=0), "step": 0, "incarnation": 1}


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> TensorSchema:
    """Of who holds the second half of a small GPT."""
    run = make_run(Path(tmp_path_factory.mktemp("intake")))
    blocks = run.manifest.blocks
    return TensorSchema([run.block_spec(block) for block in blocks[len(blocks) // 2 :]], run.manifest)


def test_blocks_recompute_until_the_microbatches_fit(schema: TensorSchema) -> None:
    specs, room = list(schema.specs.values()), Room(device=5_000_000, host=1)
    plenty = Offered(device=1 << 40)
    assert recomputing(plenty, room, [specs], 5) == (specs, room)
    most = least = 0
    for nbytes in range(5_000_000, 12_000_000, 50_000):
        for apart in (False, True):
            offered = Offered(device=nbytes, host=apart)
            held, beside = recomputing(offered, room, [specs], 5)
            again = [one.index for one in held if one.recompute]
            most, least = max(most, len(again)), least + (not again)
            assert [one.index for one in held] == [one.index for one in specs]
            if len(again) < len(specs):
                assert microbatches_in(offered, beside, [held]) >= 5
            if again:
                assert microbatches_in(offered, room, [specs]) < 5
                assert beside.device > room.device
    assert most == len(specs)
    assert least


def test_what_memory_has_room_for(schema: TensorSchema) -> None:
    """Exactly so many microbatches beside the vectors; the rest of main memory is for bundles."""
    specs = list(schema.specs.values())
    first, last = (spec.at(spec.batch) for spec in (specs[0], specs[-1]))
    leaving = sum(one.nbytes for one in last.outputs.values())
    bundles = 2 * (sum(one.nbytes for one in first.inputs.values()) + leaving)
    kept = sum(spec.activation_bytes for spec in specs)
    room = Room(device=7_000_000, host=3_000_000)
    for apart, each in ((False, kept + bundles), (True, kept + leaving)):
        for count in (0, 1, 40):
            offered = Offered(device=room.device + count * each, host=apart)
            assert microbatches_in(offered, room, [specs]) == count
        offered = Offered(device=room.device + 41 * each - 1, host=apart)
        assert microbatches_in(offered, room, [specs]) == 40
    assert microbatches_in(Offered(device=0), room, [specs]) == 0
    ram = 100 * (room.device + kept + bundles)
    for apart, workers in ((False, room.device + 40 * kept), (True, room.host)):
        beside = bundles_beside(ram, room, specs, 40, apart=apart)
        assert beside == ram - workers, "with the place's part it is all of it"
        assert bundles_beside(0, room, specs, 0, apart=apart) == bundles


def used(schema: TensorSchema) -> Intake:
    intake = Intake()
    intake.use(schema, ARENA)
    return intake


def activation(schema: TensorSchema, hops: int = 1, coded: Coded | None = None) -> ActivationHead:
    first = min(schema.specs)
    route = tuple(Hop("us", first + n, first + n + 1) for n in range(hops))
    return ActivationHead(**OWN, id=0, batch=0, route=route, attempt=0, coded=coded)


def test_a_route_has_no_gaps_and_ends_with_the_model_at_the_latest(schema: TensorSchema) -> None:
    """Who was sent another had looked up the layout of a block that it does not hold, and ended by that."""
    end = schema.blocks
    assert schema.goes_on((Hop("us", 1, 2), Hop("them", 2, end)))
    assert schema.goes_on((Hop("us", 1, 2),)), "a check need not go on to the end"
    for wrong in (
        (Hop("us", 1, 2), Hop("them", 3, end)),
        (Hop("us", 1, 2), Hop("them", 1, end)),
        (Hop("us", 1, 2), Hop("them", 2, 2)),
        (Hop("us", 1, end + 1),),
        (Hop("us", 1, end), Hop("them", end, end + 3)),
    ):
        assert not schema.goes_on(wrong)


def test_pools_and_costs(schema: TensorSchema) -> None:
    first = min(schema.specs)
    raw = schema.input_layout(first, 0).nbytes
    coded = Coded(codec="int8", written=())
    found = [pool_of(activation(schema, hops), schema) for hops in (1, 2, 3)]
    assert found == [ACTIVATIONS + n for n in range(3)]
    assert pool_of(GradientHead(**OWN, id=0, border=first + 1), schema) == GRADIENTS
    shard = ShardHead(**OWN, kind="part", plan=0, block=first, index=0, begin=0, end=10)
    assert (pool_of(shard, schema), cost_of(shard, 40, schema, sending=False)) == (SHARDS, 40)
    rounded = shard.model_copy(update={"coded": Coded(codec="int8", written=())})
    assert cost_of(rounded, 12, schema, sending=False) == 12 + 40
    assert schema.shard_layout(10).nbytes == 40
    assert cost_of(activation(schema), raw, schema, sending=False) == raw
    assert cost_of(activation(schema, coded=coded), 100, schema, sending=False) == 100 + raw
    back = GradientHead(**OWN, id=0, border=first, coded=coded)
    assert (
        cost_of(back, 100, schema, sending=True) == 100 + schema.input_layout(first, 0, gradients=True).nbytes
    )


def test_volunteers_of_the_step_share_what_there_is(schema: TensorSchema) -> None:
    intake = used(schema)
    names = [f"v{n}" for n in range(5)]
    intake.members(names, ())
    for peers in (names, names[:3]):
        intake.members(peers, ())
        share = ARENA / 4 / (len(peers) - 1)
        fresh = intake.grants(peers[0], f"{len(peers)}", lambda: None)
        base, _ = fresh.said()
        most = fresh._budgets[2].most
        assert most == int(share)
        assert (len(peers) - 1) * 2 * most <= ARENA / 2
        assert base[2] >= 2 * schema.input_layout(min(schema.specs), 4).nbytes


def test_who_sends_gets_more_and_all_of_it_together_is_as_much(schema: TensorSchema) -> None:
    """Of forty, three have the blocks before ours; one of them is of our cluster."""
    intake = used(schema)
    names = [f"v{n}" for n in range(40)]
    intake.members(names, ())
    links = {name: intake.grants(name, "1", lambda: None) for name in names[1:]}
    for name, count in (("v1", 8), ("v2", 6), ("v3", 6)):
        intake.of_use(name, activation(schema, count % 3 + 1), count * 1000)
    for _ in range(2):  # what is scaled down is as much for everybody
        intake.members(names, ())
        most = {name: grants._budgets[ACTIVATIONS].most for name, grants in links.items()}
        assert most["v1"] == pytest.approx(ARENA / 8 * (MOST_LATELY + 1 / 39), rel=0.01), "of 0.4"
        assert most["v2"] == pytest.approx(ARENA / 8 * (MOST_LATELY + 1 / 39), rel=0.01), "of 0.3"
        assert sum(most.values()) <= ARENA / 4 + 39 * intake._least[ACTIVATIONS]
        assert most["v9"] == max(int(ARENA / 8 / 39), intake._least[ACTIVATIONS])
        assert links["v1"]._budgets[GRADIENTS].most == int(ARENA / 4 / 39), "of which nothing has come"
    for _ in range(20):
        intake.of_use("v4", activation(schema), 1000)
        intake.members(names, ())
    assert links["v1"]._budgets[ACTIVATIONS].most == pytest.approx(ARENA / 8 / 39, rel=0.1), "it has stopped"


def test_of_a_few_the_only_one_that_sends_gets_what_others_do_not_use(schema: TensorSchema) -> None:
    intake = used(schema)
    intake.members("abcd", ())
    links = {name: intake.grants(name, "1", lambda: None) for name in "bcd"}
    intake.of_use("b", activation(schema), 1000)
    intake.members("abcd", ())
    most = [links[name]._budgets[ACTIVATIONS].most for name in "bcd"]
    assert most == pytest.approx([ARENA / 6, ARENA / 24, ARENA / 24], rel=0.01)


def test_without_a_place_nothing_is_granted_and_with_one_the_sender_hears_of_it(schema: TensorSchema) -> None:
    intake, told = Intake(), []
    intake.members(["a", "us"], ())
    grants = intake.grants("a", "1", lambda: told.append(1))
    assert grants.said() == ((0, 0, 0), {})
    intake.use(schema, ARENA)
    assert told
    assert all(grants.said()[0])
    assert intake.grants("a", "1", lambda: None) is grants
    assert intake.grants("a", "2", lambda: None) is not grants


def test_strangers_get_one_frame_of_each_kind_and_only_a_few_of_them(schema: TensorSchema) -> None:
    intake = used(schema)
    intake.members(["a", "us"], ())
    bases = [intake.grants(f"stranger {n}", "1", lambda: None).said()[0] for n in range(MAX_STRANGERS + 5)]
    assert all(all(base) for base in bases[:MAX_STRANGERS])
    assert not any(any(base) for base in bases[MAX_STRANGERS:])
    assert sum(map(sum, bases)) < ARENA / 8
    late = intake.grants(f"stranger {MAX_STRANGERS + 4}", "1", lambda: None)
    intake.members(["a", "us"], [f"stranger {MAX_STRANGERS + 4}"])  # the others have gone
    assert all(late.said()[0])


def test_who_is_gone_is_forgotten_once_nothing_of_it_is_here(schema: TensorSchema) -> None:
    intake = used(schema)
    intake.members(["a", "us"], ())
    lane = intake.grants("a", "1", lambda: None).lane()
    lane.offered({GRADIENTS: 100})
    back = lane.settle(GRADIENTS, 100)
    intake.members(["us"], ())
    assert intake.held() == 100
    back()
    assert intake.held() == 0
    intake.members(["us"], ())
    assert not intake._holdings
