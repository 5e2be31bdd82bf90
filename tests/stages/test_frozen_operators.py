"""Frozen tensors in fewer bytes: how far they are rounded, what is refused, and what autograd keeps."""

import pytest
import torch
from torch import Tensor, nn

from hetpeer.stages.operators.frozen_operators import FAMILY, FROM_INT4, FROM_INT8, GROUP, WIDEN
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.stored_base import FORMS, packed, restored, stored, unpacked
from hetpeer.stages.tracing.trace import OpDag, trace
from hetpeer.stages.worker.exact_operators import RoundedOnce
from hetpeer.stages.worker.memory_footprint import footprint
from tests.stages.split_run import assert_same_step, eager_step, split_step

WIDTH = 24


class Base(nn.Module):
    """A frozen table, convolution and layers, and between them layers that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, 5)
        self.back = nn.Linear(5, WIDTH)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, tokens: Tensor, y: Tensor) -> Tensor:
        x = self.table(tokens)
        x = torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2)
        for _ in range(3):
            x = x + torch.tanh(self.first(x) + self.up(self.down(x)))
            x = x + torch.tanh(self.back(self.odd(x)))
        x = x @ self.last.weight + self.last.bias
        return ((x - y) ** 2).mean()


def microbatches() -> list[dict[str, Tensor]]:
    return [
        {"tokens": torch.randint(0, 40, (samples, 6)), "y": torch.randn(samples, 6, WIDTH)}
        for samples in (4, 3)
    ]


def rounded(form: str, *, autocast: bool = False) -> tuple[nn.Module, OpDag, OpDag, list[dict[str, Tensor]]]:
    """The model with rounded numbers, its graph as it was, the stored graph, and microbatches."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, data = Base(), microbatches()
    dag = trace(model, data[0], autocast=autocast)
    frozen = {name: one for name, one in model.named_parameters() if not one.requires_grad}
    small = stored(dag, frozen.keys(), form)
    with torch.no_grad():
        for name, tensor in restored(small.tensors).items():
            if name in frozen and name not in small.tensors:
                frozen[name].copy_(tensor)
    return model, dag, small, data


@pytest.mark.parametrize("shape", [(3, 64), (7, 6), (5, 2, 10), (1, 2), (2, 200)])
@pytest.mark.parametrize("form", FORMS)
def test_a_number_moves_by_at_most_half_a_step(form: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    tensor[0] = 0
    again = unpacked(packed(tensor, form))
    assert again.shape == tensor.shape
    if form == "bf16":
        assert ((again - tensor).abs() <= tensor.abs() * 2**-8).all()
        return
    steps = packed(tensor, form)["scales"].repeat_interleave(GROUP)[: tensor.numel()].view(shape)
    assert ((again - tensor).abs() <= steps * 0.501).all()


def test_all_whole_numbers_of_a_form_come_back() -> None:
    for form, largest in (("int8", 127), ("int4", 7)):
        numbers = torch.arange(-largest, largest + 1, dtype=torch.float32)
        groups = [
            torch.cat([part, torch.full((GROUP - len(part),), largest)]) for part in numbers.split(GROUP - 1)
        ]
        row = torch.cat(groups).view(1, -1) / largest
        assert torch.allclose(unpacked(packed(row, form)), row, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_with_a_stored_base_are_the_rounded_module(form: str) -> None:
    model, _, small, data = rounded(form)
    blocks = cut_blocks(small, 3)
    ranges = [(i, i + 1) for i in range(len(blocks))]
    assert_same_step(split_step(blocks, ranges, small.tensors, data), eager_step(model, data), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_autograd_keeps_no_float_weight(form: str) -> None:
    """Between forward and backward as much is kept as with a float32 base, whose weights the block owns."""
    _, dag, small, _ = rounded(form)
    plain, own = cut_blocks(dag, 2), cut_blocks(small, 2)
    assert [block.activation_bytes for block in own] == [block.activation_bytes for block in plain]
    assert footprint(own).kept == footprint(plain).kept
    largest = max(parameter.numel() for parameter in Base().parameters())
    assert footprint(own).peak <= footprint(plain).peak + 3 * 4 * largest
    bytes_of = [sum(one.nbytes for one in block.buffer_specs.values()) for block in (plain[0], own[0])]
    assert bytes_of[1] < 0.6 * bytes_of[0]


@pytest.mark.parametrize("form", FORMS)
def test_recomputation_changes_no_bit(form: str) -> None:
    _, _, small, data = rounded(form)
    kept = split_step(cut_blocks(small, 2), [(0, 2)], small.tensors, data)
    again = cut_blocks(small, 2, ComputeMode(recompute=True))
    redone = split_step(again, [(0, 2)], small.tensors, data)
    assert redone.loss.equal(kept.loss)
    assert all(redone.gradients[name].equal(gradient) for name, gradient in kept.gradients.items())


@pytest.mark.parametrize("form", FORMS)
def test_a_checker_measures_rounding_of_a_stored_base(form: str) -> None:
    """Operators that round once give nearly the same numbers; the weights themselves are the same bits."""
    _, _, small, data = rounded(form)
    blocks = cut_blocks(small, 2)
    usual = split_step(blocks, [(0, 2)], small.tensors, data)
    with RoundedOnce():
        exact = split_step(blocks, [(0, 2)], small.tensors, data)
    assert_same_step(exact, usual, 1e-5)


def test_products_of_a_bf16_run_get_bfloat16() -> None:
    """Autocast would make it of float32, and autograd would keep it."""
    model, _, small, data = rounded("int8", autocast=True)
    products = {node.name: node.args[-1] for node in small.nodes if node.op in FAMILY}
    assert [name for name, product in products.items() if not product] == ["p_table_weight"]
    blocks = cut_blocks(small, 2, ComputeMode(autocast=True))
    split, eager = split_step(blocks, [(0, 2)], small.tensors, data), eager_step(model, data)
    assert abs(split.loss - eager.loss) < 0.02 * eager.loss
    plain = cut_blocks(trace(Base(), data[0], autocast=True), 2, ComputeMode(autocast=True))
    assert sum(block.activation_bytes for block in blocks) < sum(block.activation_bytes for block in plain)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (WIDEN, (torch.zeros(4, 4),)),
        (WIDEN, (torch.tensor(1.0, dtype=torch.bfloat16),)),
        (FROM_INT8, (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(3))),
        (FROM_INT8, (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 1))),
        (FROM_INT8, (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2).double())),
        (FROM_INT8, (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2))),
        (FROM_INT4, (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2))),
        (FROM_INT4, (torch.zeros((), dtype=torch.uint8), torch.zeros(1))),
    ],
)
def test_what_is_no_stored_tensor_is_refused(device: str, op: str, arguments: tuple[Tensor, ...]) -> None:
    with pytest.raises(ValueError, match=r"stored tensor|float32 scales"):
        FAMILY[op].run(*(one.to(device) for one in arguments), False)
