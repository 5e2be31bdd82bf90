"""Processor quotas as control groups of both versions write them down."""

import math
from pathlib import Path

import pytest

from hetpeer.stages.block.processor_quota import limit_of, quota, stopwatch, sustained_s


def process(folder: Path, groups: str, *mounts: str) -> Path:
    """A folder like /proc/self of a process in `groups`."""
    folder.mkdir()
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return folder


def mounted(at: Path, root: str, kind: str, options: str = "rw") -> str:
    return f"31 23 0:28 {root} {at} rw,nosuid shared:9 - {kind} {kind} {options}"


def unified(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{text}\n")


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    unified(groups / "a" / "b", "150000 100000")
    unified(groups / "a", "50000 100000")
    unified(groups / "other", "1000 100000")
    unified(groups, "max 100000")
    mount = mounted(groups, "/", "cgroup2")
    assert quota(process(tmp_path / "one", "0::/a/b\n", mount)) == 0.5
    assert quota(process(tmp_path / "two", "0::/\n", mount)) == math.inf


def test_the_first_version_has_the_quota_at_its_controller(tmp_path: Path) -> None:
    processors, memory = tmp_path / "cpu,cpuacct", tmp_path / "memory"
    for folder, allowed in ((processors, "-1"), (processors / "a", "25000"), (memory / "a", "1000")):
        folder.mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text(f"{allowed}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    mounts = (
        mounted(processors, "/", "cgroup", "rw,cpu,cpuacct"),
        mounted(memory, "/", "cgroup", "rw,memory"),
    )
    groups = "9:memory:/a\n4:cpu,cpuacct:/a\n0::/\n"
    assert quota(process(tmp_path / "self", groups, *mounts)) == 0.25
    assert quota(process(tmp_path / "other", "9:memory:/a\n4:cpu,cpuacct:/\n", *mounts)) == math.inf


def test_a_container_sees_its_own_group_only(tmp_path: Path) -> None:
    """The mount's root is its group, which the process's own file may name, or not."""
    groups = tmp_path / "groups"
    unified(groups, "20000 100000")
    for number, (root, group) in enumerate(
        (("/docker/1f", "/docker/1f"), ("/", "/"), ("/../1f", "/"), ("/docker/1f", "/"))
    ):
        mount = mounted(groups, root, "cgroup2")
        assert quota(process(tmp_path / str(number), f"0::{group}\n", mount)) == 0.2, (root, group)


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    assert quota(tmp_path) == math.inf
    unified(tmp_path / "groups", "0 0")
    assert limit_of(tmp_path / "groups") == math.inf
    unified(tmp_path / "groups", "many")
    assert limit_of(tmp_path / "groups") == math.inf
    mount = mounted(tmp_path / "nowhere", "/", "cgroup2")
    assert quota(process(tmp_path / "self", "0::/a\n", mount)) == math.inf


def test_work_takes_as_long_as_the_quota_makes_it_in_the_long_run() -> None:
    assert sustained_s(0.010, 0.010, 0.1) == pytest.approx(0.1)
    assert sustained_s(0.25, 0.02, 0.1) == 0.25, "it was stopped, or waited"
    assert sustained_s(0.010, 0.040, math.inf) == 0.010


def test_a_stopwatch_counts_what_all_of_the_process_computes() -> None:
    free, limited = stopwatch(math.inf), stopwatch(0.001)
    sum(range(100_000))
    assert limited() > 20 * free()
