"""Starts `hetpeer` processes fast: everything is imported once, then each process is forked from that.

The processes run the real command line in their own sessions and start their own p2pd; their first compute
worker is forked with them (spare.py). Children of a replay are forked, too. Requests are JSON lines on
stdin, the answer is the pid; when a process ends, its exit status is written to `<folder>/<pid>`. The server
dies with the test run, its processes with the server.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLL_S = 0.02


class ForkServer:
    """The test's side. `start` returns a pid, `status` what became of it.

    `environment`: variables in addition to ours; such a server has only what a replay needs.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        from hetpeer.bootstrap.audit.child_process import SPARING
        from hetpeer.dht.base.runtime import dying_with_us

        self._folder = folder
        self._others: dict[str, ForkServer] = {}
        """Servers with other variables, by these."""
        self._starter = ThreadPoolExecutor(1)
        """Starts these: they die with the thread that has started them."""
        variables = {"PYTHONPATH": ".", "OPENBLAS_NUM_THREADS": "1"} | SPARING | dict(environment or {})
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder), *(["replay"] if environment else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
            cwd=ROOT,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 - it takes no lock
        )

    def start(self, **request: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())

    def run_child(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """As `child_process.run_child`; torch reads `environment` once, so that has a server of its own."""
        if environment:
            return self._with(environment).run_child(module, arguments)
        with tempfile.NamedTemporaryFile("r", dir=self._folder) as err:
            pid = self.start(module=module, arguments=arguments, home="", out="/dev/null", err=err.name)
            while (status := self.status(pid)) is None:
                time.sleep(POLL_S)
            return status, err.read()

    def _with(self, environment: Mapping[str, str]) -> "ForkServer":
        """The server with `environment`; started when it is first needed."""
        key = json.dumps(environment, sort_keys=True)
        with self._lock:
            if key not in self._others:
                folder = self._folder / f"other-{len(self._others)}"
                folder.mkdir()
                self._others[key] = self._starter.submit(ForkServer, folder, environment).result()
            return self._others[key]

    def status(self, pid: int) -> int | None:
        """The exit status, minus the signal that ended it, or None while it runs."""
        path = self._folder / str(pid)
        return int(path.read_text()) if path.exists() else None

    def close(self) -> None:
        """End the server; a process that still runs is killed by the kernel."""
        for other in self._others.values():
            other.close()
        self._starter.shutdown()
        self._server.kill()
        self._server.communicate()


def import_replay() -> None:
    """Import what children of a replay need."""
    import torch._dynamo
    import torch.optim  # noqa: F401 - by the reference

    from hetpeer.averaging.optim import update_rules  # noqa: F401
    from hetpeer.bootstrap.audit import one_machine  # noqa: F401


def import_daemons() -> None:
    """Import what daemons need, and make what is otherwise made by each of them at its first use: codecs of
    addresses, schemas of messages.
    """
    from hetpeer.dht.base import lean_hivemind

    lean_hivemind.install()
    import hivemind.dht.node  # noqa: F401

    from hetpeer.dht.identity.addresses import EXAMPLE, parse_address
    from hetpeer.peer.cli import main  # noqa: F401
    from hetpeer.peer.cli.swarm import bootstrap_command  # noqa: F401
    from hetpeer.peer.cli.volunteer import join_command  # noqa: F401
    from hetpeer.peer.daemon import volunteer_life  # noqa: F401
    from hetpeer.peer.reliable import serve_run  # noqa: F401
    from hetpeer.stages.ipc import worker_messages
    from hetpeer.stages.worker import bundle_codec, engine  # noqa: F401

    parse_address(EXAMPLE)
    for message in (*worker_messages._COMMANDS.values(), *worker_messages._RESULTS.values()):
        worker_messages._adapter(message)


def serve(folder: Path) -> None:
    """Fork as asked for, until stdin ends."""

    def reap(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            unfinished = folder / f".{pid}"
            unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
            unfinished.rename(folder / str(pid))

    signal.signal(signal.SIGCHLD, reap)
    gc.collect()
    gc.freeze()  # collecting in a child would touch, and so copy, the memory of all that is imported
    for line in sys.stdin:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # a child is not reaped while it is forked
        pid = os.fork()
        if not pid:
            run_child(**request)
        print(pid, flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def run_child(
    *,
    arguments: list[str],
    home: str,
    out: str,
    err: str,
    before: str = "",
    fail: str = "",
    network: str = "",
    module: str = "",
) -> None:
    """Become `hetpeer *arguments`, or `python -m module *arguments`. Never returns.

    `before` names functions of tampering.py that are called first. `fail`: HETPEER_FAIL.
    `network`: the namespace to be in (wanlab).
    """
    from hetpeer.dht.base.runtime import _PR_SET_PDEATHSIG, _libc
    from hetpeer.peer.cli.main import run
    from tests.swarm import spare, tampering
    from tests.wanlab.router import enter

    for changed in (signal.SIGCHLD, signal.SIGHUP):  # by us; by nohup, if that has started the tests
        signal.signal(changed, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell runs in the background
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    if network:
        enter(os.open(f"/run/netns/{network}", os.O_RDONLY | os.O_CLOEXEC))
    for path, descriptor in (("/dev/null", 0), (out, 1), (err, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ |= {"HETPEER_HOME": home, "HETPEER_FAIL": fail, "HETPEER_DASHBOARD": "off"}
    sys.argv = ["hetpeer", *arguments]
    status: int | str | None = 1
    wrong = set(before.split())
    everywhere = {name for name in wrong if name.partition(":")[0] in tampering.EVERYWHERE}
    for name in everywhere:
        tampering.install(name)
    if {"join", "--stand-in"} & set(arguments):
        spare.keep_one()
    try:
        for name in wrong - everywhere:
            tampering.install(name)
        if module:
            _run_module(module)
        run()
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _run_module(module: str) -> None:
    """Do as `python -m module`. Never returns."""
    try:
        runpy.run_module(module, run_name="__main__")
    except Exception:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        sys.exit(1)
    sys.exit()


if __name__ == "__main__":
    import_replay()
    if "replay" not in sys.argv[2:]:
        import_daemons()
    serve(Path(sys.argv[1]))
