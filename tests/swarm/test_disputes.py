"""Real volunteers of whom one spoils what all add up (docs/trust.md, "Disputes in a reduce"): the others
go on, and the curve is that of one machine.
"""

import pytest

from hetpeer.bootstrap.conduct.disputed_pairs import TIMES
from hetpeer.bootstrap.trust.reduce_complaints import DIFFERS
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("wrong", "times"),
    [pytest.param("votes_falsely", TIMES, marks=pytest.mark.grid), ("tears_sums", 1)],
)
async def test_who_contradicts_most_others_has_to_go_and_nobody_else(
    swarm: Swarm, wrong: str, times: int
) -> None:
    """Who is found to tear sums adds up no more, and is no worse than others from then on."""
    longer = swarm.run.manifest.training.model_copy(update={"steps": 60})  # it rests for 16 and 32
    swarm.run = resign(swarm.run, layouts=(((0, 6),),), training=longer)
    bootstrap = await swarm.bootstrap(together=4)
    honest = [swarm.volunteer(name) for name in "abc"]
    liar = swarm.volunteer("d", before=wrong)
    await swarm.finished(bootstrap, *honest)
    out = [record["peer"] for record in swarm.records("gone") if record["why"] == DIFFERS]
    assert out == [liar.peer_id] * times
    assert [record["peer"] for record in swarm.records("banned")] == [liar.peer_id] * (times == TIMES)
    swarm.exact()
