"""A laboratory: namespaces joined by a router that is slow where the matrix says so. Needs root and
/dev/net/tun.

    with Lab(matrix) as lab:
        server = lab.start(0, ["iperf3", "-s"])
        lab.order("partition 1")

Everything goes when the block is left, and with this process if it is killed: the router ends when its stdin
closes, processes in namespaces die with us, and what namespaces a killed laboratory left is removed by the
next one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from hetpeer.dht.base.runtime import dying_with_us
from tests.wanlab.matrix import Matrix
from tests.wanlab.router import address, enter, namespace, spare_address

ROOT = Path(__file__).parents[2]
MATRICES = Path(__file__).parent / "matrices"
PREFIX = "hetpeer"


class LabError(RuntimeError):
    """An order that the router refused, or a router that did not start."""


REQUIRED = "HETPEER_REQUIRE_LAB"
"""Set by CI: without a laboratory its tests fail there instead of being skipped."""


@functools.cache
def missing() -> str:
    """Why this machine can have no laboratory; empty if it can."""
    if os.geteuid():
        return "it needs root"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


needs_lab = pytest.mark.skipif(
    bool(missing()) and not os.environ.get(REQUIRED), reason=f"no laboratory: {missing()}"
)
"""Marks a test that cannot run without a laboratory."""


class Lab:
    """A running network. `matrix` is a Matrix, what its JSON says, or the name of one in matrices/."""

    def __init__(self, matrix: Mapping[str, Any] | str) -> None:
        self._json = (
            json.loads((MATRICES / f"{matrix}.json").read_text()) if isinstance(matrix, str) else dict(matrix)
        )
        self.matrix = Matrix.of(self._json)
        self._name = ""
        self._folder = ""
        self._router: subprocess.Popen[str] | None = None
        self._orders: socket.socket | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._moved: set[int] = set()
        """Nodes that have their spare addresses."""

    def __enter__(self) -> Self:
        if reason := missing():
            raise LabError(f"no laboratory: {reason}")
        _remove_leftovers()
        self._folder = tempfile.mkdtemp(prefix="wanlab-")
        self._name = f"{PREFIX}-{os.getpid()}-{Path(self._folder).name[7:]}"
        self._router = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "tests.wanlab.router",
                json.dumps(self._json),
                self._name,
                self._path,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": "."},
        )
        assert self._router.stdout is not None
        if self._router.stdout.readline() != "up\n":
            self.close()
            raise LabError("the router did not start; its words are on stderr")
        self._orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._orders.bind(f"{self._folder}/owner")
        self._orders.settimeout(5.0)
        self._orders.connect(self._path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, then the network. Idempotent."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._router is not None:
            self._router.communicate()  # closes its stdin
            self._router = None
            for node in range(len(self.matrix)):
                _remove(self.namespace(node))
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _path(self) -> str:
        return f"{self._folder}/router"

    # ── nodes ───────────────────────────────────────────────────────────────────────────────────────────────

    def namespace(self, node: int) -> str:
        """Its name, as `ip netns exec` takes it."""
        return f"{self._name}-{node}"

    def address(self, node: int) -> str:
        """Its IPv4 address."""
        return spare_address(node) if node in self._moved else address(node)

    def move(self, node: int) -> None:
        """Give it its spare address in place of the first one, as a router does with a new lease.

        Connections to the old address hear nothing any more.
        """
        self._moved.add(node)
        for order, where in (("del", address(node)), ("add", spare_address(node))):
            command = ["ip", "-n", self.namespace(node), "addr", order, f"{where}/23", "dev", "wan0"]
            subprocess.run(command, check=True)

    def renumber(self, node: int) -> None:
        """Give the router before it the node's spare address. The node keeps its own and notices nothing."""
        self.order(f"renumber {node}")

    def at(self, node: int, command: Sequence[str]) -> Sequence[str]:
        """The command that starts `command` there."""
        return ("ip", "netns", "exec", self.namespace(node), *command)

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process in the namespace of `node`; `options` as for Popen.

        It dies with us, or with the laboratory.
        """
        die = dying_with_us()
        with open(f"/run/netns/{self.namespace(node)}") as there:  # noqa: PTH123 - it is no regular file

            def settle() -> None:
                die()
                enter(there.fileno())

            process = subprocess.Popen(command, preexec_fn=settle, **options)  # noqa: PLW1509 - it takes no lock
        self._processes.append(process)
        return process

    def inside(self, node: int) -> contextlib.AbstractContextManager[None]:
        """Sockets that this thread makes meanwhile are those of `node`."""
        return namespace(self.namespace(node))

    # ── the network ─────────────────────────────────────────────────────────────────────────────────────────

    def order(self, order: str) -> dict[str, Any]:
        """Change the network (`Network.obey`), or `stats`; returns its counters. Raises LabError."""
        assert self._orders is not None
        self._orders.send(order.encode())
        answer: dict[str, Any] = json.loads(self._orders.recv(1 << 20))
        if answer["error"]:
            raise LabError(answer["error"])
        return answer

    def stats(self) -> dict[str, Any]:
        return self.order("stats")


def _remove(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Namespaces of laboratories whose process is gone."""
    folder = Path("/run/netns")
    for path in folder.glob(f"{PREFIX}-*-*-*") if folder.exists() else ():
        pid = path.name.split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            _remove(path.name)
