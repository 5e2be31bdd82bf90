"""Options of a demo, its folder, and the run that it makes there.

OUT/.hetpeer-demo   marks the folder as a demo's, which the next demo may replace
OUT/run             the run directory, as `hetpeer init` makes it
OUT/volunteers/N    the home of volunteer N            OUT/logs   what each process printed
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetpeer.dht.base.errors import ExitCode, LocalError

if TYPE_CHECKING:
    from hetpeer.bootstrap.run.run_directory import RunDirectory

MARKER = ".hetpeer-demo"
BATCH_SIZE, MICROBATCH_SIZE, SEQUENCE_LENGTH, SLOT_SIZE = 32, 4, 64, 2
"""Small enough that two cores train sixty steps, and train them again to compare, within four minutes."""
LEARNING_RATE = 5e-4
"""Low enough for a comparison: with twice this rate some seeds pass through a spike of the loss in which
rounding errors grow to 1e-5 within three steps, also on one machine. Then a lost microbatch cannot be told
from rounding.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Demo options. Volunteers are numbered from 1; `model`: `module.py:function`, empty: the example GPT."""

    out: Path
    peers: int = 4
    steps: int = 60
    kill: int = 1
    """Volunteers that are killed (SIGKILL), at equal distances of the run."""
    data: tuple[Path, ...] = ()
    """Text files or folders; none for Python's standard library."""
    seed: int = 0
    """Seed of the parameters, the order of the data, and the choice of the killed volunteer."""
    model: str = ""
    trace: bool = False
    """Whether volunteers record spans of their work."""

    def __post_init__(self) -> None:
        """Raises `LocalError` HP-DEMO-001."""
        for wrong, what in (
            (self.peers < 1, "a demo needs at least one volunteer"),
            (self.steps < 1, "a demo needs at least one step"),
            (not 0 <= self.kill < self.peers, f"{self.kill} of {self.peers} volunteers cannot be killed"),
            (self.kill >= self.steps, f"{self.kill} kills do not fit into {self.steps} steps"),
        ):
            if wrong:
                raise LocalError(
                    "HP-DEMO-001",
                    what,
                    why="at least one volunteer must be left to finish the run",
                    fix="for example: hetpeer demo --peers 4 --steps 60 --kill 1",
                    exit_code=ExitCode.USAGE,
                )

    @property
    def kill_steps(self) -> tuple[int, ...]:
        """Committed steps at which a volunteer is killed, one for each kill; a single kill is half-way."""
        return tuple(self.steps * number // (self.kill + 1) for number in range(1, self.kill + 1))

    @property
    def run_path(self) -> Path:
        return self.out / "run"

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    @property
    def tokens_per_step(self) -> int:
        return BATCH_SIZE * SEQUENCE_LENGTH

    def home(self, number: int) -> Path:
        """Folder of volunteer `number`."""
        return self.out / "volunteers" / str(number)

    def events_path(self, number: int, run_id: str) -> Path:
        """Volunteer `number`'s own signed log."""
        return self.home(number) / "runs" / run_id / "events.jsonl"


@contextmanager
def claimed(settings: DemoSettings) -> Iterator[None]:
    """Claim OUT for this demo, emptied of an earlier one.

    Raises `LocalError`: HP-DISK-003 if something else is there, HP-DEMO-006 if another demo runs in it,
    HP-DISK-001.
    """
    from hetpeer.bootstrap.run.durable_files import disk_errors

    out, marker = settings.out, settings.out / MARKER
    if out.exists() and not marker.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LocalError(
            "HP-DISK-003",
            f"{out} exists and is not empty",
            why="it is not the folder of an earlier demo, so it is not overwritten",
            fix="choose another folder with --out",
            exit_code=ExitCode.CONFIG,
        )
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = marker.open("a")
    with lock:
        with disk_errors(out):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LocalError(
                    "HP-DEMO-006",
                    f"another demo is running in {out}",
                    why="it holds the lock on that folder",
                    fix="wait until it has ended, or choose another folder with --out",
                    exit_code=ExitCode.CONFIG,
                ) from error
            for entry in out.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry != marker:
                    entry.unlink()
            settings.logs.mkdir()
        yield


def make_run(settings: DemoSettings, tell: Callable[[str], None] = lambda _: None) -> RunDirectory:
    """Make the run that the demo trains; `tell` gets a line before each part that may take long.

    Raises `LocalError` HP-DEMO-005 for data that is not text, and as `create_run`.
    """
    from hetpeer.bootstrap.authoring.create import create_run
    from hetpeer.bootstrap.authoring.run_data import FUNCTION
    from hetpeer.bootstrap.run.settings import TrainingSettings

    if any(FUNCTION.fullmatch(str(path)) for path in settings.data):
        raise LocalError(
            "HP-DEMO-005",
            "a demo trains on text",
            why="it ends with a text that the trained model writes",
            fix="give text files or folders; for other data there are hetpeer init, bootstrap and join",
            exit_code=ExitCode.USAGE,
        )
    often = max(1, settings.steps // 6)
    return create_run(
        settings.run_path,
        model=settings.model or example_model(),
        data=settings.data,
        name="demo",
        seed=settings.seed,
        sequence_length=SEQUENCE_LENGTH,
        stages=[min(2, settings.peers - settings.kill)],
        training=TrainingSettings(
            steps=settings.steps,
            batch_size=BATCH_SIZE,
            microbatch_size=MICROBATCH_SIZE,
            slot_size=SLOT_SIZE,
            learning_rate=LEARNING_RATE,
            eval_every=often,
            checkpoint_every=often,
        ),
        tell=tell,
    )


def example_model() -> str:
    """`gpt.py:build` of the examples, in the checkout or as installed; nothing of it is imported."""
    found = importlib.util.find_spec("hetpeer.examples.gpt")
    if found is None or found.origin is None:
        raise LocalError(
            "HP-DEMO-002",
            "the example model is not installed",
            why="the package hetpeer.examples has no gpt.py",
            fix="install hetpeer again, or give --model module.py:function",
            exit_code=ExitCode.CONFIG,
        )
    return f"{found.origin}:build"
