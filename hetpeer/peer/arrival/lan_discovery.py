"""Discovery of runs in the local network: DNS service discovery over multicast (RFC 6762, RFC 6763).

The only module that imports zeroconf, an extra under the LGPL, and only when needed. It bounds what it keeps
of others' messages; `peer/arrival/lan_notices` judges them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from zeroconf import Error, InterfaceChoice, IPVersion, ServiceInfo, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from hetpeer.dht.base.runtime import TaskSet
from hetpeer.dht.identity.addresses import parse_address
from hetpeer.dht.node.node import Node
from hetpeer.peer.arrival.lan_notices import SERVICE, Notice, nobody_nearby, notice, told, understood

HEAR_S = 5.0
"""Seconds to wait for the first useful answer; answers come within tenths of a second."""
OTHERS_S = 1.5
"""Seconds to wait for more answers after the first: there may be several runs."""
ASK_S = 2.0
MAX_HEARD = 32
"""Most peers that are listened to: anybody can invent names."""
LOOK_S = 15.0
"""Seconds between two checks for changed addresses."""

_log = logging.getLogger(__name__)


async def heard(host: str, run: str = "") -> Sequence[Notice]:
    """Notices of peers in the networks of `host` (0.0.0.0: all), about `run` or any run, in random order.

    Takes some seconds. Raises `LocalError` HP-NET-016 if no question can be sent.
    """
    found: list[Notice] = []
    useful = asyncio.Event()
    asked: set[str] = set()
    tasks = TaskSet()

    async def ask(name: str) -> None:
        with suppress(Error):  # a name that is none
            info = AsyncServiceInfo(SERVICE, name)
            if not await info.async_request(network.zeroconf, ASK_S * 1000):
                return
            one = understood(info.properties)
            if one is not None:
                found.append(one)
                if run in ("", one.run):
                    useful.set()

    def changed(*, name: str, state_change: ServiceStateChange, **_: Any) -> None:
        if state_change is ServiceStateChange.Added and name not in asked and len(asked) < MAX_HEARD:
            asked.add(name)
            tasks.spawn(ask(name), name="what somebody in the local network says")

    try:
        network = _network(host)
    except OSError as error:
        raise nobody_nearby(f"no question can be sent there: {error.strerror or error}") from error
    try:
        async with AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[changed]):
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAR_S):
                    await useful.wait()
                await asyncio.sleep(OTHERS_S)
    finally:
        await tasks.close()
        await network.async_close()
    secrets.SystemRandom().shuffle(found)  # who talks first is not believed first
    return found


async def announce_forever(node: Node, host: str, run: str, name: str) -> None:
    """Announce in the networks of `host` that `node` is in `run`, called `name`, until cancelled.

    A network that does not allow it is logged only: an invite works without it.
    """
    try:
        await _announce(node, host, run, name)
    except (OSError, Error) as error:
        _log.warning("this peer cannot be found in the local network: %s", error or type(error).__name__)


async def _announce(node: Node, host: str, run: str, name: str) -> None:
    """Announce the run in the local network, with our current addresses, until cancelled."""
    async with _network(host) as network:
        said: Notice | None = None
        while True:
            now = notice(run, name, map(parse_address, node.addresses()))
            if now is not None and now != said:
                info = _record(now)
                if said is None:
                    # Names are peer ids. To ask whether one is taken would let anybody say yes.
                    await network.async_register_service(info, cooperating_responders=True)
                else:
                    await network.async_update_interfaces()
                    await network.async_update_service(info)
                said = now
            await asyncio.sleep(LOOK_S)


def _record(said: Notice) -> ServiceInfo:
    """The mDNS record of a notice, named by the peer id."""
    first = said.addresses[0]
    assert first.socket is not None  # lan_notices.py takes no others
    ip, port = first.socket
    return ServiceInfo(
        SERVICE,
        f"{first.peer_id}.{SERVICE}",
        port=port,
        parsed_addresses=[ip],
        properties=told(said),
        server=f"{first.peer_id}.local.",
    )


def _network(host: str) -> AsyncZeroconf:
    """Raises OSError."""
    if host == "0.0.0.0":  # noqa: S104 - compared, not bound to
        return AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
    if host == "::":
        return AsyncZeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.All)
    return AsyncZeroconf(interfaces=[host])
