"""Share of a line that plain TCP fills with payload: one way, and both ways at the same time.

Acknowledgements of what comes the other way take a part of each line, which a measurement in one direction
does not show. One connection for each direction, as links have them. Run by `share` in the laboratory; the
file itself is what the two ends run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.wanlab.lab import Lab

PORT = 5001
SETTLE_S, COUNTED_S = 4.0, 8.0
"""Seconds that do not count, in which both windows open; and those that do."""
PIECE = 1 << 16


def share(lab: Lab, mbps: float, *, both_ways: bool) -> float:
    """Payload over the line's rate, between nodes 0 and 1; the slower direction of two."""
    ways = "both" if both_ways else "one"

    def start(node: int, role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", str(Path(__file__)), role, lab.address(0), ways]
        process: subprocess.Popen[str] = lab.start(node, command, stdout=subprocess.PIPE, text=True)
        return process

    taker = start(0, "taker")
    assert taker.stdout is not None
    taker.stdout.readline()  # it listens
    sender = start(1, "sender")
    said = [process.communicate(timeout=10 * (SETTLE_S + COUNTED_S))[0] for process in (taker, sender)]
    rates = [float(text) for text in said if text.strip()]
    return min(rates) * 8e-6 / mbps


def _send(connection: socket.socket) -> None:
    """Send until the other end has counted enough, and closes."""
    piece = os.urandom(PIECE)
    with suppress(ConnectionError):
        while True:
            connection.sendall(piece)


def _receive(connection: socket.socket) -> float:
    """Bytes a second that arrive, once windows are open."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        connection.recv(PIECE)
    began, taken = time.monotonic(), 0
    while time.monotonic() < began + COUNTED_S:
        taken += len(connection.recv(PIECE))
    return taken / (time.monotonic() - began)


def main(role: str, host: str, ways: str) -> None:
    """One end: `sender` sends to `taker`, and with `both` also the other way round."""
    if role == "taker":
        with socket.create_server((host, PORT)) as listening:
            print(flush=True)
            incoming, outgoing = (listening.accept()[0] for _ in range(2))
    else:
        outgoing, incoming = (socket.create_connection((host, PORT)) for _ in range(2))
    sending = threading.Thread(target=_send, args=(outgoing,))
    if role == "sender" or ways == "both":
        sending.start()
    if role == "taker" or ways == "both":
        print(_receive(incoming), flush=True)
    incoming.close()
    if role == "sender" or ways == "both":
        sending.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
