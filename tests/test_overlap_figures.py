"""Idle time of `benchmarks.overlap`, from a trace by hand."""

from typing import Any

from benchmarks.overlap import busiest, idle, in_steps, trained


def event(peer: int, name: str, begin: float, seconds: float) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "cat": "compute", "pid": peer, "name": name} | times


def test_idle_time_is_told_before_and_between_and_evaluations_are_no_work() -> None:
    """Two stages, two microbatches a step, steps that begin at 10 and 20 s; an evaluation before."""
    events = [event(peer, "Forward 2@0", 1.0 + peer, 1.0) for peer in (7, 3)]
    for start in (10.0, 20.0):
        for number in (0, 1):
            task = f"{number}@0"
            events += [
                event(7, f"Forward {task}", start + number, 1.0),
                event(7, f"Backward {task}", start + 5.0 + number, 1.0),
                event(3, f"Forward {task}", start + 2.0 + 2 * number, 0.5),
                event(3, f"Backward {task}", start + 2.5 + 2 * number, 1.5),
            ]
    work = in_steps(trained(events), 2, 0, 2)
    assert busiest(work) == [4.0, 4.0]
    assert idle(work) == [
        {"before_first_s": 3.0, "between_s": 3.0},
        {"before_first_s": 6.0, "between_s": 0.0},
    ]
