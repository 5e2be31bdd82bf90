"""The line of this machine as it was last known, in its home: `line.json` (docs/joining.md).

A damaged or missing file counts as an unknown line: it is measured. The file has no address of the machine,
only a hash of those that it had, which says whether it is in another network now.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hetpeer.bootstrap.run.durable_files import atomic_write
from hetpeer.dht.base.errors import LocalError
from hetpeer.peer.probing.line_estimate import LineRate
from hetpeer.peer.probing.line_probe import ProbedLine

FILE = "line.json"
FRESH_S = 86_400.0
"""Seconds after which a probe is out of date."""
OTHERWISE = 1.5
"""Factor between a probe's uplink and that of traffic from which on the probe is not believed."""
PREFIX_BITS = 64
"""Bits of an IPv6 address that say in which network it is; the others may change every day."""

_Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KeptLine(BaseModel):
    """A line; rates in bytes/s, 0: unknown; times in seconds since 1970.

    line = KeptLine.load(home)
    if not line.is_fresh(time.time(), network_of(addresses)):
        ...  # probe it
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uplink: _Rate = 0.0
    uplink_error: _Rate = 0.0
    """Share of the uplink; 0 if it is that of traffic."""
    downlink: _Rate = 0.0
    downlink_error: _Rate = 0.0
    trip_s: _Rate = 0.0
    """Least round trip to any of the probed peers."""
    network: str = ""
    """Hash of the machine's addresses at the probe."""
    probed_at: _Rate = 0.0
    """0: it has to be probed."""
    probed_bytes: int = 0
    traffic_at: _Rate = 0.0
    """When traffic last showed the uplink; 0: it never did."""
    coordinate: Annotated[tuple[int, ...], Field(max_length=8)] = ()
    """Network coordinate, as in adverts; empty: unknown."""
    coordinate_network: str = ""
    """Hash of the machine's addresses when it was kept."""

    @classmethod
    def load(cls, folder: Path) -> KeptLine:
        """The line that is kept in the home `folder`; an unknown one if there is none."""
        try:
            return cls.model_validate_json((folder / FILE).read_bytes())
        except (OSError, ValidationError):
            return cls()

    def save(self, folder: Path) -> None:
        """Keep it. Without room on the disk it is measured again next time."""
        with contextlib.suppress(LocalError):
            atomic_write(folder / FILE, self.model_dump_json().encode(), mode=0o600)

    def is_fresh(self, now: float, network: str) -> bool:
        """Whether no probe is needed: it is not old, and of this network."""
        return self.network == network and 0.0 <= now - self.probed_at < FRESH_S

    def probed(self, found: ProbedLine, now: float, network: str) -> KeptLine:
        """After a probe. What it did not find stays as it was, unless the network is another.

        So does an uplink that traffic has shown since not so long ago.
        """
        before = self if self.network == network else KeptLine()
        up, down = found.uplink, found.downlink
        if before.traffic_at and now - before.traffic_at < FRESH_S:
            up = LineRate(rate=before.uplink)
        return before.model_copy(
            update={
                **({"uplink": up.rate, "uplink_error": up.error} if up.rate else {}),
                **({"downlink": down.rate, "downlink_error": down.error} if down.rate else {}),
                "trip_s": min(found.trips.values(), default=before.trip_s),
                "network": network,
                "probed_at": now if found.uplink.rate and down.rate else 0.0,
                "probed_bytes": found.nbytes,
            }
        )

    def seen(self, uplink: float, now: float) -> KeptLine:
        """After traffic that showed this uplink (0: none did): it wins over the probe.

        If it is far from what the probe found, that is not believed any more, and the line is probed again.
        """
        if uplink <= 0.0:
            return self
        otherwise = self.uplink and not 1 / OTHERWISE <= uplink / self.uplink <= OTHERWISE
        return self.model_copy(
            update={
                "uplink": uplink,
                "uplink_error": 0.0,
                "traffic_at": now,
                **({"probed_at": 0.0} if otherwise else {}),
            }
        )


def network_of(addresses: Iterable[str]) -> str:
    """Hash of the network in which a machine with these IP addresses is."""
    networks = set()
    for text in addresses:
        ip = ipaddress.ip_address(text)
        bits = PREFIX_BITS if ip.version == 6 else ip.max_prefixlen
        networks.add(str(ipaddress.ip_network(f"{ip}/{bits}", strict=False)))
    return hashlib.sha256(" ".join(sorted(networks)).encode()).hexdigest()[:16]
