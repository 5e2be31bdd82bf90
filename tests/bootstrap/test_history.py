"""The surviving history, with all commits or with the last ones."""

from hetpeer.bootstrap.log.history import RECENT, History


def commit(step: int) -> dict[str, object]:
    return {"kind": "commit", "step": step, "loss": 1.0}


def test_who_does_not_keep_the_whole_history_has_the_last_commits_of_it() -> None:
    steps = 3 * RECENT
    some, all_of_it = History(whole=False), History()
    for step in range(steps):
        some.add(commit(step))
        all_of_it.add(commit(step))
    assert list(some.commits) == list(range(steps - RECENT, steps))
    assert len(all_of_it.commits) == steps
    assert some.version == all_of_it.version == steps


def test_commits_that_are_taken_back_are_no_recent_ones() -> None:
    history = History(whole=False)
    back, steps = RECENT - 4, 2 * RECENT
    for step in range(steps):
        history.add(commit(step))
    history.add({"kind": "rollback", "view": 1, "to_version": back})
    assert not history.commits
    assert history.version == back
    for step in range(back, steps):
        history.add(commit(step))
    assert list(history.commits) == list(range(steps - RECENT, steps))
