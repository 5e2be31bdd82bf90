"""Blocks that a holder recomputes by its own choice: which, and that no bit depends on it."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hetpeer.stages.block.block import Block
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.pipeline.recomputed_blocks import BlockActivations, in_flight_bytes, recomputed_blocks
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.memory_footprint import footprint
from tests.amounts import examples
from tests.stages.compute_rig import MODEL, Holder, backward, cpu_engine, microbatch, submitter, tiny_blocks
from tests.stages.split_run import received
from tests.stages.zoo import zoo

blocks_of = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(1, 100)), min_size=1, max_size=6
).map(
    lambda rows: [
        BlockActivations(block=n, kept=kept, entering=entering, forward=forward)
        for n, (kept, entering, forward) in enumerate(rows)
    ]
)


def every_choice(blocks):
    return itertools.chain.from_iterable(
        itertools.combinations(blocks, size) for size in range(len(blocks) + 1)
    )


@examples(200)
@given(blocks_of, st.integers(0, 4000), st.integers(1, 9))
def test_the_choice_fits_if_any_does_and_no_block_of_it_can_be_left_out(blocks, memory, microbatches):
    numbers = recomputed_blocks(blocks, memory, microbatches)
    chosen = [one for one in blocks if one.block in numbers]
    took = in_flight_bytes(blocks, chosen, microbatches)
    least = min(in_flight_bytes(blocks, some, microbatches) for some in every_choice(blocks))
    assert took <= memory or took == least
    assert all(one.saved > 0 for one in chosen)
    for one in chosen:
        others = [other for other in chosen if other is not one]
        assert in_flight_bytes(blocks, others, microbatches) > max(memory, took)


def test_the_cheapest_bytes_are_saved_first_and_no_more_than_needed():
    row = ((100, 10, 9.0), (100, 10, 1.0), (1000, 10, 5.0), (20, 10, 0.2), (50, 50, 0.0))
    blocks = [BlockActivations(block=n, kept=k, entering=e, forward=f) for n, (k, e, f) in enumerate(row)]
    assert recomputed_blocks(blocks, 4 * 1270, 4) == frozenset()
    assert recomputed_blocks(blocks, 4 * 280 + 990, 4) == {2}
    assert recomputed_blocks(blocks, 4 * 280 + 989, 4) == {1, 2}, "no more than is needed"
    assert recomputed_blocks(blocks, 0, 4) == {0, 1, 2, 3}
    assert recomputed_blocks(blocks[:1], 0, 1) == frozenset(), "one microbatch has it all while it is at work"


@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp"])
def test_a_real_pass_keeps_no_more_than_was_counted(name):
    _, dag, _ = zoo(name)
    specs = cut_blocks(dag, 4)
    counted = [BlockActivations.of(spec) for spec in specs]
    kept = {}
    for some in ((), (1,), (0, 2), (0, 1, 2, 3)):
        mixed = [spec.recomputing() if n in some else spec for n, spec in enumerate(specs)]
        most = sum(one.activation_bytes for one in mixed)
        assert most == in_flight_bytes(counted, [counted[n] for n in some], 2) - in_flight_bytes(
            counted, [counted[n] for n in some], 1
        )
        kept[some] = footprint(mixed).kept
        assert kept[some] <= 1.15 * most
    assert kept[0, 1, 2, 3] < 0.6 * kept[()]


class Mixed(nn.Module):
    """Dropout, BatchNorm and a loss whose hits are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.second(self.first(x))), labels)


def passed(specs: list[BlockSpec], tensors, batch: dict[str, Tensor]) -> list[Tensor | tuple]:
    """Loss, gradients and statistics of one microbatch, and the hits of an evaluation."""
    held = [received(spec, tensors) for spec in specs]
    here, evaluation = Pass(Draw(3, 1, 2, 4)), Pass(None)
    out: dict[str, Tensor] = {}
    for block, _ in held:
        out = block.forward(out, batch, 8, here)
    (loss,) = out.values()
    loss.backward()
    after: dict[str, Tensor] = {}
    with torch.no_grad():
        for block, _ in held:
            after = block.forward(after, batch, 8, evaluation)
    gradients = [parameter.grad for _, parameters in held for parameter in parameters.values()]
    statistics = [one for call in sorted(here.statistics) for one in here.statistics[call]]
    return [loss.detach(), *gradients, *statistics, *after.values(), torch.tensor(evaluation.hits)]


def test_dropout_statistics_and_hits_are_those_of_a_block_that_keeps_its_activations(monkeypatch):
    torch.manual_seed(5)
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(0, 5, (8,))}
    dag = trace(Mixed(), batch)
    specs = cut_blocks(dag, 3)
    assert len(specs) >= 2
    kept = passed(specs, dag.tensors, batch)
    runs = []
    compute = Block._compute
    monkeypatch.setattr(Block, "_compute", lambda *given: runs.append(1) or compute(*given))
    for some in every_choice(range(len(specs))):
        runs.clear()
        mixed = [spec.recomputing() if n in some else spec for n, spec in enumerate(specs)]
        found = passed(mixed, dag.tensors, batch)
        assert len(runs) == 2 * len(specs) + len(some), "training, evaluation, and once more if recomputed"
        for one, other in zip(kept, found, strict=True):
            assert one.equal(other)


async def test_a_worker_that_is_told_to_recompute_folds_the_same_bits():
    sums = {}
    for some in ((), (1,), (0, 1, 2)):
        arena = Arena(1 << 24)
        submit = submitter(cpu_engine(arena))
        loading = []

        async def noted(command, submit=submit, some=some, loading=loading):
            if isinstance(command, c.LoadState):
                command = c.LoadState(
                    block=command.block, state=command.state, recompute=command.block in some
                )
                loading.append(command.block)
            return await submit(command)

        holder = Holder(noted, arena, tiny_blocks())
        await holder.load(MODEL)
        assert len(loading) == len(holder.blocks)
        for number in (1, 2):
            await backward(holder, number, slot=0)
        _, loss, _ = await holder.forward("eval", 3, train=False)
        parts = [holder.floats(await holder.export(spec, 0)).tobytes() for spec in holder.blocks]
        sums[some] = (loss, parts)
    assert len(microbatch(1)) == 2
    assert sums[()] == sums[1,] == sums[0, 1, 2]
