"""hivemind's peers wait for each other before they are measured, and not for ever for one that has died."""

from __future__ import annotations

import time
from typing import Any

LOOK_S = 0.1


def everybody_is_there(dht: Any, key: str, peer: int, peers: int, within_s: float) -> None:
    """Say at `key` that `peer` is there, and return when all of `peers` have. Raises `TimeoutError`."""
    from hivemind.utils.timed_storage import get_dht_time

    dht.store(key, subkey=str(peer), value=True, expiration_time=get_dht_time() + 2 * within_s)
    until = time.monotonic() + within_s
    while (here := len(getattr(dht.get(key, latest=True), "value", ()))) < peers:
        if time.monotonic() > until:
            raise TimeoutError(f"{here} of {peers} peers have come within {within_s:.0f} s")
        time.sleep(LOOK_S)
