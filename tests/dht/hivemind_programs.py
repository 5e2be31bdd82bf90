"""hivemind's own programs as real processes: a node of its DHT, and clients that run a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("hivemind-dht")
DEADLINE_S = 120.0
_ADDRESS = re.compile(r"--initial_peers (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)")


@contextlib.asynccontextmanager
async def hivemind_dht(*peers: str) -> AsyncIterator[str]:
    """The address of a running `hivemind-dht` that has joined by `peers`; its processes end with it."""
    joining = ("--initial_peers", *peers) if peers else ()
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "--host_maddrs",
        "/ip4/127.0.0.1/tcp/0",
        *joining,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = ""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (found := _ADDRESS.search(said)) is None:
                line = await process.stdout.readline()
                assert line, f"it ended: {said}"
                said += line.decode()
        yield found[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def client(lines: str, **names: object) -> str:
    """What a Python program of these lines prints, in which `names` are set before. It must end well."""
    head = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"{head}\n{lines}",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err.decode()
    return out.decode()
