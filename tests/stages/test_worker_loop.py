"""The worker's loop without a process: it answers lane by lane, until the daemon is gone or something
cannot be answered.
"""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from hetpeer.stages.ipc import block_commands as c
from hetpeer.stages.ipc import worker_messages as r
from hetpeer.stages.ipc.block_commands import ForgetResiduals
from hetpeer.stages.ipc.worker_messages import (
    PREFIX,
    FrameReader,
    WorkerLane,
    WorkerOptions,
    decode_result,
    encode_message,
)
from hetpeer.stages.worker.worker_loop import serve


@contextlib.contextmanager
def served(lanes):
    """A worker without a process: our end of its socket, and the future of `serve`."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs, ThreadPoolExecutor(1) as worker:
        serving = worker.submit(serve, theirs, lanes)
        yield ours, serving
        ours.shutdown(socket.SHUT_WR)
        wait([serving], 60)
        assert serving.done()


def answers(connection, count):
    """(number, result) of the next `count` answers."""
    reader, found = FrameReader(), []
    while len(found) < count:
        found += reader.feed(connection.recv(4096))
    return [(number, decode_result(body)) for number, body in found]


def test_serve_answers_until_the_daemon_closes(engine):
    with served({WorkerLane.COMPUTE: engine.execute}) as (connection, serving):
        connection.sendall(encode_message(1, c.Info()) + PREFIX.pack(3, 2) + b"bad")
        found = dict(answers(connection, 2))
        assert isinstance(found[1], r.WorkerInfo)
        assert isinstance(found[2], r.CommandFailed)
    assert serving.exception() is None


def test_a_lane_does_not_wait_for_another_and_keeps_its_own_order():
    done, free = [], threading.Event()

    def compute(command):
        assert free.wait(60)
        done.append(command.block)
        return r.Done()

    lanes = {WorkerLane.COMPUTE: compute, WorkerLane.SEND: lambda _: r.Done()}
    with served(lanes) as (connection, _):
        for number in range(3):
            connection.sendall(encode_message(number, c.Unload(block=number)))
        connection.sendall(encode_message(3, ForgetResiduals()))
        assert [number for number, _ in answers(connection, 1)] == [3]
        free.set()
        assert [number for number, _ in answers(connection, 3)] == done == [0, 1, 2]
        connection.sendall(encode_message(4, c.Unload(block=4)) + encode_message(5, c.Shutdown()))
        assert answers(connection, 2) == [(4, r.Done()), (5, r.Done())]


def test_what_a_lane_cannot_answer_ends_the_worker():
    def broken(_):
        raise torch.AcceleratorError("the context is lost")

    with served({WorkerLane.COMPUTE: broken}) as (connection, serving):
        connection.sendall(encode_message(1, c.Info()))
        assert connection.recv(1) == b""
    assert isinstance(serving.exception(), torch.AcceleratorError)


def test_options_survive_the_command_line():
    options = WorkerOptions(
        socket=3,
        arena=4,
        exchange=6,
        scratch=7,
        scratch_bytes=1 << 40,
        parent=5,
        device="cuda:1",
        threads=2,
        nice=0,
        gpu_memory=0.85,
    )
    assert WorkerOptions.parse(options.arguments()) == options
