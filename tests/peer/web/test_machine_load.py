"""What hetpeer takes of the machine, with real processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from hetpeer.peer.web.machine_load import LoadMeter

BUSY = "while True: pass"


def test_the_machine_and_what_the_daemon_and_its_children_take_of_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as child:
        try:
            theirs = psutil.Process(child.pid)
            machine = LoadMeter(tmp_path)
            before, until = theirs.cpu_times().user, time.monotonic() + 30.0
            while (used := theirs.cpu_times().user - before) < 0.3:
                assert time.monotonic() < until
                time.sleep(0.05)
            load = machine.look()
            assert load.own_memory >= theirs.memory_info().rss + psutil.Process().memory_info().rss // 2
        finally:
            child.kill()
    assert 0 < load.own_cores <= (os.cpu_count() or 1) + 0.5
    assert used > 0
    assert 0 <= load.cpu <= 1
    assert 0 < load.memory_used < load.memory_total == psutil.virtual_memory().total
    assert 0 < load.disk_free <= psutil.disk_usage(str(tmp_path)).total


def test_a_child_that_has_ended_counts_for_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        machine = LoadMeter(tmp_path)
        with_child = machine.look()
        child.kill()
        child.wait()
        without = machine.look()
    assert 0 < without.own_memory < with_child.own_memory
