"""Volunteers, or parts of them, die without a word: `kill -9`, the OOM killer, a crashed p2pd."""

import asyncio
import contextlib
import json
import signal

import psutil
import pytest

from hetpeer.bootstrap.consensus.replica import credit_in
from hetpeer.bootstrap.storage.training_curve import curve_points
from hetpeer.dht.base.errors import ExitCode
from tests.swarm.child import Child, until
from tests.swarm.swarm import Swarm, scraped

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


async def test_the_only_holder_goes(swarm: Swarm) -> None:
    """Killed: the run goes back to the checkpoint. With a farewell: nothing is lost. It goes on when somebody
    comes.
    """
    bootstrap = await swarm.bootstrap("--dashboard", "0", "--keep-places")
    first = swarm.volunteer("first", "--dashboard", "127.0.0.1:0")
    killed = swarm.volunteer("killed", fail="tell_vote:8")
    assert await killed.ended() == -signal.SIGKILL
    await swarm.gone(killed)
    await until(lambda: swarm.records("rollback"), "a roll-back")
    went_back_to_what_was_stored(swarm, 1)

    leaving = swarm.volunteer("leaving", before="leaves_after_step_12")
    assert await leaving.ended() == ExitCode.OK
    assert (await swarm.gone(leaving))["why"] == "said farewell"
    assert "left the run" in leaving.said
    went_back_to_what_was_stored(swarm, 1)  # the farewell has cost no committed step

    await credit_is_what_the_log_says(swarm, first)
    await metrics_are_what_the_log_says(swarm, bootstrap, first)
    last = swarm.volunteer("last")
    await swarm.finished(bootstrap, first, last)
    swarm.exact()
    curve_is_what_the_log_says(swarm)


def curve_is_what_the_log_says(swarm: Swarm) -> None:
    """`metrics.jsonl` has each surviving step once, and when it was written; no roll-back is left in it."""
    lines = [json.loads(line) for line in swarm.run.metrics_path.read_text().splitlines()]
    assert [line for line in lines if not line.pop("time", 0) > 1e9] == []
    lines.sort(key=lambda line: (line["step"], line["kind"] == "step"))
    assert lines == curve_points(swarm.run.manifest, swarm.records())
    assert all(line["tokens_per_second"] > 0 for line in lines if line["kind"] == "step")


def went_back_to_what_was_stored(swarm: Swarm, times: int) -> None:
    """Committed steps were lost so often, each time back to the last stored version, and not to the very
    first. Going on anew from a stored version loses none.
    """
    stored, done, backs = 0, 0, 0
    for record in swarm.records():
        match record["kind"]:
            case "checkpoint":
                stored = record["version"]
            case "commit":
                done = record["step"] + 1
            case "rollback":
                assert record["to_version"] == stored <= done
                backs += stored < done
    assert (backs, stored > 0) == (times, True)


async def credit_is_what_the_log_says(swarm: Swarm, asks: Child) -> None:
    """While nobody can train: that of the commits that the roll-back has left."""
    steps = swarm.version
    credit = credit_in(swarm.run.manifest, swarm.records()).of
    training, data = swarm.run.manifest.training, swarm.run.manifest.data
    each = training.batch_size * data.tokens_per_sample * len(swarm.run.manifest.blocks)
    assert sum(credit.values()) == steps * each
    watcher = swarm.start(
        "watcher", "status", "--bootstrap", swarm.address, "--json", "--home", str(asks.home)
    )
    assert await watcher.ended() == 0, watcher.said
    shown = json.loads(watcher.printed)["credit"]
    assert {row["peer"]: row["credit"] for row in shown["first"]} == credit
    assert (shown["total"], shown["contributors"]) == (steps * each, len(credit))
    assert (shown["yours"]["name"], shown["yours"]["credit"]) == (asks.name, credit[asks.peer_id])


async def metrics_are_what_the_log_says(swarm: Swarm, bootstrap: Child, volunteer: Child) -> None:
    run, own = await scraped(bootstrap), await scraped(volunteer)
    while ("hetpeer_credit",) not in own:  # nobody watches its page: that its metrics are read is enough
        await asyncio.sleep(0.5)
        own = await scraped(volunteer)
    assert run["hetpeer_credit",] == sum(credit_in(swarm.run.manifest, swarm.records()).of.values())
    assert (run["hetpeer_step",], run["hetpeer_log_records_total", "rollback"]) == (swarm.version, 1)
    assert run["hetpeer_log_records_total", "commit"] == len(swarm.records("commit"))
    # its state was stored between two steps, or in one, which then waits for a holder
    waits = run["hetpeer_state", "waiting"] + run["hetpeer_state", "training"]
    assert (run["hetpeer_leading",], waits) == (1, 1)
    holders = [count for (name, *_), count in run.items() if name == "hetpeer_swarm_block_replicas"]
    assert (len(holders), min(holders)) == (len(swarm.run.manifest.blocks), 0)
    assert (own["hetpeer_coordinator_connected",], own["hetpeer_start_time_seconds",] > 1e9) == (1, True)
    for phase in ("forward", "backward"):
        assert own["hetpeer_microbatch_duration_seconds_count", phase] > 0
    assert own["hetpeer_microbatches_total",] > 0
    assert 0 < own["hetpeer_credit",] <= run["hetpeer_credit",]  # as it was up to half a minute ago
    assert {who[0] for name, *who in own if name == "hetpeer_process_resident_memory_bytes"} == {
        "daemon",
        "worker",
        "p2pd",
    }


@pytest.mark.proof
async def test_helpers_are_killed(swarm: Swarm) -> None:
    """A volunteer gets a new p2pd and stays itself; with a new worker it begins a new life."""
    bootstrap = await swarm.bootstrap(before="patient")
    volunteers = one, other = [swarm.volunteer(name, before="polite") for name in ("one", "other")]
    await swarm.committed(4)
    p2pd = one.helpers()["p2pd"]
    p2pd.kill()
    await until(lambda: one.helpers().get("p2pd", p2pd).pid != p2pd.pid, "a new p2pd")
    version = swarm.version
    await swarm.committed(version + 2)
    lost = [r for r in swarm.records("gone") if r["peer"] == one.peer_id]
    assert swarm.lives(one) == (2 if lost else 1)

    worker = other.helpers()["worker"]
    worker.kill()
    assert (await swarm.gone(other))["why"] == "said farewell"
    await swarm.finished(bootstrap, *volunteers)
    assert "a new one is started" in other.said
    assert swarm.lives(other) == 2
    swarm.exact()


@pytest.mark.proof
async def test_a_worker_that_dies_again_and_again(swarm: Swarm) -> None:
    await swarm.bootstrap()
    volunteer = swarm.volunteer("unlucky")
    killed = set()

    def kill_worker() -> bool:
        if volunteer.status is None and (worker := volunteer.helpers().get("worker")):
            with contextlib.suppress(psutil.NoSuchProcess):  # the one before was still going
                worker.kill()
            killed.add(worker.pid)
        return volunteer.status is not None

    await until(kill_worker, "the volunteer gives up", 100.0)
    assert volunteer.status == ExitCode.TRY_LATER
    assert len(killed) == 4
    assert volunteer.said.splitlines()[-1].startswith("HP-GPU-001: the compute worker ended with signal 9")
