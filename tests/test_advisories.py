"""What `make audit-deps` makes of what pip-audit writes."""

import json
import re

import pytest

from benchmarks.advisories import PINS, judged
from hetpeer.dht.base.errors import ExitCode

FINE = {"name": "msgpack", "version": "1.2.4", "vulns": []}
BROKEN = {
    "name": "h11",
    "version": "0.15.0",
    "vulns": [{"id": "PYSEC-2025-1", "fix_versions": ["0.16.0"], "aliases": [], "description": "x"}],
}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch"}


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ([FINE], ExitCode.OK, ["no advisory is known of 1 packages"]),
        ([FINE, BROKEN], 1, ["h11 0.15.0: PYSEC-2025-1, mended in 0.16.0"]),
        ([FINE, UNKNOWN], ExitCode.NETWORK, ["1 of 2 packages could not be looked up (torch)"]),
        ([BROKEN, UNKNOWN], 1, ["h11 0.15.0", "1 of 2 packages could not be looked up"]),
    ],
    ids=["nothing known", "something known", "a mirror", "both"],
)
def test_what_was_not_looked_up_is_no_success(found, status, said):
    """pip-audit itself ends with 0 where who is asked knows none of the packages."""
    got, lines = judged(json.dumps({"dependencies": found, "fixes": []}), "No known vulnerabilities found")
    assert got == status
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_no_network_is_one_line():
    trace = "Traceback (most recent call last):\n  File x\nrequests.exceptions.ProxyError: cannot connect"
    status, (line,) = judged("", trace)
    assert status == ExitCode.NETWORK
    assert "why: requests.exceptions.ProxyError: cannot connect; do: " in line
    assert "\n" not in line


def test_every_pin_is_one_version():
    """Else pip-audit would look up what nobody installs."""
    pins = PINS.read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+]+", pin) for pin in pins)
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert len(set(names)) == len(names)
