"""Computes steps of a run again: `python -m hetpeer.bootstrap.audit.one_machine DIR WORK OUT`.

WORK has segments (replay_script.py) as JSON. It computes block after block and microbatch after microbatch on
shapes of the run, and adds gradients in the order that the logs name. So on a machine of the volunteers' kind
each number is theirs to the last bit. OUT gets JSON lines: {"arithmetic"} (block/arithmetic.py); then, with
the number of their "segment", {"evaluation": version, "loss", "losses"}, and for each step {"step", "loss",
"norm", "squares", "coefficient", "gradients", "states", "losses", "sketches"}.

If a segment's `arithmetic` is this machine's, it ends after a step whose states are not the run's: later ones
could not be the run's either. Otherwise its bits cannot be the run's; it goes on, and writes its last states
into a folder beside OUT, for the comparison with bounds (rounding.py). With WORK's `rounds_once` it computes
as another processor might: orders are turned round, and each operator rounds once
(worker/exact_operators.py). With WORK's `noise`, a number, each parameter is moved by up to ROOM roundings
before each step, at random but alike for the same number.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from hetpeer.averaging.optim.outer_optimizer import outer_of
from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.averaging.reduce.tied_parameters import Ties
from hetpeer.bootstrap.audit.coded_borders import CodedBorders
from hetpeer.bootstrap.audit.folding import Folding
from hetpeer.bootstrap.audit.replay_script import ids_in_turn, reversed_order
from hetpeer.bootstrap.coordinator.step_ledger import clip_coefficient, weighted_mean
from hetpeer.bootstrap.run.durable_files import GrowingFile
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.bootstrap.storage.checkpoints import CheckpointStore
from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.file_pieces import FilePart, read
from hetpeer.stages.block.arithmetic import arithmetic_of
from hetpeer.stages.block.block_state import State, layout_of
from hetpeer.stages.block.exact_numerics import squared_norm
from hetpeer.stages.block.fingerprint import KEY_BYTES, fingerprint
from hetpeer.stages.block.parameter_groups import BlockRules, segments
from hetpeer.stages.block.rounding import ROOM, UNIT
from hetpeer.stages.block.state_file import StateFile, write_state
from hetpeer.stages.block.tensor_file import StoredTensor, read_constants
from hetpeer.stages.data.sample_weights import share
from hetpeer.stages.graph.block_spec import BlockSpec, TensorSpec
from hetpeer.stages.graph.interpreter import SYMBOLS
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.vector_commands import Apply
from hetpeer.stages.operators.own_operators import Pass
from hetpeer.stages.operators.random_draws import Draw
from hetpeer.stages.worker.exact_operators import RoundedOnce
from hetpeer.stages.worker.holding.held_block import HeldBlock
from hetpeer.stages.worker.holding.residence import Residence
from hetpeer.stages.worker.holding.stored_vector import InMemory
from hetpeer.stages.worker.microbatch_tasks import BlockPass, Gradients, backpropagate_block, run_blocks
from hetpeer.stages.worker.tensor_staging import NotFiniteError, refuse_not_finite

CPU = torch.device("cpu")
UNCODED = CodedBorders((), ())
NOISE_SEEDS = 1 << 10
"""Numbers that `noise` may have."""


def stored_states(run: RunDirectory, specs: Sequence[BlockSpec], base: Mapping[str, Any]) -> list[StateFile]:
    """States of the blocks `specs` in the checkpoint `base`."""
    store = CheckpointStore(run, run.layouts())
    return [store.state(base, spec.index) for spec in specs]


def digest_of_sum(total: Tensor) -> str:
    """Digest of a block's sum, as holders vote on it."""
    return blake3(total.numpy().data.cast("B")).hexdigest()


class OneMachine:
    """A run's model, of the blocks `specs`, with a copy of `states`."""

    def __init__(self, run: RunDirectory, specs: Sequence[BlockSpec], states: Sequence[State]) -> None:
        self._manifest = run.manifest
        self._training = run.manifest.training
        self._delays = run.manifest.delays
        self._data = run.batches()
        self._plan = run.weighted_plan()
        self._ties = Ties(run.manifest.ties)
        self._specs = specs
        constants = _constants(run, specs)
        outer = None if run.manifest.outer_rule is None else outer_of(run.manifest.outer_rule)
        groups = tuple((group.pattern, group.changes) for group in self._training.groups)
        self.blocks = [
            HeldBlock(
                spec,
                {name: constants[name] for name in spec.buffer_specs},
                state,
                BlockRules(
                    segments=segments(spec, self._training.update, groups, rule_of),
                    keeps=run.manifest.optimizer_state,
                    outer=outer,
                    ranges=self._ties.parts(spec.index, spec.parameter_count),
                ),
                Residence(device=CPU),
            )
            for spec, state in zip(specs, states, strict=True)
        ]

    def step(self, work: Mapping[str, Any], oldest: int, *, sketched: bool) -> dict[str, Any]:
        """Compute, add up and apply one step; versions from `oldest` on are kept for later ones.

        `sketched`: with a sketch of each block's gradient.
        """
        number, orders = work["step"], work["orders"]
        borders = CodedBorders(work["entered"], work["returned"])
        folding = [Folding(held, number, order) for held, order in zip(self.blocks, orders, strict=True)]
        losses, weights = {}, self._plan.training_weights(work["batch"])
        for microbatch in ids_in_turn(orders):
            passes, here = self._forward(number, work, microbatch, borders)
            losses[microbatch] = _loss(passes)[1].item()
            backward = self._backward(passes, microbatch, share(weights, microbatch), borders)
            for (_, gradients), fold in zip(backward, reversed(folding), strict=True):
                fold.add(microbatch, gradients, here)
        computable = [i for i in work["skipped"] if weights[i] and self._can_compute(number, work, i)]
        totals = self._tied([fold.total() for fold in folding])
        squares = list(map(self._squared_norm, range(len(totals)), totals))
        norm = math.sqrt(math.fsum(squares))
        coefficient = clip_coefficient(norm, self._training.clip_norm)
        for held, total in zip(self.blocks, totals, strict=True):
            held.update(InMemory(total), self._update(held.spec.index, work, coefficient, oldest))
        return {
            "step": number,
            "loss": weighted_mean(losses, dict(enumerate(weights))),
            "norm": norm,
            "squares": squares,
            "coefficient": coefficient,
            "gradients": list(map(digest_of_sum, totals)),
            "states": [held.digest() for held in self.blocks],
            "computable": computable,
            "losses": [losses[microbatch] for microbatch in sorted(losses)],
            "sketches": [_sketch(total) for total in totals] if sketched else [],
        }

    def disturb(self, key: int) -> None:
        """Move each parameter by up to ROOM roundings, at random but alike for the same `key`."""
        generator = torch.Generator().manual_seed(key)
        for held in self.blocks:
            parameters = held.vector.piece(0, held.spec.parameter_count)
            moved = torch.rand(len(parameters), generator=generator).mul_(2).sub_(1).mul_(ROOM * UNIT)
            parameters.add_(parameters * moved)

    def _can_compute(self, step: int, work: Mapping[str, Any], microbatch: int) -> bool:
        """Whether a volunteer could compute `microbatch`: nothing is refused, and all numbers are finite."""
        try:
            passes, _ = self._forward(step, work, microbatch)
            for one in passes:
                refuse_not_finite({"output": one.outputs})
            weights = self._plan.training_weights(work["batch"])
            for back, gradients in self._backward(passes, microbatch, share(weights, microbatch), UNCODED):
                given = {n: part for n, part in gradients.items() if part is not None}
                refuse_not_finite({"gradient": given, "gradient of input": back})
        except (ProtocolError, NotFiniteError):
            return False
        return True

    def evaluate(self, version: int, work: Mapping[str, Any], skipped: Sequence[int]) -> dict[str, Any]:
        """Held-out losses and hits as the step `work` measures them, from `version` on, without `skipped`."""
        losses, hits = {}, [0, 0]
        for microbatch in self._plan.evaluation:
            if microbatch not in skipped:
                passes, here = self._forward(version, work, microbatch)
                losses[microbatch] = _loss(passes)[1].item()
                hits = [total + part for total, part in zip(hits, here.hits or (0, 0), strict=True)]
        mean = weighted_mean(losses, self._plan.evaluation_weights)
        return {"evaluation": version, "loss": mean, "losses": list(losses.values()), "hits": hits}

    def save(self, folder: Path) -> None:
        """Write the present states as `block-N.safetensors` into the new `folder`."""
        folder.mkdir()
        for held in self.blocks:
            with GrowingFile(path := folder / f"block-{held.spec.index}.safetensors") as file:
                write_state(file, held, held.spec.index, layout_of(held.spec))
                file.keep(path)

    def _forward(
        self, step: int, work: Mapping[str, Any], microbatch: int, borders: CodedBorders = UNCODED
    ) -> tuple[list[BlockPass], Pass]:
        """The blocks' forwards, from bundles that are coded at `borders`."""
        train = microbatch < self._training.microbatches
        draw = Draw(self._manifest.seed, work["batch"], microbatch, self._training.microbatches)
        arrays = self._data.microbatch(work["batch"], microbatch)
        data = {name: torch.from_numpy(array) for name, array in arrays.items()}
        here = Pass(draw if train else None)
        weights = [
            held.weights(step - self._delays.behind(work["behind"], microbatch, block))
            for block, held in enumerate(self.blocks)
        ]
        size = self._training.samples_of(microbatch)
        passes: list[BlockPass] = []
        bundle: Mapping[str, Tensor] = {}
        for begin, end in pairwise([0, *borders.of(microbatch), len(self.blocks)]):
            if begin:
                bundle = borders.entering(begin, microbatch, passes[-1])
            passes += run_blocks(
                self.blocks[begin:end], weights[begin:end], bundle, data, size, here, train=train
            )
        return passes, here

    def _backward(
        self, passes: Sequence[BlockPass], microbatch: int, of_step: float, borders: CodedBorders
    ) -> Iterator[tuple[Mapping[str, Tensor], Gradients]]:
        """Gradients of the inputs and of the parameters, from the last block to the first.

        `of_step`: share of the microbatch's mean loss in the step's. Gradients of inputs are coded at
        `borders`.
        """
        name, loss = _loss(passes)
        back: Mapping[str, Tensor] = {name: torch.full_like(loss, of_step)}
        for one in reversed(passes):
            back, gradients = backpropagate_block(one, back, parameters=True)
            back = borders.returning(microbatch, one, back)
            yield back, gradients

    def _tied(self, totals: Sequence[Tensor]) -> list[Tensor]:
        """Gradients in which each tied parameter has the sum of its uses, in the order of the blocks."""
        found = [total.clone() for total in totals]
        for block, gradient in enumerate(found):
            for place, uses in self._ties.of(block):
                first, *others = (totals[use.block][use.begin : use.end] for use in uses)
                summed = first.clone()
                for other in others:
                    summed.add_(other)
                gradient[place.begin : place.end] = summed
        return found

    def _squared_norm(self, block: int, total: Tensor) -> float:
        ranges = self._ties.counted(block, self._specs[block].parameter_count)
        return math.fsum(squared_norm(total[begin:end]) for begin, end in ranges)

    def _update(self, block: int, work: Mapping[str, Any], coefficient: float, oldest: int) -> Apply:
        return Apply(
            block=block,
            gradient=Extent(0, 0),
            coefficient=coefficient,
            plan=0,
            batch=work["batch"],
            microbatches=self._training.microbatches,
            skipped=work["skipped"],
            needed=oldest,
            base=work["step"] - self._delays.behind(work["behind"], 0, block),
            compensation=self._training.compensation,
            workers=work["workers"],
        )


def _loss(passes: Sequence[BlockPass]) -> tuple[str, Tensor]:
    """Name and value of the last block's loss."""
    name = passes[-1].spec.loss
    assert name is not None
    return name, passes[-1].outputs[name]


def _sketch(vector: Tensor) -> str:
    """Hex of float32 numbers that are about as far from those of another vector as the two vectors are."""
    marks = fingerprint(vector.numpy(), 0, 0, bytes(KEY_BYTES))
    numbers: bytes = marks.reshape(4, -1).sum(axis=0).astype("<f4").tobytes()
    return numbers.hex()


def _constants(run: RunDirectory, blocks: Sequence[BlockSpec]) -> dict[str, Tensor]:
    """Name → buffer of every block."""
    found: dict[str, Tensor] = {}
    for block, entry in zip(blocks, run.manifest.blocks, strict=True):
        specs, path = block.buffer_specs, run.buffers_path(entry)
        if path is not None:
            stored = read_constants(FilePart.whole(path), specs)
            found |= {name: _tensor(stored[name], spec) for name, spec in specs.items()}
    return found


def _tensor(stored: StoredTensor, spec: TensorSpec) -> Tensor:
    dtype = SYMBOLS["dtype"][spec.dtype]
    raw = read(stored, 0, stored.nbytes)
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(spec.sizes)


def results(
    machine: OneMachine, work: Mapping[str, Any], noise: int | None, *, stops: bool
) -> Iterator[dict[str, Any]]:
    """Results of a segment, one by one, with that `noise` if any.

    `stops`: none after a step whose states are not the run's.
    """
    steps, wanted = work["steps"], dict(work["evaluations"])
    for at, step in enumerate(steps):
        if step["step"] in wanted:
            yield machine.evaluate(step["step"], step, wanted[step["step"]])
        if noise is not None:
            machine.disturb(step["step"] * NOISE_SEEDS + noise)
        later = [one["step"] - one["behind"] for one in steps[at + 1 :]]
        done = machine.step(step, min(later, default=step["step"] + 1), sketched=not stops)
        yield done
        if stops and done["states"] != step["states"]:
            return
    version = work["base"]["version"] + len(steps)
    if version in wanted:
        last = {"behind": 0, "batch": version}
        yield machine.evaluate(version, last, wanted[version])


def main(directory: Path, work_path: Path, out_path: Path) -> None:
    """Compute the segments of `work_path` one after the other, and write their results."""
    work = json.loads(work_path.read_text())
    torch.set_num_threads(work["threads"])
    arithmetic, run = arithmetic_of(CPU), RunDirectory.open(directory)
    specs = [run.block_spec(block) for block in run.manifest.blocks]
    with out_path.open("w") as out:
        out.write(json.dumps({"arithmetic": arithmetic}) + "\n")
        for number, segment in enumerate(work["segments"]):
            if work["rounds_once"]:
                for step in segment["steps"]:
                    step["orders"] = [reversed_order(order) for order in step["orders"]]
            machine = OneMachine(run, specs, stored_states(run, specs, segment["base"]))
            stops = segment["arithmetic"] == arithmetic
            with RoundedOnce() if work["rounds_once"] else nullcontext():  # type: ignore[no-untyped-call]
                for result in results(machine, segment, work["noise"], stops=stops):
                    out.write(json.dumps({"segment": number, **result}) + "\n")
            if not stops:
                machine.save(out_path.parent / str(number))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
