"""The router: one process that carries the packets of all nodes through a `Network`. Started by lab.py.

Each node is a network namespace with one TUN device, whose other end is here. Packets come with a virtio
header, so that TCP hands over up to 64 KiB at a time (GSO) while its MTU stays 1500: a few thousand system
calls for a gigabit. `select` is used for its microseconds; the process has real-time priority, or the delays
would be those of the scheduler.

Protocol with its owner: the arguments are the matrix as JSON and the name of the namespaces; "up" on stdout
when they are there; orders come as datagrams on a unix socket, each is answered with a line of JSON. It ends
when stdin closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.wanlab.matrix import Matrix
from tests.wanlab.network import Flow, Network

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN = 0x01, 0x02, 0x08
CLONE_NEWNET = 0x40000000
HEADER = 10
"""Bytes of struct virtio_net_hdr, in front of each packet."""
SEGMENT_HEADERS = 52
"""IP and TCP headers of each segment that a GSO packet stands for."""
WAIT_S = 0.05
BURST = 16
"""Packets read from one node before the others are looked at."""
SUBNET, SPARE_SUBNET = "51.51.51", "51.51.50"
"""Look public: libp2p neither announces nor punches to addresses of private and test ranges."""

_libc = ctypes.CDLL(None, use_errno=True)


def address(node: int) -> str:
    return f"{SUBNET}.{node + 1}"


def spare_address(node: int) -> str:
    """Address that the node gets in place of the first one if it is moved."""
    return f"{SPARE_SUBNET}.{node + 1}"


@contextlib.contextmanager
def namespace(name: str) -> Iterator[None]:
    """This thread is in the network namespace `name` meanwhile."""
    home, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        enter(there)
        yield
    finally:
        enter(home)
        os.close(home)
        os.close(there)


def enter(descriptor: int) -> None:
    """This thread, and what it starts, is in the network namespace from now on."""
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def make_node(name: str, node: int) -> int:
    """A namespace with a TUN device in it; returns the device's descriptor."""
    _ip("netns", "add", name)
    with namespace(name):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wan0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
        fcntl.ioctl(device, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
        fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO_ECN)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "link", "set", "wan0", "mtu", "1500", "txqueuelen", "4000", "up")
    _ip("-n", name, "addr", "add", f"{address(node)}/23", "dev", "wan0")
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Router:
    """Packets between `devices`, one for each node of the network."""

    def __init__(self, network: Network[bytes], devices: list[int], orders: socket.socket) -> None:
        self._network = network
        self._devices = devices
        self._orders = orders
        self._node = {
            socket.inet_aton(at(i)): i for i in range(len(devices)) for at in (address, spare_address)
        }
        self._outside: dict[int, bytes] = {}
        """Node behind a router of its own → the address that this router has by now."""

    def run(self) -> None:
        """Until stdin closes."""
        by_device = {device: node for node, device in enumerate(self._devices)}
        watched = [*self._devices, self._orders, sys.stdin]
        events = sorted(self._network.matrix.events, key=lambda event: event.at_s, reverse=True)
        began = time.monotonic()
        while True:
            now = time.monotonic()
            due = self._network.next_due
            wait = WAIT_S if due is None else min(max(due - now, 0.0), WAIT_S)
            for ready in select.select(watched, (), (), wait)[0]:
                if ready is sys.stdin:
                    return
                if ready is self._orders:
                    self._answer()
                else:
                    self._read(ready, by_device[ready])
                self._deliver()
            self._deliver()
            while events and now - began >= events[-1].at_s:
                self._network.obey(events.pop().order)

    def _read(self, device: int, source: int) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(device, 1 << 17)
            except BlockingIOError:
                return
            target = packet[HEADER + 16 : HEADER + 20]
            to = self._node.get(target)
            if to is None or packet[HEADER] >> 4 != 4:  # not IPv4: neighbour discovery
                continue
            if source in self._outside:
                packet = _readdressed(packet, 12, self._outside[source])
            if to in self._outside:
                if target != self._outside[to]:
                    continue
                packet = _readdressed(packet, 16, socket.inet_aton(address(to)))
            self._network.send(time.monotonic(), source, to, _size(packet), packet, _flow(packet))

    def _deliver(self) -> None:
        for to, packet in self._network.due(time.monotonic()):
            with contextlib.suppress(OSError):  # its queue is full: a drop as at any interface
                os.write(self._devices[to], packet)

    def _answer(self) -> None:
        line, sender = self._orders.recvfrom(1024)
        answer = {"error": ""}
        if line.startswith(b"renumber "):
            node = int(line.split()[1])
            self._outside[node] = socket.inet_aton(spare_address(node))
        elif line != b"stats":
            try:
                self._network.obey(line.decode())
            except ValueError as error:
                answer["error"] = str(error)
        stats = dataclasses.asdict(self._network.counters)
        text = json.dumps({**answer, **stats, "pair_bytes": self._network.pair_bytes})
        self._orders.sendto(text.encode(), sender)


def _size(packet: bytes) -> int:
    """Bytes on the line; a GSO packet's segments have headers of their own."""
    size = len(packet) - HEADER
    segment = int.from_bytes(packet[4:6], "little")
    return size + SEGMENT_HEADERS * (size // segment) if segment else size


def _readdressed(packet: bytes, at: int, new: bytes) -> bytes:
    """The packet with the address `new` at this offset of its IP header, and right checksums."""
    changed = bytearray(packet)
    old = packet[HEADER + at : HEADER + at + 4]
    changed[HEADER + at : HEADER + at + 4] = new
    above = HEADER + (packet[HEADER] & 15) * 4
    partial = bool(packet[0] & 1)  # the sender's card was to complete it: a sum, not its complement
    places = {6: [(above + 16, partial)], 17: [(above + 6, partial)]}.get(packet[HEADER + 9], [])
    for place, is_sum in [(HEADER + 10, False), *places]:
        total = int.from_bytes(packet[place : place + 2]) ^ (0 if is_sum else 0xFFFF)
        for word in (0, 2):
            total += int.from_bytes(new[word : word + 2]) + (int.from_bytes(old[word : word + 2]) ^ 0xFFFF)
        while total > 0xFFFF:
            total = (total & 0xFFFF) + (total >> 16)
        changed[place : place + 2] = (total ^ (0 if is_sum else 0xFFFF)).to_bytes(2)
    return bytes(changed)


def _flow(packet: bytes) -> Flow | None:
    """None for what has no ports."""
    protocol, at = packet[HEADER + 9], HEADER + (packet[HEADER] & 15) * 4
    return (protocol, packet[at : at + 4]) if protocol in (6, 17) else None


def main(text: str, name: str, orders: str) -> None:
    """Set up the nodes, say so, and route. Whoever started this removes the namespaces."""
    matrix = Matrix.of(json.loads(text))
    devices = [make_node(f"{name}-{i}", i) for i in range(len(matrix))]
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(orders)
    os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(10))
    gc.disable()  # a pause would be latency; nothing here makes cycles
    print("up", flush=True)
    Router(Network(matrix), devices, control).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
