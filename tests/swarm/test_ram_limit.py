"""A swarm with a tied table of 49 MB that works close to its limit of main memory: nobody ever takes more."""

from pathlib import Path

import pytest

from benchmarks import proportional_memory
from benchmarks.real_size import make_run, parsed, train

LIMIT_MIB, DAEMON_MIB = 960, 250
OPTIONS = (
    *("--layers=2", "--width=768", "--heads=8", "--context=64", "--vocabulary=16000", "--text-mib=4"),
    *("--steps=7", "--batch-size=8", "--checkpoint-every=2", "--stages=2", "--volunteers=3"),
    *("--kill-at=3", "--killed=2", "--absent=2", f"--ram-limit={LIMIT_MIB}MiB"),
)


@pytest.mark.proof
@pytest.mark.swarm
@pytest.mark.timeout(900)
async def test_all_processes_of_a_volunteer_stay_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads, works, reduces with another holder, stores states, and comes back after it was killed.

    The larger stage fits with its optimizer on the disk only, and nothing of the limit is left over then.
    """
    monkeypatch.setattr(proportional_memory, "EVERY_S", 0.2)
    options = parsed(OPTIONS)
    found = await train(make_run(tmp_path, options), tmp_path, options)
    logs = [path.read_text() for path in tmp_path.glob("home-*/daemon.log")]
    assert len(logs) == 3
    assert any("offload disk" in log for log in logs)
    for number, memory in found["memory"].items():
        assert memory["looks"] > 100
        assert memory["all_mib"] <= LIMIT_MIB, (number, memory)
        assert memory["largest_mib"]["daemon"] <= DAEMON_MIB, (number, memory)
    assert max(memory["all_mib"] for memory in found["memory"].values()) > LIMIT_MIB / 2
    assert found["rollbacks"] or len(found["step_s"]) >= options.steps
