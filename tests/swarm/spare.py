"""A compute worker that is there before its daemon asks for one: forked from what is imported already, not
started anew.

Importing torch takes three seconds of a processor, longer than most tests train. The first worker of a daemon
is such a spare, tied to it like any other; one that takes the place of a dead worker is started as everywhere
else.
"""

import dataclasses
import os
import signal
import socket
from typing import Any

from hetpeer.averaging import worker_main
from hetpeer.dht.base.runtime import _libc, dying_with_us
from hetpeer.stages.ipc import worker_process
from hetpeer.stages.ipc.worker_messages import WorkerOptions

NAME = "worker"
"""What psutil calls it once it is one."""
_PR_SET_NAME = 15
_STDOUT = 1


class Forked:
    """What `Compute` needs of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def keep_one() -> None:
    """Fork the spare of this process, which has no thread yet; its first `Compute` takes it."""
    ours, theirs = socket.socketpair()
    tie = dying_with_us()
    pid = os.fork()
    if not pid:
        tie()
        ours.close()
        _become_worker(theirs)
    os.setpgid(pid, pid)  # as a worker has it
    theirs.close()
    start_anew = worker_process.spawn

    def take(options: WorkerOptions, _worker: str) -> Any:
        worker_process.spawn = start_anew
        with ours:
            line = "\n".join(options.arguments()).encode()
            socket.send_fds(ours, [line], [options.socket, options.arena, options.exchange, options.scratch])
        return Forked(pid)

    worker_process.spawn = take


def _become_worker(asked: socket.socket) -> None:
    """Wait until the daemon wants it, and work until it does no more. Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with asked:
            line, descriptors, _, _ = socket.recv_fds(asked, 1 << 12, 4)
        if line:
            _libc.prctl(_PR_SET_NAME, NAME.encode())
            os.dup2(worker_process.STDERR, _STDOUT)
            given = WorkerOptions.parse(line.decode().split("\n"))
            connection, arena, exchange, scratch = descriptors
            given = dataclasses.replace(
                given, socket=connection, arena=arena, exchange=exchange, scratch=scratch
            )
            status = worker_main.main(given.arguments())
    finally:
        os._exit(status)
