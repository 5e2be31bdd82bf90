"""Real worker processes: training through commands is bit for bit plain autograd, and deaths are noticed."""

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import uvloop

from hetpeer.averaging.optim.update_rules import rule_of
from hetpeer.bootstrap.coordinator.step_ledger import clip_coefficient
from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.stages.block.state_file import load
from hetpeer.stages.ipc import worker_process
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.block_commands import Decode, DropTask, Encode, Info, Shutdown, Unload, WarmUp
from hetpeer.stages.ipc.compute import Compute, ComputeConfig
from hetpeer.stages.ipc.vector_commands import InspectVector
from hetpeer.stages.ipc.worker_messages import CommandFailedError, Done
from hetpeer.stages.ipc.worker_process import WorkerDiedError
from hetpeer.stages.worker.executor import Executor
from hetpeer.stages.worker.worker_loop import KILLED_FIRST
from tests.stages.compute_rig import KEPT, UPDATE, Holder, layout, microbatch, norm, tiny_blocks, tiny_gpt

WORKER = "hetpeer.averaging.worker_main"
CONFIG = ComputeConfig(device="cpu", nice=0, arena_bytes=32 << 20)
STEPS, MICROBATCHES, SLOT = 3, 4, 2
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MANY, SOON_S = 400, 10.0
"""So many times measuring how fast the machine is takes more than a minute, whatever the machine; and what
is far below that and LAST_WORDS_S.
"""


def plain_training():
    """One process, autograd and AdamW; gradients are summed slot by slot as the two holders do."""
    model = tiny_gpt()
    blocks = tiny_blocks()
    parameters = dict(model.named_parameters())
    rule = rule_of(UPDATE)
    flats = [torch.cat([parameters[n].detach().ravel() for n in b.parameter_specs]) for b in blocks]
    moments = [(torch.zeros_like(flat), torch.zeros_like(flat)) for flat in flats]
    losses = []
    for step in range(STEPS):
        slots = []
        for number in range(MICROBATCHES):
            loss = model(**microbatch(step * MICROBATCHES + number))
            losses.append(loss.item())
            found = torch.autograd.grad(
                loss, list(parameters.values()), grad_outputs=torch.tensor(1 / MICROBATCHES)
            )
            gradient = dict(zip(parameters, found, strict=True))
            if number % SLOT == 0:
                slots.append(gradient)
            else:
                slots[-1] = {name: slots[-1][name] + gradient[name] for name in gradient}
        total = {name: slots[0][name] + slots[1][name] for name in parameters}
        vectors = [torch.cat([total[n].ravel() for n in b.parameter_specs]) for b in blocks]
        length = float(torch.sqrt(sum(v.double().square().sum() for v in vectors)))
        for flat, (first, second), vector, block in zip(flats, moments, vectors, blocks, strict=True):
            rule.apply(
                parameters=flat,
                state={"exp_avg": first, "exp_avg_sq": second},
                gradient=vector,
                coefficient=clip_coefficient(length, 0.5),
                update=step + 1,
                step=step + 1,
            )
            at = 0
            for name, spec in block.parameter_specs.items():
                parameters[name].data.copy_(flat[at : at + spec.count].view(spec.shape))
                at += spec.count
    return losses, [np.concatenate([flat, *pair]) for flat, pair in zip(flats, moments, strict=True)]


async def train_by_commands(front: Holder, back: Holder):
    losses = []
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            task, slot = f"{step}:{number}", number // SLOT
            sent, _, data = await front.forward(task, step * MICROBATCHES + number)
            inputs = {name: back.put(bytes(front.arena.view(extent))) for name, extent in sent.items()}
            _, loss, targets = await back.forward(task, step * MICROBATCHES + number, inputs)
            losses.append(loss)
            returned = await back.backward(task, slot, weight=1 / MICROBATCHES)
            gradients = {name: front.put(bytes(back.arena.view(e))) for name, e in returned.items()}
            await front.backward(task, slot, gradients)
            front.release(sent, data, gradients)
            back.release(inputs, targets, returned)
        sums = []
        for holder in (front, back):
            await holder.merge(source=1, target=0)
            sums += [(holder, spec, await holder.export(spec, 0)) for spec in holder.blocks]
        inspected = [await holder.inspect(extent) for holder, _, extent in sums]
        assert all(one.finite for one in inspected)
        coefficient = clip_coefficient(norm(inspected), 0.5)
        assert coefficient < 1, "the test is to cover clipping"
        for holder, spec, extent in sums:
            applied = await holder.apply(spec, extent, coefficient)
            assert applied.version == step + 1
            holder.release(extent)
    return losses


async def test_two_workers_train_bit_for_bit_as_plain_autograd():
    torch.set_num_threads(1)
    model = tiny_gpt()
    blocks = tiny_blocks()
    computes = await asyncio.gather(*(Compute.start(CONFIG, WORKER) for _ in range(2)))
    try:
        holders = [
            Holder(compute.submit, compute.arena, part, compute.exchange)
            for compute, part in zip(computes, (blocks[:1], blocks[1:]), strict=True)
        ]
        for holder in holders:
            await holder.load(model)
        losses = await train_by_commands(*holders)
        expected_losses, expected = plain_training()
        assert losses == expected_losses
        for holder in holders:
            for spec in holder.blocks:
                state = load(await holder.state(spec.index), spec.index, layout(spec), KEPT)
                assert state.version == STEPS
                found = np.concatenate(list(state.vectors().values()))
                assert found.tobytes() == expected[spec.index].tobytes(), f"block {spec.index} differs"
            assert holder.arena.used == 0
    finally:
        for compute in computes:
            await compute.close()


@pytest.fixture
async def compute():
    started = await Compute.start(CONFIG, WORKER)
    yield started
    await started.close()


async def test_pieces_are_looked_at_each(compute):
    extent = compute.arena.allocate(12)
    compute.arena.view(extent)[:] = np.array([3, 4, np.inf], dtype=np.float32).tobytes()
    both, last = (Extent(offset=extent.offset + at, nbytes=length) for at, length in ((0, 8), (8, 4)))
    look = InspectVector(extent=extent, elements=3, normed=(), pieces=(both, last))
    seen = await compute.submit(look)
    again = await compute.submit(InspectVector(extent=both, elements=2, normed=((0, 2),)))
    assert not seen.finite
    assert seen.pieces[0] == (again.digest, True)
    assert seen.pieces[1][1] is False


async def test_each_group_of_elements_has_a_norm(compute):
    extent = compute.arena.allocate(16)
    compute.arena.view(extent)[:] = np.array([1, 2, 3, 4], dtype=np.float32).tobytes()
    groups = (((0, 1), (2, 3)), (), ((3, 4),))
    seen = await compute.submit(InspectVector(extent=extent, elements=4, normed=((0, 4),), groups=groups))
    assert (seen.squared_norm, seen.group_squares) == (30, (10, 0, 16))


@pytest.mark.parametrize("threads", [1, 3])
async def test_coding_takes_no_more_than_a_thread_each_way(threads):
    """A microbatch is computed by so many threads; two more code bundles meanwhile, not as many again."""
    count, config = 1 << 18, replace(CONFIG, threads=threads)
    compute = await Compute.start(config, WORKER)
    try:
        process = psutil.Process(compute.workers[0].pid)
        plain, into, back = (compute.arena.allocate(4 * count) for _ in range(3))
        compute.arena.view(plain)[:] = np.random.default_rng(0).standard_normal(count, np.float32).tobytes()
        idle = process.num_threads()
        tensors = (("float32", plain),)
        written = await compute.submit(Encode(codec="int8", share=1.0, tensors=tensors, into=into))
        data = Extent(offset=into.offset, nbytes=written.nbytes)
        decode = Decode(codec="int8", written=written.written, data=data, tensors=(("float32", back),))
        assert await compute.submit(decode) == Done()
        assert process.num_threads() == idle
        assert (await compute.submit(Info())).threads == threads
        await compute.submit(WarmUp())
        assert process.num_threads() == idle + threads - 1, "those that compute"
    finally:
        await compute.close()


async def test_answers_come_in_order_until_the_worker_leaves(compute):
    extent = compute.arena.allocate(8)
    compute.arena.view(extent)[:] = np.array([3, 4], dtype=np.float32).tobytes()
    answers = await asyncio.gather(
        compute.submit(DropTask(step=0, task="nobody")),
        compute.submit(
            InspectVector(extent=extent, elements=3, normed=())
        ),  # a bad command is only an answer
        compute.submit(InspectVector(extent=extent, elements=2, normed=((0, 2),))),
        compute.submit(Unload(block=-1)),  # nor does the schema end the worker
        compute.submit(Info()),
        return_exceptions=True,
    )
    assert answers[0] == Done()
    assert isinstance(answers[1], CommandFailedError)
    assert answers[1].code == "HP-WORK-001"
    assert (answers[2].squared_norm, answers[2].finite, answers[2].pieces) == (25.0, True, ())
    assert isinstance(answers[3], CommandFailedError)
    assert answers[3].code == "HP-WIRE-001"
    assert answers[4].threads == 1
    assert compute.pending == 0

    cancelled = asyncio.create_task(compute.submit(WarmUp()))
    await asyncio.sleep(0)
    after = asyncio.create_task(compute.submit(Info()))
    await asyncio.sleep(0)
    assert compute.pending == 2
    cancelled.cancel()
    assert (await after).device == "cpu", "a cancelled caller shifts the answers"

    assert await compute.submit(Shutdown()) == Done()
    async with asyncio.timeout(worker_process.LAST_WORDS_S):
        assert (await compute.died()).status == 0


def test_kill_fails_what_is_pending_at_once_and_ctrl_c_does_not():
    async def main():
        compute = await Compute.start(CONFIG, WORKER)
        os.kill(compute.workers[0].pid, signal.SIGINT)
        assert (await compute.submit(Info())).tasks == 0
        pending = [asyncio.create_task(compute.submit(WarmUp())) for _ in range(MANY)]
        await asyncio.sleep(0.05)
        killed = time.monotonic()
        os.kill(compute.workers[0].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*pending, return_exceptions=True)
            error = await compute.died()
        assert time.monotonic() - killed < SOON_S
        assert all(isinstance(answer, WorkerDiedError) for answer in answers)
        assert error.status == -signal.SIGKILL
        assert "HP-GPU-001: the compute worker ended with signal 9 (Killed)" in error.line()
        with pytest.raises(WorkerDiedError):
            await compute.submit(Info())
        await compute.close()

    uvloop.run(main())  # the loop that the daemon uses; the other tests run on asyncio's own


async def test_close_ends_a_busy_worker_in_time(monkeypatch):
    monkeypatch.setattr(worker_process, "CLOSE_S", 0.3)
    compute = await Compute.start(CONFIG, WORKER)
    busy = [asyncio.create_task(compute.submit(WarmUp())) for _ in range(MANY)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await compute.close()
    assert time.monotonic() - began < SOON_S
    answers = await asyncio.gather(*busy, return_exceptions=True)
    assert isinstance(answers[-1], WorkerDiedError)
    with pytest.raises(ProcessLookupError):
        os.kill(compute.workers[0].pid, 0)  # reaped


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="the kernel gives no huge pages"
)
async def test_large_tensors_of_a_worker_lie_in_huge_pages():
    """A tensor under a worker's environment, in a child of the same environment."""
    compute = await Compute.start(CONFIG, WORKER)
    environment = psutil.Process(compute.workers[0].pid).environ()
    await compute.close()
    program = (
        "import torch\n"
        "tensor = torch.ones(64 << 18)\n"
        "lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('AnonHugePages')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) >= 32 << 10


async def test_a_worker_dies_before_its_daemon_if_the_system_has_no_memory(compute):
    own, workers = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in ("self", compute.workers[0].pid)
    )
    assert own < KILLED_FIRST == workers


async def test_a_suspended_worker_stands_still_and_is_killed_at_once(monkeypatch):
    monkeypatch.setattr(worker_process, "CLOSE_S", 60.0)
    compute = await Compute.start(CONFIG, WORKER)
    busy = [asyncio.create_task(compute.submit(WarmUp())) for _ in range(MANY)]
    await asyncio.sleep(0.05)
    compute.suspend()
    process = psutil.Process(compute.workers[0].pid)
    async with asyncio.timeout(60):
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0)
    assert compute.pending
    async with asyncio.timeout(30):
        await compute.close()
    answers = await asyncio.gather(*busy, return_exceptions=True)
    assert isinstance(answers[-1], WorkerDiedError)
    assert not process.is_running()
    compute.suspend()  # of one that has ended: nothing


async def test_of_a_killed_worker_nobody_is_told_who_was_cancelled_before_it_could_wait():
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    compute = await Compute.start(CONFIG, WORKER)
    waiting = asyncio.ensure_future(compute.post(WarmUp()))
    waiting.cancel()  # before its first turn
    await asyncio.wait([waiting])
    assert compute.pending
    os.kill(compute.workers[0].pid, signal.SIGKILL)
    await compute.died()
    await compute.close()
    assert not compute.pending
    del waiting
    gc.collect()
    assert not told


@pytest.mark.parametrize(
    ("worker", "device"), [("hetpeer.averaging.no_such_worker", "cpu"), (WORKER, "cuda:99")]
)
async def test_a_worker_that_cannot_start_is_an_error_and_leaves_nothing(worker, device):
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(WorkerDiedError) as caught:
        await Compute.start(ComputeConfig(device=device, arena_bytes=1 << 20), worker)
    assert caught.value.status == (4 if device == "cuda:99" else 1)
    await asyncio.sleep(0)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


PARENT = f"""
import asyncio
from hetpeer.stages.ipc.arena import Extent
from hetpeer.stages.ipc.block_commands import WarmUp
from hetpeer.stages.ipc.compute import Compute, ComputeConfig

async def main():
    compute = await Compute.start(ComputeConfig(device="cpu", arena_bytes=1 << 20), "{WORKER}")
    print(compute.workers[0].pid, flush=True)
    await asyncio.gather(*(compute.submit(WarmUp()) for _ in range({MANY})))

asyncio.run(main())
"""


def test_no_worker_outlives_a_killed_daemon():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([worker], [], [], 30)
        os.close(worker)
        assert ended, "the worker computes on after its daemon was killed"


def test_threads_of_an_operator_that_wait_leave_the_processor_to_others():
    async def main():
        compute = await Compute.start(CONFIG, WORKER)
        try:
            environment = Path(f"/proc/{compute.workers[0].pid}/environ").read_bytes().split(b"\0")
            assert b"OMP_WAIT_POLICY=PASSIVE" in environment
        finally:
            await compute.close()

    uvloop.run(main())


def test_a_worker_that_cannot_be_started_is_said(tmp_path, monkeypatch):
    """As where Python was moved or removed while hetpeer runs: nothing is left behind."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    async def main():
        with pytest.raises(LocalError) as caught:
            await Compute.start(CONFIG, WORKER)
        assert caught.value.line().startswith("HP-GPU-003: the compute worker cannot be started; why: ")
        assert "No such file" in caught.value.why

    uvloop.run(main())


def test_a_kernel_that_fails_is_an_answer():
    """The frame around commands, with a kernel's own mistake."""
    answer = Executor({Info: lambda _: torch.ones(2, 3) @ torch.ones(2, 3)}).execute(Info())
    assert (answer.code, answer.what) == ("HP-WORK-002", "Info failed")
    assert "cannot be multiplied" in answer.why


def test_no_memory_is_an_answer_of_its_own_whoever_finds_it():
    """Torch's allocator for the CPU says it with the class of any other mistake."""

    def kernel(_):
        return torch.empty(1 << 50)

    def numpy(_):
        return np.empty(1 << 50)

    def python(_):
        raise MemoryError

    for handler in (kernel, numpy, python):
        answer = Executor({Info: handler}).execute(Info())
        assert (answer.code, answer.what) == ("HP-MEM-002", "the compute worker is out of memory")
        error = CommandFailedError(answer)
        assert error.exit_code is ExitCode.TOO_SMALL
        assert "--ram-limit" in error.fix
