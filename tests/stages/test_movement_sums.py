"""The sum of sparse movements: where a cluster has sent nothing it counts for a part of those that have."""

import numpy as np
import pytest
import torch

from hetpeer.stages.ipc import vector_commands as v
from hetpeer.stages.ipc.arena import Arena
from hetpeer.stages.worker.movement_sums import UNSENT, summed_movements
from hetpeer.stages.worker.vector_sums import PIECE
from tests.stages.compute_rig import Holder, cpu_engine, submitter, tiny_blocks


def drawn(seed: int, count: int, kept: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(count, generator=generator)
    return flat * (torch.rand(count, generator=generator) < kept)


def plain(parts: list[np.ndarray]) -> list[np.float32]:
    """The same, number by number, in float32."""
    found = []
    for numbers in zip(*parts, strict=True):
        total, sent = np.float32(numbers[0]), sum(number != 0 for number in numbers)
        for number in numbers[1:]:
            total += number
        factor = 1.0 + UNSENT * (len(parts) / sent - 1.0) if sent else 1.0
        found.append(total * np.float32(factor))
    return found


@pytest.mark.parametrize("clusters", [1, 2, 3, 5, 8])
def test_it_is_what_a_plain_computation_gives(clusters: int) -> None:
    parts = [drawn(number, 500, 0.4) for number in range(clusters)]
    expected = np.array(plain([part.numpy() for part in parts]), np.float32)
    assert summed_movements(parts).numpy().tobytes() == expected.tobytes()


def test_what_all_have_sent_is_their_sum_and_what_nobody_has_is_zero() -> None:
    parts = [torch.tensor([float(number), 0.0]) for number in (1, 2, 4)]
    assert summed_movements(parts).tolist() == [7.0, 0.0]
    alone = [torch.tensor([1.0]), torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    assert summed_movements(alone).tolist() == [1.0 + 3 * UNSENT]


async def test_a_worker_sums_movements_piece_by_piece(arena: Arena) -> None:
    holder = Holder(submitter(cpu_engine(arena)), arena, tiny_blocks())
    parts = [drawn(number, 2 * PIECE + 9, 0.01) for number in range(3)]
    extents = tuple(holder.put(part.numpy()) for part in parts)
    command = v.SumVectors(parts=extents, into=extents[0], elements=len(parts[0]), movements=True)
    assert (await holder.submit(command)).unsound == ()
    assert holder.floats(extents[0]).tobytes() == summed_movements(parts).numpy().tobytes()
