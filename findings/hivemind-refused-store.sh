#!/usr/bin/env bash
# Guess: a store in hivemind's DHT that is refused (False), because its expiration is earlier than that of the kept value, changes nothing.
# True: in hivemind 1.1.12 the kept subkey then expires with the refused value: every node returns an empty dictionary from that moment on, until the next store.
# Hurts: programs that renew subkeys and whose next expiration may be earlier (a clock that is set back, a last store for a shorter time): they vanish though each node had said that the value kept is the newer one. Anybody can send an old copy of a signed subkey with the same effect.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0
"$folder/venv/bin/python" -m pip install -q hivemind==1.1.12
"$folder/venv/bin/python" - <<'PY'
import asyncio
import sys
import time

import hivemind
from hivemind.dht.node import DHTNode

HERE = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}


async def seen(node: DHTNode, key: str) -> dict[str, str] | None:
    found = await node.get(key, latest=True)
    return None if found is None else {peer: item.value for peer, item in found.value.items()}


async def main() -> None:
    first = await DHTNode.create(**HERE)
    second = await DHTNode.create(initial_peers=[str(a) for a in await first.get_visible_maddrs()], **HERE)
    now = time.time()
    said = [
        await first.store("alone", "kept", now + 60, subkey="peer"),
        await first.store("twice", "kept", now + 60, subkey="peer"),
        await first.store("twice", "refused", now + 3, subkey="peer"),
    ]
    await asyncio.sleep(now + 4 - time.time())
    alone = [await seen(node, "alone") for node in (first, second)]
    twice = [await seen(node, "twice") for node in (first, second)]
    print(f"hivemind {hivemind.__version__}: stores {said}; after 4 s: stored once {alone}, and once more, refused {twice}")
    for node in (second, first):
        await node.shutdown()
    sys.exit((said, alone, twice) != ([True, True, False], [{"peer": "kept"}] * 2, [{}] * 2))


asyncio.run(main())
PY
