"""The laboratory with real packets: delays, rates and cuts are those asked for, and nothing outlives it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import mean, median

import pytest

from tests.wanlab.lab import MATRICES, PREFIX, ROOT, Lab, LabError, needs_lab
from tests.wanlab.quiet import undisturbed
from tests.wanlab.router import address

pytestmark = [needs_lab, pytest.mark.timeout(60)]
PORT = 7000
ENVIRONMENT = os.environ | {"PYTHONPATH": "."}


@contextlib.contextmanager
def datagrams(lab, *nodes):
    """A UDP socket in each node."""
    with contextlib.ExitStack() as stack:
        found = []
        for node in nodes:
            with lab.inside(node):
                one = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                one.bind((lab.address(node), PORT))
            one.settimeout(2.0)
            found.append(one)
        yield found


@contextlib.contextmanager
def first_in_line():
    """Nothing else on this machine runs before us, as nothing runs before the router: what is timed is the
    laboratory.
    """
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(5))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def there_and_back(here, there):
    """Seconds that a datagram and its answer take: the least and the middle one of nine."""

    def once():
        began = time.perf_counter()
        here.sendto(b"ping", there.getsockname())
        data, sender = there.recvfrom(10)
        there.sendto(data, sender)
        here.recvfrom(10)
        return time.perf_counter() - began

    def nine_times():
        with first_in_line():
            return sorted(once() for _ in range(9))

    times = undisturbed(nine_times)
    return times[0], times[4]


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_delay_cut_and_closed_door():
    with (
        Lab({"names": ["a", "b", "c"], "latency_ms": 20, "no_inbound": ["c"]}) as lab,
        datagrams(lab, 0, 1, 2) as (a, b, c),
    ):
        least, middle = there_and_back(a, b)
        assert 0.040 <= least <= middle < 0.050
        lab.order("latency a b 50")
        least, middle = there_and_back(a, b)
        assert 0.100 <= least <= middle < 0.110
        with pytest.raises(TimeoutError):
            there_and_back(a, c)
        least, middle = there_and_back(c, a)
        assert 0.040 <= least <= middle < 0.050
        lab.order("partition b")
        a.settimeout(0.3)
        b.settimeout(0.3)
        with pytest.raises(TimeoutError):
            there_and_back(a, b)
        lab.order("heal b")
        there_and_back(a, b)
        stats = lab.stats()
        assert (stats["cut_drops"], stats["refused"]) == (1, 1)
        with pytest.raises(LabError, match="no such node"):
            lab.order("partition d")


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(700)
def test_a_line_carries_its_rate():
    """TCP's share of 100 Mbit/s, a second after the start: the middle one of five measurements, as a pause
    of this machine fills the line's queue.
    """
    with Lab({"nodes": 2, "latency_ms": 5, "uplink_mbps": [100, 0]}) as lab, contextlib.ExitStack() as stack:
        with lab.inside(1):
            server = stack.enter_context(socket.create_server((lab.address(1), PORT)))
        with lab.inside(0):
            client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=5.0))
        connection = stack.enter_context(server.accept()[0])

        def fill():
            with contextlib.suppress(OSError):
                while True:
                    client.sendall(bytes(1 << 16))

        threading.Thread(target=fill, daemon=True).start()

        def received(seconds):
            count, until = 0, time.perf_counter() + seconds
            while time.perf_counter() < until:
                count += len(connection.recv(1 << 16))
            return count * 8 / seconds / 1e6

        received(1.0)
        rates = [undisturbed(lambda: received(0.6)) for _ in range(5)]
        assert median(rates) > 70
        assert mean(rates) < 101


def namespaces(pid):
    folder = Path("/run/netns")
    return [path.name for path in folder.glob(f"{PREFIX}-{pid}-*")] if folder.exists() else []


def test_nothing_outlives_it():
    """Neither an orderly end nor a kill leaves processes; namespaces of a killed one go when the next is
    made.
    """
    with Lab({"nodes": 2}) as lab:
        assert len(namespaces(os.getpid())) == 2
        sleeper = lab.start(0, ["sleep", "60"])
    assert sleeper.poll() == -signal.SIGKILL
    assert not namespaces(os.getpid())

    code = (
        "from tests.wanlab.lab import Lab\n"
        "with Lab({'nodes': 2}) as lab:\n"
        "    print(lab.start(0, ['sleep', '60']).pid, lab._router.pid, flush=True)\n"
        "    input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert namespaces(owner.pid)
    owner.kill()
    owner.communicate()
    until = time.monotonic() + 30.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)
    with Lab({"nodes": 1}):  # or another one, in another process of these tests
        assert not namespaces(owner.pid)


def test_the_command_runs_a_line_in_each_node(tmp_path):
    line = "echo {i} {name} $(hostname -I 2>/dev/null || ip -o -4 addr show wan0 | awk '{print $4}')"
    command = [sys.executable, "-m", "tests.wanlab", "city", "--logs", str(tmp_path), "--", line]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "south.log").read_text().startswith("3 south " + address(3))
    assert len(list(tmp_path.iterdir())) == 5


def test_the_command_says_what_is_wrong(tmp_path):
    for text, why in (("{", "not JSON"), ("[]", "not a JSON object"), ('{"nodes": 0}', "0 nodes")):
        path = tmp_path / "matrix.json"
        path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "tests.wanlab", str(path), "--", "true"],
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 3
        assert why in done.stderr
        assert "Traceback" not in done.stderr
    assert (MATRICES / "homes.json").exists()
