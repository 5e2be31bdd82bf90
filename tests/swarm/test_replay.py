"""The replay of a real run: equal to the last bit if it was honest, and the wrong step and block by name."""

import math

import pytest

from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.audit.replay_result import Replay
from tests.amounts import mostly_proof
from tests.bootstrap.engine import rewrite_log
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
STEPS = 6


async def trained(swarm: Swarm, wrong: str = "", rate: float = 0.05, *, others: int = 1) -> Replay:
    """The replay of a short run by volunteers of all blocks; `wrong`: how the last one lies."""
    changes = {"steps": STEPS, "learning_rate": rate, "slot_size": 6}
    training = swarm.run.manifest.training.model_copy(update=changes)
    swarm.run = resign(swarm.run, layouts=(((0, 6),),), training=training)
    bootstrap = await swarm.bootstrap(together=others + 1)
    honest = [swarm.volunteer(f"a{number}") for number in range(others)]
    await swarm.finished(bootstrap, *honest, swarm.volunteer("b", before=wrong))
    return replay(swarm.run.path)


async def test_an_edited_log_is_found(swarm: Swarm) -> None:
    """An honest run is equal bit by bit. Then one number of one line is another one."""
    replayed = await trained(swarm)
    assert (replayed.ok, replayed.equal, replayed.steps) == (True, STEPS, STEPS), replayed.problems
    assert audit(swarm.run.path).ok

    def edit(records):
        commit = next(r for r in records if r["kind"] == "commit" and r["step"] == 4)
        commit["loss"] = math.nextafter(commit["loss"], math.inf)

    rewrite_log(swarm.run, edit)
    (problem,) = replay(swarm.run.path).problems
    assert problem == "step 4: the loss is not what one machine gets"

    def edit_hits(records):
        commit = next(r for r in records if r["kind"] == "commit" and r["step"] == 4)
        commit["loss"] = math.nextafter(commit["loss"], -math.inf)
        first, *_ = (r for r in records if r["kind"] == "evaluation")
        right, counted = first["hits"]
        data, training = swarm.run.manifest.data, swarm.run.manifest.training
        assert training.eval_samples is not None
        assert counted == training.eval_samples * data.tokens_per_sample, "each sample once"
        assert right < counted
        first["hits"] = [right + 1, counted]

    rewrite_log(swarm.run, edit_hits)
    (problem,) = replay(swarm.run.path).problems
    assert problem == "step 0: the held-out accuracy is not what one machine gets"


@pytest.mark.parametrize("wrong", mostly_proof(["bit", "scale", "drop", "double"], ["bit"]))
async def test_a_false_sum_is_found_and_named(swarm: Swarm, wrong: str) -> None:
    replayed = await trained(swarm, f"folds_falsely:{wrong}")
    liar = swarm.children[-1].peer_id
    (first, *_) = replayed.problems
    assert first.startswith("step 3: the gradient of block")
    assert liar in first
    assert replayed.equal >= 3


async def test_an_order_that_was_not_the_own_is_found(swarm: Swarm) -> None:
    """Two ids are the same sum in either order. So nobody takes any away from the liar."""
    replayed = await trained(swarm, "tells_another_order", others=0)
    assert not replayed.ok
    assert swarm.children[-1].peer_id in replayed.problems[0]


async def test_a_slightly_scaled_gradient_is_found_where_processors_differ(swarm: Swarm) -> None:
    """Bits are not compared. The other processor's gradients of block 2 are scaled by 1.0001 in one step."""
    replayed = await trained(swarm, "rounds_otherwise folds_falsely:slightly", rate=1e-5)
    other = swarm.children[-1].peer_id
    first, *_ = replayed.problems
    assert first.startswith("step 3: the norm of block 2 is not what one machine gets (computed by ")
    assert other in first
    assert replayed.differences[0].bound < 1e-4, "what rounding makes"
