"""One p2pd process: the libp2p host in hivemind's wheel, configured, started and watched by us.

`NodeConfig` is a node's configuration; p2pd's flags follow from it. Our own start gives what
`hivemind.P2P.create` does not: p2pd dies with us (PR_SET_PDEATHSIG), its death is seen at once (pidfd), its
sockets are in a private folder, and a taken port is an error instead of two processes that share it (libp2p
listens with SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import ipaddress
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.runtime import dying_with_us, process_folder
from hetpeer.dht.identity.addresses import Address, through
from hetpeer.dht.identity.peer_identity import Identity
from hetpeer.dht.p2pd.confinement import confined

_RELAY_SERVICE = (
    f"-relayDataLimit={1 << 40}",  # of one circuit each way; volunteers of earlier versions use no less
    "-relayTimeLimit=24h",
    "-relayMaxReservations=512",  # of all peers
    "-relayMaxCircuits=128",  # of each peer
)
START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 1.0
_MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path on Linux."""
_TAIL_LINES = 20
_BANNER = ("Control socket:", "Peer Addrs:", "/ip")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node's configuration: where it listens and which peers it knows."""

    host: str = "127.0.0.1"
    """IP address to listen on; 0.0.0.0 for all interfaces."""
    port: int = 0
    """TCP port; 0 lets the system choose one, which is then kept for the node's life."""
    peers: tuple[Address, ...] = ()
    """Addresses to join by, dialled again whenever the connection is lost; our own is skipped."""
    alone_ok: bool = False
    """Whether to start if none of `peers` answers, as the first of several that know each other must."""
    reachability: Literal["auto", "ask", "public", "private"] = "auto"
    """Way to find out whether others can reach us.

    auto: by libp2p, which takes its time. ask: other peers are asked to dial us, and p2pd is told the result.
    public: anybody can reach us, and we relay for others. private: we take no connections and use `relays`.
    """
    relays: tuple[Address, ...] = ()
    """Public peers to reserve a relay slot at, for private nodes. Two or more survive the loss of one."""
    announce: tuple[Address, ...] = ()
    """Addresses to tell others instead of where p2pd listens; for a private node, besides its relays."""

    direct_port: int | None = None
    """TCP port for streams past p2pd (tls_listener.py); 0: the system chooses; None: no such streams."""

    def __post_init__(self) -> None:
        """Check the fields. Raises `LocalError` HP-NET-005."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError as error:
            raise _unusable(
                f"{self.host!r} is not an IP address",
                "it has to be a number like 192.0.2.7",
                "use 0.0.0.0 to listen on all of them",
            ) from error
        if not 0 <= self.port < 2**16:
            raise _unusable(
                f"cannot use port {self.port}", "ports are 0 to 65535", "use 0 to let the system choose"
            )
        if self.reachability == "private" and not self.relays:
            raise _unusable(
                "a private node needs a relay",
                "nobody could reach it",
                "name at least one public peer as relay",
            )


def p2pd_arguments(config: NodeConfig, identity: Identity, port: int, folder: Path) -> list[str]:
    """The flags of a p2pd that listens on `port` and takes requests at a socket in `folder`."""
    ip = ipaddress.ip_address(config.host)
    arguments = [
        f"-listen=/unix{folder / 'p2pd.sock'}",
        f"-hostAddrs=/ip{ip.version}/{ip}/tcp/{port}",
        f"-id={identity.path}",
        "-b=0",  # first_contact.py connects to the peers
        "-dhtServer=1",
        "-tls=1",
        "-autonat=1",
        "-connManager=1",
        "-idleTimeout=30s",
        "-relay=1",
        f"-natPortMap={int(not ip.is_loopback)}",
    ]
    announced = [address.transport for address in config.announce]
    if config.reachability == "public":
        arguments += ["-forceReachabilityPublic=1", *_RELAY_SERVICE]
    if config.reachability == "private":
        # No autorelay: relay_slots.py reserves faster, and knows what it got.
        announced += [through(relay, identity.peer_id).transport for relay in config.relays]
        arguments.append("-forceReachabilityPrivate=1")
    if announced:
        arguments.append(f"-announceAddrs={','.join(announced)}")
    return arguments


def _unusable(what: str, why: str, fix: str) -> LocalError:
    return LocalError("HP-NET-005", what, why=why, fix=fix, exit_code=ExitCode.USAGE)


class P2pd:
    """A running p2pd. `exited` is set, with the reason in `tail()`, as soon as the process has ended."""

    def __init__(self, process: subprocess.Popen[bytes], folder: TemporaryDirectory[str]) -> None:
        self._process = process
        self._folder = folder
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._unfinished = b""
        self._peer_id: str | None = None
        self._ready_or_gone = asyncio.Event()
        self.exited = asyncio.Event()
        self.closing = False
        """Whether we have asked p2pd to end."""
        self._watch()

    @classmethod
    async def start(cls, config: NodeConfig, identity: Identity, *, port: int) -> P2pd:
        """Start p2pd on `port` (0: any) and wait at most START_DEADLINE_S until it takes requests.

        Raises `LocalError`: HP-NET-001 port taken, HP-NET-003 no start. If cancelled, nothing is left.
        """
        check_port_free(config.host, port)
        folder = sockets_folder()
        binary, sockets = _binary(), Path(folder.name)
        command = [binary, *p2pd_arguments(config, identity, port, sockets)]
        try:
            with confined(Path(binary), identity.path, sockets) as confine:
                process = _spawn(command, confine, reachability=config.reachability)
        except (OSError, subprocess.SubprocessError) as error:
            folder.cleanup()
            raise p2pd_does_not_start(str(error)) from error
        p2pd = cls(process, folder)
        try:
            await p2pd._ready(identity)
        except BaseException:
            await p2pd.close()
            raise
        return p2pd

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def control_path(self) -> str:
        """The unix socket for requests."""
        return f"{self._folder.name}/p2pd.sock"

    def tail(self) -> str:
        """The last lines it printed after its banner, for error messages."""
        return " | ".join(self._lines) or "it printed nothing"

    def kill(self) -> None:
        """End a process that no longer answers; `exited` follows."""
        if not self.exited.is_set():
            self._process.kill()

    async def close(self) -> None:
        """End the process and remove its folder, within about STOP_DEADLINE_S. Idempotent."""
        self.closing = True
        if not self.exited.is_set():
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_DEADLINE_S):
                    await self.exited.wait()
        self.kill()
        await self.exited.wait()
        self._folder.cleanup()

    async def _ready(self, identity: Identity) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_DEADLINE_S):
                await self._ready_or_gone.wait()
        if self._peer_id is None:
            late = f"it was not ready within {START_DEADLINE_S:.0f} s"
            raise p2pd_does_not_start(self.tail() if self.exited.is_set() else late)
        if self._peer_id != identity.peer_id:
            raise p2pd_does_not_start(
                f"it says it is {self._peer_id}, the identity file says {identity.peer_id}"
            )

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        loop.add_reader(self._output, self._on_output)

    def _on_exit(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._on_output()  # the last words
        loop.remove_reader(self._output)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.exited.set()
        self._ready_or_gone.set()

    def _on_output(self) -> None:
        """Read p2pd's output: its peer id, and the last lines for errors."""
        try:
            chunk = os.read(self._output, 64 * 1024)
        except BlockingIOError:
            return
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._output)
            return
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        self._unfinished = self._unfinished[-4096:]
        for line in lines:
            text = line.decode(errors="replace").strip()
            if text.startswith("Peer ID: "):
                self._peer_id = text.removeprefix("Peer ID: ")
                self._ready_or_gone.set()
            elif not text.startswith(_BANNER):
                self._lines.append(text)

    def __repr__(self) -> str:
        return f"<P2pd {self.pid} {'gone' if self.exited.is_set() else 'running'}>"


def sockets_folder() -> TemporaryDirectory[str]:
    """A new folder for sockets between p2pd and us, closed to other users. Raises `LocalError` HP-NET-003."""
    try:
        folder = process_folder("p2pd")
    except OSError as error:
        raise p2pd_does_not_start(f"no folder for its sockets can be made: {error.strerror}") from error
    if len(os.fsencode(f"{folder.name}/streams.sock")) > _MAX_SOCKET_PATH:
        folder.cleanup()
        raise p2pd_does_not_start("the folder for temporary files (TMPDIR) has too long a path for sockets")
    return folder


def _binary() -> str:
    """Path of hivemind's p2pd, found without importing hivemind (and with it torch)."""
    spec = importlib.util.find_spec("hivemind")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = Path(folder) / "hivemind_cli" / "p2pd"
        if path.is_file():
            return str(path)
    raise p2pd_does_not_start("the hivemind package has no p2pd binary; install it again from its wheel")


def _spawn(command: list[str], confine: Callable[[], None], *, reachability: str) -> subprocess.Popen[bytes]:
    """Start a child that the kernel kills with us, and that calls `confine` first.

    Call in the main thread: the signal follows the thread.
    """
    die_with_us = dying_with_us()

    def prepare() -> None:
        die_with_us()
        confine()

    # It has some 24 MB alive under any load. With Go's default as much again is garbage, which looks like a
    # leak for the first quarter of an hour.
    environment = {**os.environ, "GOLOG_LOG_LEVEL": "error", "GOGC": os.environ.get("GOGC", "50")}
    if reachability == "public":
        # libp2p starts two relay services, ours and one with 128 KiB limits; on one processor ours wins
        # (measured).
        environment["GOMAXPROCS"] = "1"
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        preexec_fn=prepare,  # noqa: PLW1509 - it takes no lock
        start_new_session=True,  # Ctrl-C in the terminal is for us; we end p2pd ourselves
    )


def check_port_free(host: str, port: int) -> None:
    """Raise `LocalError` HP-NET-001 if another process listens on `port` of `host`."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise LocalError(
                "HP-NET-001",
                f"cannot listen on {host} port {port}",
                why=(taken and _owner_of(port)) or error.strerror or str(error),
                fix="end that program, or choose another port"
                if taken
                else "choose another --host or --port",
                exit_code=ExitCode.NETWORK,
            ) from error


def _owner_of(port: int) -> str:
    """The process that listens on `port`, as a clause; empty if this user may not know."""
    import psutil

    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            listening = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if listening and connection.pid is not None:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()}) uses it"
    return ""


def p2pd_does_not_start(why: str) -> LocalError:
    """HP-NET-003 with a reason."""
    return LocalError(
        "HP-NET-003",
        "the network process p2pd does not start",
        why=why,
        fix="make room in memory and in the folder for temporary files;"
        " if p2pd is missing, install hetpeer again",
        exit_code=ExitCode.NETWORK,
    )
