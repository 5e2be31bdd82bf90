"""The memory of a block range, as predicted, is what a real forward and backward pass on the CPU takes."""

import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetpeer.stages.block.block import run_range
from hetpeer.stages.block.offload import Offload
from hetpeer.stages.graph.graph_cost import activation_bytes
from hetpeer.stages.graph.parameter_reads import cast_count, without_copies
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.pipeline.place_memory import Upkeep
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.worker.memory_footprint import footprint, stage_memory
from tests.amounts import mostly_proof
from tests.stages.split_run import draw, received
from tests.stages.zoo import zoo

pytestmark = pytest.mark.xdist_group("zoo")

TOLERANCE = 0.15
TWO = Upkeep(kept=2)
MODELS = ["gpt", "transformers llama", "resnet", "mlp"]
MODES = {"plain": ComputeMode(), "recompute": ComputeMode(recompute=True), "bf16": ComputeMode(autocast=True)}


class Storages(TorchDispatchMode):
    """Bytes of the storages that are alive, whoever made them, but those of `apart`."""

    def __init__(self, apart):
        super().__init__()
        self.apart = {id(tensor.untyped_storage()) for tensor in apart}
        self.alive = weakref.WeakValueDictionary()
        self.most = 0

    def see(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self.apart:
                self.alive[id(tensor.untyped_storage())] = tensor.untyped_storage()
        self.most = max(self.most, self.bytes())

    def bytes(self):
        return sum(storage.nbytes() for storage in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.see(tree_leaves(result))
        return result


def random(spec):
    dtype = getattr(torch, spec.dtype)
    made = torch.randn(spec.sizes) if dtype.is_floating_point else torch.zeros(spec.sizes)
    return made.to(dtype).requires_grad_(spec.grad)


def really(specs, tensors, data):
    """Bytes between forward and backward, and the most at any time, of a real pass as the worker does it."""
    batch = specs[0].batch
    held = [received(spec, tensors) for spec in specs]
    leaves = [leaf for _, parameters in held for leaf in parameters.values()]
    owned = [tensor for block, _ in held for tensor in block._owned.values()]
    with Storages(owned) as storages:

        def forward():
            inputs = {name: random(spec) for name, spec in specs[0].at(batch).inputs.items()}
            own_data = {name: data[name].clone() for spec in specs for name in spec.data}
            return inputs, run_range([block for block, _ in held], inputs, own_data, batch, Pass(draw()))

        inputs, outputs = forward()
        kept = storages.bytes()
        roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
        seeds = [torch.ones_like(tensor) for tensor in roots]
        leaves += [tensor for tensor in inputs.values() if tensor.requires_grad]
        gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        assert any(gradient is not None for gradient in gradients)
    return kept, storages.most


HERE = [("gpt", mode) for mode in MODES] + [("resnet", "plain"), ("mlp", "plain")]
EVERY = pytest.mark.parametrize(("name", "mode"), mostly_proof(itertools.product(MODELS, MODES), HERE))


@EVERY
def test_a_stage_takes_what_was_predicted(name, mode):
    _, dag, microbatches = zoo(name)
    blocks = cut_blocks(dag, 4, MODES[mode])
    for begin, end in [(0, 4), (0, 2), (2, 3), (2, 4)]:
        stage = blocks[begin:end]
        kept, peak = really(stage, dag.tensors, microbatches[0])
        predicted = footprint(stage)
        assert abs(predicted.kept / kept - 1) <= TOLERANCE
        assert abs(predicted.peak / peak - 1) <= TOLERANCE


@EVERY
def test_the_activations_of_a_block_are_what_is_kept_but_for_what_left(name, mode):
    """What left is what entered the next block, or the loss."""
    _, dag, _ = zoo(name)
    for block in cut_blocks(dag, 4, MODES[mode]):
        left = sum(spec.nbytes for spec in block.at(block.batch).outputs.values())
        kept = footprint([block]).kept
        assert kept - left <= activation_bytes(block) * (1 + TOLERANCE)
        assert activation_bytes(block) <= kept * (1 + TOLERANCE)


def test_recomputation_keeps_little_and_its_peak_is_one_block():
    _, dag, _ = zoo("gpt")
    plain, again = footprint(cut_blocks(dag)), footprint(cut_blocks(dag, mode=ComputeMode(recompute=True)))
    assert again.kept < 0.1 * plain.kept
    assert again.kept < again.peak < 0.6 * plain.peak


def test_a_stage_holds_its_state_and_the_microbatches_in_flight():
    _, dag, _ = zoo("gpt")
    stage = cut_blocks(dag)[1:3]
    one = footprint(stage)
    parameters = sum(block.parameter_bytes for block in stage)
    memory = stage_memory(stage, 2, TWO)
    assert (memory.state, memory.optimizer, memory.slots) == (parameters, 2 * parameters, 3 * parameters)
    assert (memory.in_flight, memory.waiting, memory.working) == (5, 4 * one.kept, one.peak)
    assert memory.total == 7 * parameters + 4 * one.kept + one.peak
    assert stage_memory(stage, 2, TWO, microbatches=3).in_flight == 3
    assert stage_memory(stage, 0, TWO).waiting == 0


def test_constants_and_running_statistics_belong_to_the_state():
    _, dag, _ = zoo("resnet")
    blocks = cut_blocks(dag)
    vectors = 4 * sum(block.vector_count for block in blocks)
    assert vectors > sum(block.parameter_bytes for block in blocks)
    memory = stage_memory(blocks, 0, TWO)
    assert (memory.state, memory.slots) == (vectors, 3 * vectors)
    _, dag, _ = zoo("frozen")
    (block,) = cut_blocks(dag, 1)
    constants = sum(spec.nbytes for spec in block.buffer_specs.values())
    assert constants
    assert stage_memory([block], 0, TWO).state == block.parameter_bytes + constants


def test_weights_that_are_kept_in_bfloat16_have_no_copies_in_microbatches():
    """Autocast makes one for each microbatch, and autograd keeps it."""
    _, dag, _ = zoo("gpt")
    stage = cut_blocks(dag, mode=ComputeMode(autocast=True))[1:3]
    halved = sum(map(cast_count, stage))
    plain, cast = footprint(stage), footprint(stage, cast=True)
    copies = plain.kept - cast.kept
    assert 0.95 * 2 * halved < copies <= 2 * halved, "all but those of biases"
    held = [without_copies(spec) for spec in stage]
    assert sum(spec.activation_bytes for spec in stage) - sum(s.activation_bytes for s in held) == copies
    again = stage[0].recomputing()
    assert without_copies(again) is again
    one, other = (stage_memory(stage, 2, TWO, casts=casts).demand for casts in (True, False))
    assert (one.halved, other.halved, other.copies) == (halved, 0, 0)
    rooms = [demand.room(Offload.HOST, apart=True) for demand in (one, other)]
    weights = 4 * one.numbers
    less = rooms[1].device - rooms[0].device
    assert less == pytest.approx(4 * halved + 4 * copies, rel=0.02), "weights, gradient, four that wait"
    assert rooms[0].device > weights - 2 * halved
    assert one.room(Offload.NONE, apart=True) == other.room(Offload.NONE, apart=True)
