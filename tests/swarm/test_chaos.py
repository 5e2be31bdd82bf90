"""Six volunteers with slow uplinks, hurt again and again: every microbatch counts once, and the run goes on (`make chaos` is the long form)."""

from pathlib import Path

import pytest

from benchmarks.chaos import Trial, train
from tests.wanlab.lab import needs_lab

TRIAL = Trial(peers=6, minutes=2.0, every_s=15.0, seed=5)


@needs_lab
@pytest.mark.swarm
async def test_chaos(tmp_path: Path) -> None:
    figures = await train(TRIAL, tmp_path)
    assert figures["faults"] >= 8
    verdict, comparison = figures["audit"], figures["replay"]
    assert verdict["ok"], verdict["problems"]
    assert comparison["ok"], comparison["problems"]
    assert (verdict["lost"], verdict["duplicated"]) == (0, 0)
    assert figures["goals"]["goes on after healing"], figures
    assert figures["goals"]["goodput"], figures
