"""Processors with real control groups."""

import os
import signal
import subprocess
import sys
import time
from itertools import product

import numpy as np
import psutil
import pytest

from tests.wanlab import processors
from tests.wanlab.processors import FOLDER, PERIOD_US, PREFIX, Processor, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(60),
]
SPIN = "while True: pass"


def groups(pid):
    return list(FOLDER.glob(f"{PREFIX}-{pid}-*"))


def took(process, seconds):
    """Seconds of processor time that a process takes in so many."""
    before = process.cpu_times().user
    time.sleep(seconds)
    return process.cpu_times().user - before


def test_whatever_it_does_it_has_no_more_than_it_is_given():
    """Nor have its children; and all of it again when it is closed."""
    wait = f"import subprocess, sys; input(); subprocess.run([sys.executable, '-c', {SPIN!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", wait], stdin=subprocess.PIPE, start_new_session=True
    ) as parent:
        try:
            with Processor(parent.pid, 0.2) as processor:
                assert len(groups(os.getpid())) == 1
                parent.stdin.write(b"\n")
                parent.stdin.flush()
                while not (children := psutil.Process(parent.pid).children()):
                    assert parent.poll() is None
                    time.sleep(0.01)
                assert took(children[0], 2.0) < 0.6
                processor.hold(0.02)
                took(children[0], 0.2)
                assert took(children[0], 2.0) < 0.2
            assert not groups(os.getpid())
            before = children[0].cpu_times().user
            while children[0].cpu_times().user - before < 0.5:  # twenty-five seconds of what it had
                time.sleep(0.01)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_who_has_waited_is_no_faster():
    code = """
import time
input()
worked, begin = 0.0, time.process_time()
for _ in range(12):
    time.sleep(0.05)
    began = time.perf_counter()
    for _ in range(2_000_000):
        pass
    worked += time.perf_counter() - began
print((time.process_time() - begin) / worked)
"""
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        Processor(process.pid, 0.3),
    ):
        share = float(process.communicate(b"\n")[0])
    assert share < 0.3 * 1.3, share


def test_nothing_is_left_of_one_for_a_process_that_is_gone():
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        Processor(gone.pid, 0.5)
    assert not groups(os.getpid())


def test_what_a_killed_process_has_left_goes():
    limited = "import os; from tests.wanlab.processors import Processor; Processor(os.getpid(), 0.5)"
    code = f"{limited}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        owner.stdout.readline()
        assert groups(owner.pid)
        owner.kill()
        owner.wait()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        Processor(other.pid, 0.5).close()
    assert not groups(owner.pid)


MEASURES = """
import torch
from hetpeer.examples.gpt import GPT
from hetpeer.stages.block.device import measure_flops
from hetpeer.stages.tracing.assemble import ComputeMode
from hetpeer.stages.tracing.cut import cut_blocks
from hetpeer.stages.tracing.trace import trace
from hetpeer.stages.worker.rehearsal import rehearse

torch.set_num_threads(1)
torch.manual_seed(0)
model, cpu = GPT(64, 2, 2, 32, 64), torch.device("cpu")
ids = torch.randint(0, 64, (2, 32))
dag = trace(model, {"tokens": ids, "targets": ids})
block = cut_blocks(dag, 3, ComputeMode())[1]
buffers = {key: dag.tensors[key] for key in block.buffer_specs}
while input():
    print(measure_flops(cpu, 0.1), min(rehearse(block, buffers, cpu) for _ in range(3)), flush=True)
"""


@pytest.mark.timeout(240)
def test_a_machine_with_a_part_of_a_processor_measures_that_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and blocks take less time than it may compute at once, so each alone is as fast as ever."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", MEASURES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        Processor(process.pid, 1.0) as processor,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        found = {}
        for period_us, cores in product((PERIOD_US, 100_000), (1.0, 0.2, 0.05)):
            monkeypatch.setattr(processors, "PERIOD_US", period_us)
            processor.hold(cores)
            process.stdin.write("measure\n")
            process.stdin.flush()
            speed, seconds = map(float, process.stdout.readline().split())
            found[period_us, cores] = np.array([speed, 1 / seconds])
        process.communicate("\n")
    for period_us in (PERIOD_US, 100_000):
        whole, fifth, twentieth = (found[period_us, cores] for cores in (1.0, 0.2, 0.05))
        assert (fifth < 0.6 * whole).all(), f"a loaded machine may be half as fast as it is: {found}"
        assert (twentieth < 0.4 * fifth).all(), found
        assert (twentieth > 0.1 * fifth).all(), f"it stands still often, and finds its cache cold: {found}"
