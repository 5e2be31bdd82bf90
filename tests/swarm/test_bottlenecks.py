"""Bottlenecks in a swarm with a death on the way: few bytes cross, and the run is that of one machine."""

import shutil
import signal

import pytest

from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.watching.metric_families import PREFIX
from tests.swarm.conftest import MODEL
from tests.swarm.forkserver import ROOT
from tests.swarm.swarm import Swarm, scraped

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
WIDTH, RANK, LENGTH, SAMPLES = 32, 2, 16, 2
OPTIONS = {
    "steps": 100_000,
    "batch-size": 12,
    "microbatch-size": SAMPLES,
    "sequence-length": LENGTH,
    "eval-every": 8,
    "eval-samples": 3,
    "checkpoint-every": 10,
    "seed": 3,
    "stages": 2,
    "bottleneck": RANK,
}


async def test_a_sixteenth_crosses_and_the_replay_is_equal(swarm: Swarm) -> None:
    """Two pipelines; a volunteer dies with an update in its memory."""
    folder = swarm.folder / "author"
    folder.mkdir()
    shutil.copy(ROOT / "hetpeer" / "examples" / "gpt.py", folder)
    (folder / "tiny.py").write_text(MODEL)
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    author = swarm.start(
        "author",
        "init",
        str(swarm.folder / "narrow"),
        f"--model={folder}/tiny.py:build",
        f"--data={folder}/text.txt",
        "--unchecked",
        *(f"--{name}={value}" for name, value in OPTIONS.items()),
    )
    assert await author.ended() == 0, author.said
    assert "bottlenecks behind h.1: 2 features cross, not 32" in author.said
    assert "bottlenecks change the loss of the first microbatch from" in author.said
    swarm.run = RunDirectory.open(swarm.folder / "narrow")

    bootstrap = await swarm.bootstrap()
    volunteers = [
        swarm.volunteer(name, "--dashboard", "0", before="killed_after_step_4" if name == "c" else "polite")
        for name in "cabd"
    ]
    assert await volunteers[0].ended(90.0) == -signal.SIGKILL
    await swarm.gone(volunteers[0])
    await swarm.committed(swarm.version + 10)
    figures = [await scraped(volunteer) for volunteer in volunteers[1:]]
    step = swarm.version + 3
    await swarm.stored(step)
    for child in (*volunteers[1:], bootstrap):
        child.signal(signal.SIGINT)
        await child.ended()
    swarm.exact_so_far()

    # what crosses is RANK numbers for each token, both ways for each sample; evaluations go one way
    sample = 4 * LENGTH * RANK
    sent = [int(found[f"{PREFIX}bundle_transmit_bytes_total",]) for found in figures]
    assert all(nbytes % sample == 0 for nbytes in sent), sent
    one_way = step * int(OPTIONS["batch-size"]) * sample
    assert one_way / 4 < sum(sent) < 3 * one_way, (sent, one_way)
    assert 3 * one_way < one_way * WIDTH / RANK
