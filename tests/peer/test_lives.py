"""What benchmarks/idle.py says of a process's growth."""

import random

from benchmarks.idle import LIVED_S, WARM_UP_S, WINDOW_S, growth, growths
from benchmarks.lives import Life

EVERY_S = 5.0


def life(seconds: float, mib_per_hour: float = 0.0, noise_mib: float = 0.0, files: int = 40) -> Life:
    """From 0 s on; before the warm-up is over it grows as fast as nothing may."""
    choose = random.Random(0)
    made = Life("volunteer")
    for number in range(int(seconds / EVERY_S)):
        then = number * EVERY_S
        mib = 300 + min(then, WARM_UP_S) + mib_per_hour * then / 3600 + choose.gauss(0, noise_mib)
        made.times.append(then)
        made.rss_mib.append(mib)
        made.private_mib.append(mib / 2)
        made.files.append(files + number % 3)
    return made


def test_the_line_is_that_of_its_memory_and_the_start_does_not_count() -> None:
    found = growth(life(1800, mib_per_hour=3.0), 0.0)
    assert found is not None
    assert (found["mib_per_hour"], found["private_mib_per_hour"], found["grows"]) == (3.0, 1.5, True)
    assert found["minutes"] == 27.9
    found = growth(life(1800, mib_per_hour=0.5, noise_mib=0.2), 1800 - WINDOW_S)
    assert found is not None
    assert abs(found["mib_per_hour"] - 0.5) < 0.3
    assert not found["grows"]
    assert 19 < found["minutes"] <= 20


def test_who_did_not_live_long_says_nothing_of_an_hour() -> None:
    short, enough = life(WARM_UP_S + LIVED_S - 60), life(WARM_UP_S + LIVED_S + 60)
    assert growth(short, 0.0) is None
    assert growth(enough, 0.0) is not None
    assert growth(enough, 600.0) is None, "it ended soon after the window began"
    assert len(growths({1: short, 2: enough})) == 1
    assert growths({}) == []


def test_descriptors_that_become_more_are_seen() -> None:
    leaks = life(1800)
    leaks.files = [40 + number // 12 for number in range(len(leaks.files))]  # one a minute
    found = growth(leaks, 600.0)
    assert found is not None
    assert found["files"] == [59, 69]
    assert found["grows"]
    bursts = life(1800)
    bursts.files[-10] += 5
    found = growth(bursts, 600.0)
    assert found is not None
    assert not found["grows"]
