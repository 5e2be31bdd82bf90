"""Real volunteers of whom one gives everybody a false sum (docs/trust.md, "Proofs of sums"): nothing of it
is committed, and the curve is that of one machine.
"""

import pytest

from hetpeer.bootstrap.run.settings import TrustSettings
from tests.swarm.swarm import Swarm, resign

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
RARELY = TrustSettings(spot_checks=0.01)
"""Proofs are always."""


@pytest.mark.proof
async def test_what_somebody_adds_besides_is_added_up_by_another(swarm: Swarm) -> None:
    swarm.run = resign(swarm.run, trust=RARELY, layouts=(((0, 6),),))
    bootstrap = await swarm.bootstrap(together=4)
    honest = [swarm.volunteer(name) for name in "abc"]
    liar = swarm.volunteer("d", before="adds_falsely")
    await swarm.finished(bootstrap, *honest)
    pairs = [pair for record in swarm.records("quarrel") for pair in record["pairs"]]
    assert pairs
    assert all(liar.peer_id in pair for pair in pairs)
    assert not swarm.records("banned")
    swarm.exact()
