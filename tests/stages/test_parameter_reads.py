"""Gradients of tables in which rows are looked up: sparse, and the same bits as dense ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.block_spec import Ref
from hetpeer.stages.graph.parameter_reads import by_rows, looked_up
from hetpeer.stages.operators.names import EMBEDDING
from hetpeer.stages.worker.holding.residence import Residence
from tests.stages.compute_rig import CPU, tiny_blocks

ROWS, WIDTH = 50, 6


def first_embedding(spec):
    return next(node for node in spec.nodes if node.op == EMBEDDING)


def test_tables_that_one_embedding_alone_reads_have_gradients_of_rows():
    spec = tiny_blocks()[0]
    assert set(looked_up(spec).values()) == {"wte.weight", "wpe.weight"}
    assert all(node.args[-2:] == (False, True) for node in by_rows(spec) if node.op == EMBEDDING)
    node = first_embedding(spec)
    table = spec.parameters[node.args[0].name]
    again = replace(spec, nodes=(*spec.nodes, replace(node, name="again")))
    assert table not in looked_up(again).values(), "two gradients of one table would be added up row by row"
    scaled = replace(node, args=(*node.args, -1, True))
    assert table not in looked_up(replace(spec, nodes=(scaled, *spec.nodes[1:]))).values()
    assert looked_up(tiny_blocks()[1]) == {}
    assert by_rows(tiny_blocks()[1]) == tiny_blocks()[1].nodes


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_sums_of_rows_have_the_bits_of_dense_sums(padding, apart):
    """Several microbatches that name some rows often, with zeros of both signs among the gradients."""
    torch.set_num_threads(1)
    residence = Residence(device=CPU, own_memory=apart, offload=Offload.HOST)
    table = torch.randn(ROWS, WIDTH, requires_grad=True)
    sums = [torch.full((ROWS, WIDTH), torch.nan) for _ in range(2)]
    for number in range(5):
        tokens = torch.randint(0, 12, (4, 30))
        seed = torch.randn(4, 30, WIDTH)
        seed[seed < -1] = -0.0
        for sparse, total in zip((False, True), sums, strict=True):
            out = torch.ops.aten.embedding.default(table, tokens, padding, False, sparse)
            (gradient,) = torch.autograd.grad(out, table, seed)
            assert gradient.is_sparse == sparse
            residence.land(gradient, total, add=number > 0)
    dense, rows = (total.numpy() for total in sums)
    assert dense.tobytes() == rows.tobytes()
    assert np.count_nonzero(dense) > 0


def test_an_argument_of_the_call_stays_as_it_was():
    spec = tiny_blocks()[0]
    node = first_embedding(spec)
    padded = replace(spec, nodes=(replace(node, args=(*node.args, 3)), *spec.nodes[1:]))
    assert by_rows(padded)[0].args == (Ref(node.args[0].name), node.args[1], 3, False, True)
