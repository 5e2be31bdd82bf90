"""Three of twelve volunteers count false sums: how soon are they banned, is anybody honest banned for it,
and what does it do to the loss?

Real processes on this machine's loopback, three stages, each held by four. One run without liars, and one for
each kind of lie (tests/hostile/lies.py): the opposite of the sums, ten times as much, noise of the same norm,
those of the step before. A fifth of all contributions is checked. As soon as all are at work one in each
stage begins to lie. A contribution is what one volunteer counts in one step; of a liar those are counted in
which it lied, the one in which it was found out included.

    make proof-10
    python -m benchmarks.liars --kinds stale --steps 100
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.swarm import POLL_S, Model, Site, Swarm, make_run, running
from hetpeer.bootstrap.log.credit import Contributors
from hetpeer.bootstrap.run.settings import TrainingSettings, TrustSettings
from hetpeer.dht.identity.peer_identity import Identity
from tests.hostile.lies import LIES, OTHERS, SAID, tell

HOLDERS = 1 + OTHERS
SHARE = 0.2
"""Share of contributions that are checked."""
CONTRIBUTIONS, LOSS = 60, 0.02
"""Goals: of each liar at most, and relative."""
MODEL = Model(width=32, layers=4, heads=2, sequence_length=32)
JOIN_S, WITHIN_S, END_S = 240.0, 600.0, 60.0
WARM_UP, RATE, LEFT = 10, 3e-3, 0.05
"""Steps until the learning rate is reached, which falls to a twentieth until the end: so that the final
loss says more of what was learned than of the last few steps.
"""


async def trained(folder: Path, options: Any, kind: str) -> dict[str, Any]:
    """One run, in which every stage has a liar of that kind; none: nobody lies."""
    training = TrainingSettings(
        steps=options.steps,
        batch_size=48,
        microbatch_size=4,
        slot_size=2,
        learning_rate=RATE,
        schedule=((1, 1.0 / WARM_UP), (WARM_UP, 1.0), (options.steps, LEFT)),
        eval_every=10,
        eval_microbatches=16,
        checkpoint_every=options.steps,
    )
    trust = TrustSettings(spot_checks=SHARE)
    run = make_run(folder, MODEL, options.stages, training, options.seed, trust=trust)
    told = folder / "liars"
    tell(told, {})
    everybody = range(1, HOLDERS * options.stages + 1)
    site = Site((sys.executable, "-P", "-m", "tests.hostile.lies", str(told)))
    async with running(run, folder, len(everybody), site=site) as swarm:
        await _at_work(swarm, everybody, options.steps)
        complete = swarm.feed.history.version
        first = {swarm.blocks_of(swarm.home(number)): number for number in reversed(everybody)}
        liars = {_peer(swarm, number): number for number in first.values()} if kind else {}
        swarm.at_liberty.update(liars.values())
        tell(told, dict.fromkeys(liars, kind))
        await swarm.until(options.steps, WITHIN_S)
        await swarm.finished([number for number in everybody if number not in swarm.at_liberty], END_S)
        swarm.feed.poll()
        records = [one.record for one in swarm.feed.seen]
        bans = [record for record in records if record["kind"] == "banned"]
        found_at = {record["peer"]: record["step"] for record in bans}
        return {
            "steps": swarm.feed.history.version,
            "complete_at_step": complete,
            "step_s": round(swarm.feed.step_seconds(), 3),
            "liars": [_liar(swarm, number, peer, found_at.get(peer)) for peer, number in liars.items()],
            "honest_bans": [record for record in bans if record["peer"] not in liars],
            "disputes": sum(record["kind"] == "dispute" for record in records),
            "loss": swarm.feed.history.evaluations[options.steps],
        }


async def _at_work(swarm: Swarm, numbers: range, steps: int) -> None:
    """Return when all of these make updates."""
    async with asyncio.timeout(JOIN_S):
        while not all(swarm.has_updated(number) for number in numbers):
            if swarm.feed.history.version >= steps:
                raise SystemExit("the run was over before everybody had joined: give it more --steps")
            swarm.check()
            await asyncio.sleep(POLL_S)
            swarm.feed.poll()
    await swarm.until(swarm.feed.history.version + 2, JOIN_S)  # what the logs say of them is whole


def _peer(swarm: Swarm, number: int) -> str:
    return Identity.load(swarm.home(number) / "identity.key").peer_id


def _liar(swarm: Swarm, number: int, peer: str, banned: int | None) -> dict[str, Any]:
    """Fate of one liar. `banned`: the step in which it was found out; None: never."""
    lied = set(map(int, SAID.findall(swarm.said(number))))
    contributors, committed = Contributors(), 0
    for record in (one.record for one in swarm.feed.seen if one.record["kind"] == "commit"):
        contributors.add(record)
        counts = peer in dict(contributors.read(record["counted"]))
        committed += counts and record["step"] in lied
    return {
        "blocks": swarm.blocks_of(swarm.home(number)),
        "banned_at_step": banned,
        "contributions": len(lied),
        "committed": committed,
    }


def judged(stages: int, clean: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Goal → whether it is met."""
    liars = [liar for run in runs.values() for liar in run["liars"]]
    return {
        "a liar in each stage": all(len(run["liars"]) == stages for run in runs.values()),
        f"banned within {CONTRIBUTIONS} contributions": all(
            liar["banned_at_step"] is not None and 0 < liar["contributions"] <= CONTRIBUTIONS
            for liar in liars
        ),
        "nobody honest banned": not any(run["honest_bans"] for run in (clean, *runs.values())),
        f"loss within {LOSS:.0%}": all(
            abs(run["loss"] / clean["loss"] - 1.0) <= LOSS for run in runs.values()
        ),
    }


def measure(options: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    for kind in ("", *options.kinds):
        place = folder / (kind or "clean")
        place.mkdir(parents=True)
        found[kind] = asyncio.run(trained(place, options, kind))
        print(f"{kind or 'clean'}: {found[kind]}", file=sys.stderr, flush=True)
    clean = found.pop("")
    for run in found.values():
        run["loss_above_clean"] = round(run["loss"] / clean["loss"] - 1.0, 5)
    goals = judged(options.stages, clean, found)
    return {
        "volunteers": HOLDERS * options.stages,
        "share": SHARE,
        "seconds": round(time.monotonic() - began),
        "clean": clean,
        "runs": found,
        "goals": goals,
        "met": all(goals.values()),
    }


def show(figures: dict[str, Any]) -> None:
    clean = figures["clean"]
    print(
        f"{figures['volunteers']} volunteers, {clean['steps']} steps, {figures['share']:.0%} of "
        "contributions checked"
    )
    print(f"  {'clean':9} loss {clean['loss']:.4f}, {clean['step_s']} s a step")
    for kind, run in figures["runs"].items():
        lies = ", ".join(str(liar["contributions"]) for liar in run["liars"])
        print(
            f"  {kind:9} loss {run['loss']:.4f} ({run['loss_above_clean']:+.2%}), {run['step_s']} s a step;"
            f" false contributions of the liars: {lies}; honest banned: {len(run['honest_bans'])}, disputes: "
            f"{run['disputes']}"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=150, help="of each run (default: 150)")
    parser.add_argument("--stages", type=int, default=3, help="each held by four (default: 3)")
    parser.add_argument("--kinds", nargs="+", choices=list(LIES), default=list(LIES), help="only these lies")
    parser.add_argument("--keep", type=Path, help="leave logs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetpeer-liars-") as scratch:
        figures = measure(options, options.keep or Path(scratch))
    everything = options.kinds == list(LIES) and options.stages == parser.get_default("stages")
    return report.finish("liars" if everything else "liars-some", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
