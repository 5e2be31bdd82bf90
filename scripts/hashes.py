"""Write hashes.txt anew: the sha256 of each file that `make setup` installs besides torch (`make hashes`).

Run by the Python of .venv after constraints.txt or pyproject.toml has changed. For each supported Python, pip
says which file it would take for each package of the development set-up, and what that package requires. The
first error ends it, and hashes.txt stays as it was.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)
"""Tags of the wheels that are taken: for the glibc that torch's wheel needs, and for older ones."""
LEFT_OUT = "torch"
"""Its file depends on the index (CUDA or not), and so do its CUDA libraries."""
HEAD = """\
# sha256 of each file that `make setup` installs besides torch, for Python 3.11 to 3.14 on Linux x86-64.
# Made by `make hashes`; the versions are those of constraints.txt; docs: SECURITY.md, "Dependencies".
"""

Wanted = tuple[str, str]
"""A package's canonical name, and one of its extras; empty: none."""


def pins() -> dict[str, str]:
    """Canonical name → line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def project() -> dict[str, list[str]]:
    """Requirements of pyproject.toml by extra; those without an extra have an empty one."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": read["dependencies"], **read["optional-dependencies"]}


def chosen(lines: Iterable[str], python: str) -> list[dict[str, Any]]:
    """Pip's report on the pinned `lines`: the file that it would install with `python`, and its metadata."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--no-deps", "--prefer-binary", f"--report={report}", f"--target={folder}/none"]
        command += ["--implementation=cp", f"--python-version={python}"]
        command += [*(f"--platform={one}" for one in PLATFORMS), *lines]
        subprocess.run(command, check=True)
        installed: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installed


def required(requirements: Iterable[str], python: str, extra: str) -> set[Wanted]:
    """Packages and their extras that `requirements` ask for with `python`, under `extra`."""
    found = set()
    about = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate(about):
            name = canonicalize_name(requirement.name)
            found |= {(name, ""), *((name, canonicalize_name(each)) for each in requirement.extras)}
    return found


def files(python: str) -> dict[str, str]:
    """Canonical name → sha256 of all that the development set-up installs with `python`."""
    pinned, hashes = pins(), {}
    known = {"hetpeer": project()}
    needs: dict[str, list[str]] = {}
    wanted: set[Wanted] = set()
    new: set[Wanted] = {("hetpeer", ""), ("hetpeer", "dev")}
    while new:
        wanted |= new
        unknown = {name for name, _ in new} - needs.keys() - known.keys()
        if unpinned := unknown - pinned.keys():
            sys.exit(f"constraints.txt pins none of: {', '.join(sorted(unpinned))}")
        for item in chosen([pinned[name] for name in sorted(unknown)], python) if unknown else []:
            name = canonicalize_name(item["metadata"]["name"])
            needs[name] = item["metadata"].get("requires_dist", [])
            hashes[name] = item["download_info"]["archive_info"]["hashes"]["sha256"]
        asked: set[Wanted] = set()
        for name, extra in new:
            asked |= required(known[name][extra] if name in known else needs[name], python, extra)
        new = {one for one in asked if one[0] != LEFT_OUT} - wanted
    return hashes


def main() -> None:
    """Write hashes.txt: each file that any of PYTHONS would take."""
    hashes: dict[str, set[str]] = defaultdict(set)
    for python in PYTHONS:
        for name, digest in files(python).items():
            hashes[name].add(digest)
    pinned = pins()
    entries = (
        " \\\n".join([pinned[name], *(f"    --hash=sha256:{digest}" for digest in sorted(hashes[name]))])
        for name in sorted(hashes)
    )
    (ROOT / "hashes.txt").write_text(HEAD + "\n".join(entries) + "\n")


if __name__ == "__main__":
    main()
