"""One training step by blocks that know nothing of each other: what the stage tests compare with the eager module."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hetpeer.stages.execution.block import Block, flat_views, run_range
from hetpeer.stages.graph.spec import BlockSpec
from hetpeer.stages.graph.wire import pack_block, unpack_block

CPU = torch.device("cpu")


def received(spec: BlockSpec, tensors: Mapping[str, Tensor]) -> tuple[Block, dict[str, Tensor]]:
    """The block as a volunteer gets it: through bytes, with parameters that are views into one flat vector."""
    spec = unpack_block(pack_block(spec))
    flat = torch.cat([torch.zeros(0), *(tensors[fqn].flatten() for fqn in spec.parameter_specs)])
    parameters = {fqn: view.requires_grad_() for fqn, view in flat_views(spec, flat).items()}
    buffers = {fqn: tensors[fqn] for fqn in spec.buffer_specs}
    return Block(spec, parameters, buffers, CPU), parameters


def split_step(
    specs: Sequence[BlockSpec],
    ranges: Sequence[tuple[int, int]],
    tensors: Mapping[str, Tensor],
    data: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one microbatch; ranges are stages, and only detached tensors cross between them."""
    sent: dict[str, Tensor] = {}
    stages, parameters = [], {}
    for begin, end in ranges:
        blocks = []
        for spec in specs[begin:end]:
            block, mine = received(spec, tensors)
            blocks.append(block)
            parameters.update(mine)
        entering = {
            name: sent[name].detach().clone().requires_grad_(spec.grad)
            for name, spec in specs[begin].inputs.items()
        }
        sent = run_range(blocks, entering, data)
        stages.append((entering, sent))
    (loss,) = sent.values()
    gradients = {name: torch.ones_like(loss) for name in sent}
    for entering, leaving in reversed(stages):
        ends = [name for name, tensor in leaving.items() if tensor.requires_grad]
        torch.autograd.backward([leaving[name] for name in ends], [gradients[name] for name in ends])
        gradients = {name: tensor.grad for name, tensor in entering.items() if tensor.requires_grad}
    return loss.detach(), {fqn: parameter.grad for fqn, parameter in parameters.items()}


def eager_step(model: nn.Module, data: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = model(**data)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(
    split: tuple[Tensor, Mapping[str, Tensor | None]],
    eager: tuple[Tensor, Mapping[str, Tensor | None]],
    tolerance: float = 1e-6,
) -> None:
    """Losses and each parameter's gradient agree to a relative `tolerance` of the largest element."""
    assert split[1].keys() == eager[1].keys()
    assert (split[0] - eager[0]).abs() <= tolerance * eager[0].abs()
    for name, expected in eager[1].items():
        gradient = split[1][name]
        assert gradient is not None, name
        assert (gradient - expected).abs().max() <= tolerance * expected.abs().max(), name
