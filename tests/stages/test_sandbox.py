"""A confined process tries what a graph with a hole in it might."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hetpeer.dht.base import landlock
from hetpeer.stages.worker import sandbox


def landlock_version() -> int:
    """Version of this kernel's Landlock ABI; 0 if there is none."""
    try:
        return landlock.abi()
    except OSError:
        return 0


ATTEMPTS = """
import json, os, socket, subprocess, sys, threading
from pathlib import Path
from hetpeer.stages.worker.sandbox import confine

secret, left = sys.argv[1], confine()

def attempt(act):
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"

def compute():
    import torch
    import torch._dynamo
    x = torch.ones(64, 64, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad.sum() == 2 * 64**3

print(json.dumps({
    "left": left,
    "reads": attempt(lambda: open(secret).read()),
    "writes": attempt(lambda: open(secret, "w")),
    "removes": attempt(lambda: os.unlink(secret)),
    "lists": attempt(lambda: os.listdir(os.path.dirname(secret))),
    "truncates": attempt(lambda: os.truncate(secret, 0)),
    "links": attempt(lambda: os.link(secret, secret + "2")),
    "tcp": attempt(socket.socket),
    "udp": attempt(lambda: socket.socket(type=socket.SOCK_DGRAM)),
    "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
    "connect": attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(secret)),
    "bind": attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(secret + ".socket")),
    "datagrams": attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "sequences": attempt(lambda: socket.socket(type=socket.SOCK_SEQPACKET)),
    "packet": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "pair": attempt(socket.socketpair),
    "datagram pair": attempt(lambda: socket.socketpair(type=socket.SOCK_DGRAM)),
    "raw pair": attempt(lambda: socket.socketpair(type=socket.SOCK_RAW)),
    "unconnected": attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind("")),
    "names": attempt(lambda: open("/proc/self/comm", "w")),
    "names a thread": attempt(
        lambda: open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("cuda")
    ),
    "signals": attempt(lambda: os.kill(os.getppid(), 0)),
    "environment": attempt(lambda: open(f"/proc/{os.getppid()}/environ").read()),
    "memory": attempt(lambda: open(f"/proc/{os.getppid()}/mem", "rb")),
    "child": subprocess.run(["/bin/cat", secret], capture_output=True).stdout.decode(),
    "again": attempt(lambda: (confine(), open(secret))),
    **({} if left else {"computes": attempt(compute)}),  # torch takes seconds
}))
"""
FORBIDDEN = (
    *("reads", "writes", "removes", "lists", "truncates", "links"),
    *("tcp", "udp", "unix", "datagrams", "sequences", "connect", "bind", "packet"),
    *("datagram pair", "raw pair"),
    *("names", "signals", "environment", "memory", "again"),
)


def attempts(folder: Path, **environment: str) -> dict[str, object]:
    secret = folder / "identity.key"
    secret.write_text("secret")
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(secret)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel's Landlock knows less (before 6.12)")
def test_nothing_is_left_but_computing(tmp_path: Path) -> None:
    found = attempts(tmp_path)
    assert found["left"] == [], "this kernel has all of it"
    assert {name: found[name] for name in FORBIDDEN} == dict.fromkeys(FORBIDDEN, "PermissionError")
    assert (found["child"], found["pair"], found["computes"]) == ("", "done", "done")
    assert (found["unconnected"], found["names a thread"]) == ("done", "done"), "CUDA does not start without"
    assert (tmp_path / "identity.key").read_text() == "secret"


def test_switched_off_it_says_so(tmp_path: Path) -> None:
    found = attempts(tmp_path, HETPEER_SANDBOX="off")
    assert found["left"] == ["it may do what its user may: HETPEER_SANDBOX is off"]
    assert (found["reads"], found["tcp"]) == ("done", "done")


def test_an_unknown_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "m68k")
    with pytest.raises(OSError, match="m68k"):
        sandbox._confine_sockets()


def test_homes_are_not_readable_though_python_lives_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path.home()), "/", *sys.path])
    assert not {Path("/"), Path.home(), Path("/home"), Path("/root"), Path("/tmp")} & set(sandbox.readable())


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_scratch_folder_that_is_not_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"hetpeer-worker-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    match kind:
        case "link":
            folder.symlink_to(tmp_path / "elsewhere")
        case "open":
            folder.mkdir()
            folder.chmod(0o777)
        case _:
            folder.touch()
    with pytest.raises(OSError, match=r"not its own|exists"):
        sandbox.scratch()


def test_a_scratch_folder_that_is_full_is_emptied_unless_a_worker_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "_in_use", {})
    monkeypatch.setattr(sandbox, "SCRATCH_BYTES", 1000)
    folder = tmp_path / f"hetpeer-worker-{os.getuid()}"
    kept = folder / "cache" / "kept"
    kept.parent.mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    for size, locked, stays in ((1000, False, True), (1001, True, True), (1001, False, False)):
        kept.write_bytes(bytes(size))
        other = os.open(folder, os.O_RDONLY)
        if locked:
            fcntl.flock(other, fcntl.LOCK_SH)
        sandbox._in_use.clear()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert sandbox.scratch() == folder
        os.close(sandbox._in_use[folder])
        os.close(other)
        assert kept.exists() is stays
    assert list(folder.iterdir()) == []
