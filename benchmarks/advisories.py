"""Are security advisories known of what constraints.txt pins?

pip-audit asks PyPI for each version: a tool for whoever works on hetpeer, and no part of the tests, as it
needs the network and says something else tomorrow. It ends well where a package is not known to whom it asks,
such as a mirror without advisories; nothing is known of that package then, so here that is no success.

    make audit-deps

Exit status: 0: all were looked up and nothing is known; 1: something is; 5: not all could be looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetpeer.dht.base.errors import ExitCode

PINS = Path(__file__).parents[1] / "constraints.txt"
ADVISORIES = 1


def asked(pins: Path) -> tuple[str, str]:
    """Output of pip-audit, and its complaints."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(pins), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def judged(written: str, complaint: str) -> tuple[int, list[str]]:
    """The exit status, and what is said of it."""
    try:
        found = json.loads(written)["dependencies"]
    except ValueError:
        why = (complaint.strip().splitlines() or ["pip-audit said nothing"])[-1]
        return ExitCode.NETWORK, [
            (
                f"audit-deps: the advisories could not be had; why: {why[:300]}; do: try again where "
                "pypi.org answers"
            )
        ]
    lines = [line for package in found for line in _known(package)]
    missing = [package["name"] for package in found if "skip_reason" in package]
    if missing:
        some = ", ".join(missing[:3]) + (" …" if missing[3:] else "")
        lines.append(
            f"audit-deps: {len(missing)} of {len(found)} packages could not be looked up ({some}); why: who "
            "was asked does not know them, as mirrors do; do: try again where pypi.org itself answers"
        )
        return ExitCode.NETWORK if len(lines) == 1 else ADVISORIES, lines
    if lines:
        return ADVISORIES, lines
    return ExitCode.OK, [f"audit-deps: no advisory is known of {len(found)} packages"]


def _known(package: dict[str, Any]) -> Iterator[str]:
    for one in package.get("vulns", ()):
        mended = ", ".join(one["fix_versions"]) or "no version yet"
        yield f"{package['name']} {package['version']}: {one['id']}, mended in {mended}"


def main() -> None:
    status, lines = judged(*asked(PINS))
    print("\n".join(lines))
    sys.exit(status)


if __name__ == "__main__":
    main()
