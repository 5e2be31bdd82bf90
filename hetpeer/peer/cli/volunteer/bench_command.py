"""`hetpeer bench`: measure the speed of this machine."""

from __future__ import annotations

import json

from hetpeer.peer.cli.options import HomeOption, JsonOption


def bench(*, as_json: JsonOption = False, home: HomeOption = None) -> None:
    """Measure the speed of this machine.

    Takes a few seconds: matrix products, memory, the disk of its home, and its own network.
    """
    from hetpeer.peer.checkup import machine_speeds
    from hetpeer.peer.process.home import default_home
    from hetpeer.stages.block.device import survey

    machine, found = survey(), []
    for speed in machine_speeds.measure(home or default_home(), machine.cores):
        found.append(speed)
        if not as_json:
            print(speed.line(), flush=True)
    if as_json:
        print(json.dumps(machine_speeds.document(machine, found)))
