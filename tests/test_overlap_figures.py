"""Idle time of `benchmarks.overlap`, of work and of the line, from a trace by hand."""

from typing import Any

from benchmarks.overlap import busiest, idle, in_steps, on_line, trained


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


def test_the_lines_own_time_is_told_from_that_without_activations() -> None:
    """Two steps of three microbatches. In the second one the line is slower, and once nothing is on it."""
    begins = [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (10.0, 1.5), (11.0, 1.0), (13.0, 2.0)]
    events = [
        event(7, f"activation {number % 3}", begin, seconds) | {"cat": "from"}
        for number, (begin, seconds) in enumerate(begins)
    ]
    events += [event(7, name, 5.0, 1.0) | {"cat": "from"} for name in ("activation 3", "gradient 0")]
    events.append(event(7, "Forward 0@0", 5.0, 1.0))
    assert on_line(events, 1, 0, 3) == {"taken_s": 3.0, "idle_s": 0.0}
    assert on_line(events, 1, 1, 3) == {"taken_s": 4.0, "idle_s": 1.0}
    assert on_line(events, 2, 0, 3) == {"taken_s": 3.5, "idle_s": 0.5}
