"""A wide-area network on one machine: `python -m tests.wanlab MATRIX.json -- COMMAND`.

Runs COMMAND (a shell line) once for each node, in its namespace; `{i}`, `{name}` and `{ip}` in it are the
node's. Without a command the network stays up until Ctrl-C, for `ip netns exec`. MATRIX.json may be the name
of one in tests/wanlab/matrices. Orders (`partition homes3`, `latency 0 1 80`, … network.py has all) are read
from standard input, one a line.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import sys
import time
from pathlib import Path
from typing import Any

from tests.wanlab.lab import MATRICES, Lab, LabError
from tests.wanlab.matrix import MatrixError

POLL_S = 0.1


def main() -> int:
    """Exit status: 0 when every command ended with 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.wanlab", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "matrix", help="a JSON file, or one of: " + ", ".join(sorted(p.stem for p in MATRICES.glob("*.json")))
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for what each node's command prints, NAME.log; default: here"
    )
    parser.add_argument(
        "--timeout", type=float, default=float("inf"), help="end everything after so many seconds"
    )
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:cut]), " ".join(sys.argv[cut + 1 :])
    try:
        with Lab(_matrix(options.matrix)) as lab:
            for node, name in enumerate(lab.matrix.names):
                print(f"{name}: {lab.address(node)}, ip netns exec {lab.namespace(node)}", flush=True)
            return _run(lab, command, options.logs, time.monotonic() + options.timeout)
    except (LabError, MatrixError, OSError) as error:
        print(f"no network: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130


def _matrix(name: str) -> str | dict[str, Any]:
    import json

    if "/" not in name and (MATRICES / f"{name}.json").exists():
        return name
    try:
        data = json.loads(Path(name).read_text())
    except ValueError as error:
        raise MatrixError(f"{name} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise MatrixError(f"{name} is not a JSON object")
    return data


def _run(lab: Lab, command: str, logs: Path | None, deadline: float) -> int:
    started = []
    with contextlib.ExitStack() as files:
        for node, name in enumerate(lab.matrix.names) if command else ():
            line = (
                command.replace("{i}", str(node)).replace("{name}", name).replace("{ip}", lab.address(node))
            )
            options: dict[str, Any] = {}
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                out = files.enter_context((logs / f"{name}.log").open("wb"))
                options = {"stdout": out, "stderr": out}
            started.append(lab.start(node, ["sh", "-c", line], **options))
        while time.monotonic() < deadline and not (started and all(p.poll() is not None for p in started)):
            _obey(lab)
    return 0 if all(process.poll() == 0 for process in started) else 1


def _obey(lab: Lab) -> None:
    """Wait a moment, and do what standard input says meanwhile."""
    if not select.select([sys.stdin], (), (), POLL_S)[0]:
        return
    line = sys.stdin.readline()
    if not line:  # closed: no more orders
        time.sleep(POLL_S)
    elif line.strip():
        try:
            print(lab.order(line.strip()), flush=True)
        except LabError as error:
            print(error, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
