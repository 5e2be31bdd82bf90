"""One training step by blocks that know nothing of each other: what the stage tests compare with the eager
module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hetpeer.bootstrap.model_checks.drawn_dropout import DrawnDropout
from hetpeer.stages.block.block import Block, flat_views, run_range, statistic_views
from hetpeer.stages.graph.block_spec import BlockSpec
from hetpeer.stages.graph.block_wire import pack_block
from hetpeer.stages.graph.safety_check import unpack_block
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.worker.holding.running_statistics import RunningStatistics

CPU = torch.device("cpu")
SEED, STEP = 11, 3
Data = Mapping[str, Tensor]


def draw(number: int = 0, of: int = 1) -> Draw:
    return Draw(SEED, STEP, number, of)


def samples(data: Data) -> int:
    return next(iter(data.values())).shape[0]


def received(
    spec: BlockSpec, tensors: Mapping[str, Tensor], device: torch.device = CPU
) -> tuple[Block, dict[str, Tensor]]:
    """The block as a volunteer gets it: through bytes, with parameters that are views into one flat
    vector.
    """
    spec = unpack_block(pack_block(spec))
    owned = (*spec.parameter_specs, *spec.statistic_specs)
    flat = torch.cat([torch.zeros(0), *(tensors[fqn].flatten() for fqn in owned)]).to(device)
    parameters = {fqn: view.requires_grad_() for fqn, view in flat_views(spec, flat).items()}
    buffers = {fqn: tensors[fqn].to(device) for fqn in spec.buffer_specs}
    statistics = statistic_views(spec, flat[spec.parameter_count :])
    return Block(spec, parameters, buffers, statistics, device), parameters


@dataclass
class Outcome:
    """What a step of several microbatches comes to."""

    loss: Tensor
    gradients: dict[str, Tensor]
    statistics: dict[str, Tensor] = field(default_factory=dict)


def split_step(
    specs: Sequence[BlockSpec],
    ranges: Sequence[tuple[int, int]],
    tensors: Mapping[str, Tensor],
    microbatches: Sequence[Data],
    device: torch.device = CPU,
) -> Outcome:
    """A step of the cut model; ranges are stages, and only detached tensors cross between them."""
    stages = [[received(spec, tensors, device) for spec in specs[begin:end]] for begin, end in ranges]
    total = sum(map(samples, microbatches))
    loss = torch.zeros(())
    passes = [Pass(draw(number, len(microbatches))) for number in range(len(microbatches))]
    for here, data in zip(passes, microbatches, strict=True):
        weight = samples(data) / total
        data = {name: tensor.to(device) for name, tensor in data.items()}  # noqa: PLW2901
        loss += weight * _task([[block for block, _ in stage] for stage in stages], data, here, weight).cpu()
    gradients: dict[str, Tensor] = {}
    for _, parameters in (held for stage in stages for held in stage):
        for name, parameter in parameters.items():
            if parameter.grad is not None:  # a tied parameter has a gradient in several blocks
                gradients[name] = gradients.get(name, 0) + parameter.grad.cpu()
    return Outcome(loss, gradients, _statistics(specs, tensors, passes))


def _statistics(
    specs: Sequence[BlockSpec], tensors: Mapping[str, Tensor], passes: Sequence[Pass]
) -> dict[str, Tensor]:
    """Running values after the step, as the worker updates them."""
    after = {}
    for spec in specs:
        running = RunningStatistics(spec)
        flat = torch.cat([torch.zeros(0), *(tensors[fqn].flatten() for fqn in spec.statistic_specs)])
        added = torch.zeros_like(flat)
        for here in passes:
            weighted = running.weighted(here)
            own = (weighted[fqn].flatten().cpu() for fqn in spec.statistic_specs)
            added += torch.cat([torch.zeros(0), *own])
        running.update(flat, added, len(passes))
        after |= statistic_views(spec, flat)
    return after


def _task(stages: Sequence[Sequence[Block]], data: Data, here: Pass, weight: float) -> Tensor:
    """Forward and backward of one microbatch; returns its loss."""
    batch = samples(data)
    sent: dict[str, Tensor] = {}
    passed = []
    for blocks in stages:
        entering = {
            name: sent[name].detach().clone().requires_grad_(spec.grad)
            for name, spec in blocks[0].spec.inputs.items()
        }
        sent = run_range(blocks, entering, data, batch, here)
        passed.append((entering, sent))
    (loss,) = sent.values()
    gradients = {name: torch.full_like(loss, weight) for name in sent}
    for entering, leaving in reversed(passed):
        ends = [name for name, tensor in leaving.items() if tensor.requires_grad]
        torch.autograd.backward([leaving[name] for name in ends], [gradients[name] for name in ends])
        gradients = {
            # As the worker does: none came back for what only a region without gradients reads from here on.
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in entering.items()
            if tensor.requires_grad
        }
    return loss.detach()


def eager_step(model: nn.Module, microbatches: Sequence[Data]) -> Outcome:
    """The same step by the author's module, with gradients accumulated.

    Its buffers are put back afterwards.
    """
    model.train()
    model.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = sum(map(samples, microbatches))
    loss = torch.zeros(())
    for number, data in enumerate(microbatches):
        with DrawnDropout(draw(number, len(microbatches))):
            part = model(**data) * (samples(data) / total)
        part.backward()
        loss += part.detach()
    statistics = {}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            statistics[name] = buffer.clone()
            buffer.copy_(before[name])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(loss, gradients, statistics)


def assert_same_step(split: Outcome, eager: Outcome, tolerance: float = 1e-6) -> None:
    """Losses, each parameter's gradient and all running values agree to a relative `tolerance` of the
    largest element.
    """
    assert split.gradients.keys() == eager.gradients.keys()
    assert (split.loss - eager.loss).abs() <= tolerance * eager.loss.abs()
    for mine, theirs in (
        *((split.gradients[name], gradient) for name, gradient in eager.gradients.items()),
        *((value, eager.statistics[name]) for name, value in split.statistics.items()),
    ):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()
