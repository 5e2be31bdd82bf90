"""Samples that nobody can compute: the run names them, and halts or leaves them out. Nobody is blamed."""

import pytest

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.dht.base.errors import ExitCode
from tests.amounts import mostly_proof
from tests.bootstrap.bad_data import write_source
from tests.swarm.swarm import Swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
STEPS = 12
SETTINGS = {
    "steps": STEPS,
    "batch-size": 5,
    "microbatch-size": 1,
    "eval-every": 6,
    "eval-samples": 2,
    "checkpoint-every": 4,
    "seed": 3,
}
"""A little more than one epoch of the 54 training samples."""
HELD_OUT = 16
"""A sample that is the first held-out one with this seed."""


async def make(swarm: Swarm, *options: str, **bad: tuple[int, ...]) -> None:
    """A run with bad samples in two stages."""
    folder = swarm.folder
    source = write_source(folder, **bad)
    given = [f"--model={source}:Words", f"--loss={source}:loss", f"--data={source}:data", "--unchecked"]
    given += [f"--{name}={value}" for name, value in SETTINGS.items()]
    author = swarm.start("author", "init", str(folder / "bad"), *given, *options)
    assert await author.ended() == 0, author.said
    swarm.run = RunDirectory.open(folder / "bad")


async def test_bad_samples_are_left_out_and_audited(swarm: Swarm) -> None:
    await make(swarm, "--on-bad-sample=skip", masked=(8, HELD_OUT), beyond=(20,))
    bootstrap = await swarm.bootstrap(together=2)
    await swarm.finished(bootstrap, *(swarm.volunteer(name) for name in ("one", "other")))
    found = swarm.records("bad_sample")
    assert any("'loss' is not finite" in one["why"] for one in found)
    assert any("cannot compute 'embedding'" in one["why"] for one in found)
    assert not swarm.records("gone")
    assert not swarm.records("rollback")
    for record in found:
        assert record["where"] in bootstrap.said
    assert {tuple(one["skipped"]) for one in swarm.records("evaluation")} == {(5,)}
    skipped = {(one["step"], i) for one in swarm.records("commit") for i in one.get("skipped", ())}
    assert skipped == {(one["batch"], one["id"]) for one in found if one["batch"] is not None}
    verdict = audit(swarm.run.path)
    assert verdict.ok, verdict.problems
    assert (verdict.steps, verdict.skipped) == (STEPS, len(skipped))
    assert verdict.counted == 5 * STEPS - len(skipped)
    again = replay(swarm.run.path)
    assert again.problems == []
    assert again.equal == STEPS


@pytest.mark.parametrize("bad", mostly_proof(["masked", "beyond"], ["masked"]))
async def test_a_bad_sample_halts_the_run_and_is_named(swarm: Swarm, bad: str) -> None:
    await make(swarm, **{bad: (8,)})
    bootstrap = await swarm.bootstrap(together=2, before="expects_nobody")
    volunteers = [swarm.volunteer(name) for name in ("one", "other")]
    for child in (bootstrap, *volunteers):
        assert await child.ended() == ExitCode.RUN_CLOSED, child.said
    (record,) = swarm.records("bad_sample")
    assert record["where"] in bootstrap.said.splitlines()[-1]
    assert swarm.records()[-1]["kind"] == "halt"
    assert not swarm.records("gone")
    assert swarm.version == record["step"]
