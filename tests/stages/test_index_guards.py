"""What a GPU's kernel would break over is refused as the CPU's kernel refuses it."""

import pytest
import torch

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.stages.graph.block_spec import OperatorCall, Ref
from hetpeer.stages.graph.interpreter import Program
from hetpeer.stages.operators.indexed_operators import INDEX_GUARDS
from hetpeer.stages.operators.operators import operator_of
from hetpeer.stages.operators.own_operators import Pass

X = torch.arange(12.0).view(4, 3)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


CASES = [
    ("aten.embedding.default", (X, ids(0, 3)), (X, ids(0, 4))),
    ("aten.embedding.default", (X, ids(0, 3)), (X, ids(-1, 3))),
    ("aten.index_select.default", (X, 1, ids(2)), (X, 1, ids(3))),
    ("aten.gather.default", (X, -1, ids(2, 0).view(2, 1)), (X, -1, ids(3, 0).view(2, 1))),
    ("aten.take_along_dim.default", (X, ids(11)), (X, ids(12))),
    ("aten.take_along_dim.default", (X, ids(4, 0, 0).view(1, 3), 0), (X, ids(-1))),
    ("aten.index.Tensor", (X, [None, ids(-3, 2)]), (X, [None, ids(3)])),
    ("aten.index.Tensor", (X, [X[:, 0] > 3, ids(0)]), (X, [ids(-5)])),
    ("aten.index_add.default", (X, 0, ids(3), X[:1]), (X, 0, ids(4), X[:1])),
    ("aten.index_put.default", (X, [ids(-4)], X[0]), (X, [None, ids(3)], X[0, 0])),
    ("aten.scatter.value", (X, 1, ids(2, 0).view(2, 1), 1.0), (X, 1, ids(3, 0).view(2, 1), 1.0)),
    ("aten.scatter.src", (X, 1, ids(2, 0).view(2, 1), X), (X, 1, ids(3, 0).view(2, 1), X)),
    ("aten.scatter_add.default", (X, 1, ids(2, 0).view(2, 1), X), (X, 1, ids(-1, 0).view(2, 1), X)),
    (
        "aten.scatter_reduce.two",
        (X, 1, ids(2, 0).view(2, 1), X, "amax"),
        (X, 1, ids(3, 0).view(2, 1), X, "amax"),
    ),
    ("aten.one_hot.default", (ids(0, 4), 5), (ids(0, 5), 5)),
    ("aten.cross_entropy_loss.default", (X, ids(0, 1, 2, -100)), (X, ids(0, 1, 3, -100))),
    (
        "aten.cross_entropy_loss.default",
        (X, ids(0, 1, 2, 9), None, 1, 9),
        (X, ids(0, 1, 2, -100), None, 1, 9),
    ),
    ("aten.cross_entropy_loss.default", (X, torch.softmax(X, 1)), (X, ids(0, 1, 2, 450))),
    ("aten.cross_entropy_loss.default", (X[0], torch.tensor(2)), (X[0], torch.tensor(3))),
    ("aten.nll_loss_nd.default", (X, ids(0, 1, 2, 2)), (X, ids(0, 1, 2, -1))),
]


@pytest.mark.parametrize(("op", "good", "bad"), CASES)
def test_the_guard_refuses_what_the_cpu_refuses_and_nothing_else(op: str, good, bad) -> None:
    run = operator_of(op).run
    run(*good)
    INDEX_GUARDS[op](*good)
    with pytest.raises((IndexError, RuntimeError)):
        run(*bad)
    with pytest.raises(IndexError, match="out of bounds"):
        INDEX_GUARDS[op](*bad)


def test_empty_indices_are_good() -> None:
    INDEX_GUARDS["aten.embedding.default"](X, ids())


@pytest.mark.parametrize(("device", "said"), [("cuda", "index 7 is out of bounds for 4"), ("cpu", "")])
def test_a_program_for_a_gpu_looks_before_it_computes(device: str, said: str) -> None:
    """On a CPU the kernel itself says it."""
    node = OperatorCall(name="e", op="aten.embedding.default", args=(Ref("w"), Ref("i")), kwargs={})
    program = Program([node], ["e"], torch.device(device))
    with pytest.raises(ProtocolError, match="cannot compute 'e'") as error:
        program.run({"w": X, "i": ids(7)}, Pass(None))
    assert said in error.value.why
