"""The walks that `benchmarks.walks` counts: its figures, and that its landmarks are still in the code."""

from pathlib import Path

from benchmarks.walker import Walker
from benchmarks.walks import counted, undisturbed


def test_a_switch_is_a_call_in_another_file_and_may_go_back() -> None:
    figures = counted(["a", "a", "b", "a", "c", "b"])
    assert figures == {"files": 3, "calls": 6, "switches": 4, "back": 2}


def test_the_walk_with_the_fewest_switches_is_shown() -> None:
    assert undisturbed([["a", "b", "a"], ["a", "a", "b"], ["a", "b", "c", "a"]]) == ["a", "a", "b"]


def test_every_landmark_is_in_the_code(tmp_path: Path) -> None:
    Walker(tmp_path / "walks.jsonl").watch_daemon()
