"""`make quick`: within a minute, what a change most likely breaks. `make test` is what counts.

1. ruff on all files, and mypy if its cache is warm;
2. the quick tests of the rooms that have changed since the common ancestor with `main`; of all protocol
   cores where nothing has changed or git cannot tell;
3. twenty simulated histories.

The tests of room `hetpeer/<package>/<room>` are the files of `tests/<package>/` that import it. A test file
is quick if it starts no process and loads no torch.

    python -m tests.quick              what has changed
    python -m tests.quick hetpeer/dht  as if this folder had changed
"""

import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PYTHON = sys.executable
SLOW = re.compile(
    r"\btorch\b|subprocess|CliRunner|create_run|ChildPeer|Node\.start|mark\.(swarm|browser|alone)|tests\.swarm"
)
"""What a test file, or a helper that it imports, has in it that takes seconds: processes and traced
models.
"""
HELPER = re.compile(r"^from (tests\.\w+\.\w+) import ", re.MULTILINE)
ELSEWHERE = {"swarm", "hostile", "wanlab", "browser", "fuzz", "simulation"}
"""Folders below tests/ that are left to `make test`."""
HISTORIES = "tests/simulation/test_histories.py::test_histories_with_many_faults_keep_every_invariant"
NOT_QUICK = "not swarm and not grid and not proof and not alone"


def changed() -> list[str]:
    """Paths that differ from the common ancestor with `main`, committed or not; all cores where there are
    none.
    """
    since = _git("merge-base", "HEAD", "main") or _git("rev-parse", "HEAD")
    differ = _git("diff", "--name-only", "--no-renames", since[0]) if since else []
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*differ, *new}) or cores()


def cores() -> list[str]:
    """The paths of all protocol cores, as pyproject.toml lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (modules,) = [one["source_modules"] for one in contracts if one["name"].startswith("protocol cores")]
    return [module.replace(".", "/") for module in modules]


def _git(*arguments: str) -> list[str]:
    """Lines of its answer; none if there is no git or it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def quick_tests(paths: Iterable[str]) -> list[Path]:
    """The quick test files of the rooms at `paths`, and those that are themselves among `paths`."""
    named, rooms = {ROOT / path for path in paths}, set[tuple[str, ...]]()
    for path in map(Path, paths):
        if path.parts[0] == "hetpeer" and path.suffix in ("", ".py"):
            rooms.add(path.parts if path.suffix == "" else path.parent.parts[:3])
    found = []
    for file in sorted(TESTS.rglob("test_*.py")):
        package, text = file.relative_to(TESTS).parts[0], with_helpers(file)
        if package in ELSEWHERE or SLOW.search(text):
            continue
        own = [".".join(room) for room in rooms if room[1:2] in ((), (package,))]
        if file in named or any(re.search(rf"\b{re.escape(room)}\b", text) for room in own):
            found.append(file)
    return found


def with_helpers(file: Path) -> str:
    """The text of a test file, and those of the helpers in tests/ that it imports."""
    text = file.read_text()
    helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in HELPER.findall(text)]
    return "\n".join([text, *(helper.read_text() for helper in helpers if helper.exists())])


def lint() -> bool:
    """ruff, and mypy where it has to look at little."""
    commands = [["ruff", "check", "-q", "."], ["ruff", "format", "--check", "-q", "."]]
    if (ROOT / ".mypy_cache").exists():
        commands.append(["mypy"])
    results = [_run(["-m", *command], command[0]) for command in commands]
    return all(results)


def tests(files: Sequence[Path]) -> bool:
    if not files:
        return True
    names = [str(file.relative_to(ROOT)) for file in files]
    return _run(["-m", "pytest", "-q", "-m", NOT_QUICK, *names], f"{len(files)} test files")


def histories() -> bool:
    return _run(["-m", "pytest", "-q", HISTORIES], "twenty histories")


def _run(arguments: Sequence[str], what: str) -> bool:
    """Whether it ended well; only if not, what it said is shown."""
    begun = time.monotonic()
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    well = done.returncode in (0, 5)  # 5: pytest has nothing to run
    print(f"{'ok  ' if well else 'FAIL'}  {time.monotonic() - begun:5.1f} s  {what}", flush=True)
    if not well:
        print(done.stdout, flush=True)
    return well


def main(arguments: Sequence[str]) -> int:
    files = quick_tests(arguments or changed())
    parts: list[Callable[[], bool]] = [lambda: tests(files), lambda: lint() and histories()]
    with ThreadPoolExecutor(len(parts)) as pool:
        well = all(list(pool.map(lambda part: part(), parts)))
    print("`make test` shows the rest" if well else "something is wrong")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
