"""Places where a process can be made to die."""

import pytest

from hetpeer.dht.base import failpoints
from hetpeer.dht.base.errors import LocalError


@pytest.fixture
def deaths(monkeypatch):
    """How often this process would have died."""
    died = []
    monkeypatch.setattr(failpoints, "armed", {})
    monkeypatch.setattr(failpoints, "_tokens", {})
    monkeypatch.setattr(failpoints.os, "kill", lambda pid, number: died.append((pid, number)))
    return died


class TellVote:
    pass


def test_the_nth_time_at_a_place(deaths):
    failpoints.arm("tell_vote:2, average_tell_vote:1")
    failpoints.reached("tell_commit")
    failpoints.before(TellVote())
    assert not deaths
    failpoints.before(TellVote())
    failpoints.before(TellVote())
    assert len(deaths) == 1
    failpoints.before(TellVote(), "average_")
    assert len(deaths) == 2


def test_of_several_with_one_file_the_first_dies(deaths, tmp_path):
    for _ in range(3):  # as many processes
        failpoints.arm(f"tell_vote:1@{tmp_path}/died")
        failpoints.reached("tell_vote")
    assert len(deaths) == 1
    failpoints.arm(f"tell_vote:1@{tmp_path}/another")
    failpoints.reached("tell_vote")
    assert len(deaths) == 2


@pytest.mark.parametrize("text", ["vote", "vote:0", "Vote:1", "vote:1@", "vote:1,2"])
def test_what_names_no_place_is_refused(deaths, text):
    with pytest.raises(LocalError, match="names no place to fail at") as refused:
        failpoints.arm(text)
    assert refused.value.code == "HP-CONF-002"
    assert not deaths
