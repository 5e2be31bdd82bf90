"""Networks of devices: DT-FM's five, and seeded ones in which no two devices are alike.

DT-FM's matrices are those of its repository (github.com/DS3Lab/DT-FM, commit cda948f, MIT licence):
milliseconds and Gbit/s, 64 devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from hetpeer.stages.planning.device_network import DeviceNetwork
from hetpeer.stages.planning.grids.grid_costs import StepTraffic

STAGES = REPLICAS = 8
TRAFFIC = StepTraffic(gradient_gb=1.3 * 4 * 3 / 24, activation_gb=2024 * 2048 * 2 * 61.03515625 / 2**30)
"""DT-FM's: three of 24 layers with 1.3e9 float32 parameters; the activations of 125,000 tokens (its code
says 2024 where 2048 must be meant).
"""
BEST: Mapping[str, float] = MappingProxyType(
    {
        "datacenter": 3.439799129486084,
        "spot": 31.634159832000734,
        "multi_dc": 16.086839732578824,
        "regional": 34.80204101721226,
        "worldwide": 49.218380053128435,
    }
)
"""Least known cost of DT-FM's cases, in seconds; all but the last are proven."""
KINDS = ("last miles", "cities", "random")
FIVE_KINDS = (*KINDS, "wide", "jittered")

_FILE = Path(__file__).with_name("dtfm.npz")


def dt_fm(case: str) -> DeviceNetwork:
    """One of BEST."""
    with np.load(_FILE) as matrices:
        return DeviceNetwork.of(
            {name: matrices[f"{case}_{name}"].tolist() for name in ("latency_ms", "bandwidth_gbit_s")}
        )


def uneven(kind: str, seed: int, devices: int = STAGES * REPLICAS) -> DeviceNetwork:
    """One of FIVE_KINDS. Directed, but for "wide": up is not down."""
    random = np.random.default_rng([seed, FIVE_KINDS.index(kind)])
    make = dict(zip(FIVE_KINDS, (_last_miles, _cities, _random, _wide, _jittered), strict=True))[kind]
    latency_ms, gbit_s = make(random, devices)
    np.fill_diagonal(latency_ms, 0.0)
    return DeviceNetwork(latency_ms / 1e3, gbit_s)


def regions(seed: int, devices: int, count: int) -> DeviceNetwork:
    """Devices in so many cities, `devices` in all, as in "cities"."""
    latency_ms, gbit_s = _cities(np.random.default_rng([seed, count]), devices, count)
    np.fill_diagonal(latency_ms, 0.0)
    return DeviceNetwork(latency_ms / 1e3, gbit_s)


def continents(seed: int, devices: int = STAGES * REPLICAS) -> DeviceNetwork:
    """Homes in thirty cities of a globe. The way goes along great circles, with detours of its own for each
    pair of cities; it carries less the longer it is, and each home has a line of its own.
    """
    random = np.random.default_rng([seed, 30])
    spots = random.normal(size=(30, 3))
    spots /= np.linalg.norm(spots, axis=1, keepdims=True)
    city = random.integers(30, size=devices)
    km = 6371.0 * np.arccos(np.clip(spots @ spots.T, -1.0, 1.0))
    detour = _mirrored(np.exp(random.normal(0.3, 0.12, km.shape)))
    own = np.exp(random.normal(np.log(4.0), 0.6, devices))
    latency = (km * detour / 200.0)[np.ix_(city, city)] + own[:, None] + own[None, :]
    up = np.exp(random.normal(np.log(0.1), 0.9, devices))
    down = up * np.exp(np.abs(random.normal(1.0, 0.5, devices)))
    way = _mirrored(np.exp(random.normal(0.0, 0.12, latency.shape))) * 8.0 / latency
    np.fill_diagonal(latency, 0.0)
    return DeviceNetwork(latency / 1e3, np.minimum(np.minimum(up[:, None], down[None, :]), way))


def _mirrored(matrix: np.ndarray) -> np.ndarray:
    """The upper triangle on both sides."""
    upper = np.triu(matrix)
    return upper + np.triu(matrix, 1).T


def _last_miles(random: np.random.Generator, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Homes: each has a line of its own, lognormal, down faster than up; what is between them is no limit."""
    up = np.exp(random.normal(np.log(0.1), 0.8, devices))
    down = up * np.exp(np.abs(random.normal(1.0, 0.5, devices)))
    own = np.exp(random.normal(np.log(8.0), 0.7, devices))
    jitter = np.exp(random.normal(0.0, 0.1, (devices, devices)))
    return (own[:, None] + own[None, :]) * jitter, np.minimum(up[:, None], down[None, :])


def _cities(random: np.random.Generator, devices: int, count: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Devices in cities on a map, unevenly many in each; latency grows with the distance, bandwidth falls
    with latency, both with jitter.
    """
    city = random.choice(count, size=devices, p=random.dirichlet(np.ones(count)))
    at = random.uniform(0.0, 10_000.0, (count, 2))
    km = np.hypot(*(at[city][:, None] - at[city][None, :]).transpose(2, 0, 1))
    latency = (1.0 + km / 100.0) * np.exp(random.normal(0.0, 0.2, (devices, devices)))
    bandwidth = np.minimum(5.0, 0.05 + 20.0 / (1.0 + latency)) * np.exp(
        random.normal(0.0, 0.3, (devices, devices))
    )
    return latency, bandwidth


def _random(random: np.random.Generator, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """No structure at all."""
    return random.uniform(1.0, 200.0, (devices, devices)), random.uniform(0.1, 10.0, (devices, devices))


def _wide(random: np.random.Generator, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """No structure, and bandwidths that differ a hundredfold: log-uniform. Alike both ways."""
    latency = random.uniform(1.0, 250.0, (devices, devices))
    bandwidth = 10.0 ** random.uniform(-1.0, 1.0, (devices, devices))
    upper = np.triu(np.ones((devices, devices), dtype=np.bool_), 1)
    return np.where(upper, latency, latency.T), np.where(upper, bandwidth, bandwidth.T)


def _jittered(random: np.random.Generator, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """DT-FM's worldwide network, each direction of each pair with jitter of its own."""
    network = dt_fm("worldwide")
    jitter = np.exp(random.normal(0.0, 0.3, (2, devices, devices)))
    return 1e3 * network.latency_s * jitter[0], network.bandwidth_gbit_s * jitter[1]
