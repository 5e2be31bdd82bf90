"""What the machine has, and how fast it is."""

import time

import pytest
import torch

from hetpeer.dht.base.errors import LocalError
from hetpeer.stages.block import device


def test_survey_is_about_this_machine():
    machine = device.survey()
    assert 0 < machine.ram_free_bytes <= machine.ram_bytes
    assert machine.cores >= 1


def test_the_tightest_control_group_counts(tmp_path, monkeypatch):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    group = root / "a" / "b"
    group.mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    for directory, limit, used in ((group, "max", 5), (group.parent, "5000", 4000), (root, "9000", 100)):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
    limits = device._cgroup_memory(root, membership)
    assert limits == [(5000, 4000), (9000, 100)]
    (root / "memory.stat").write_text("anon 70\ninactive_file 20\nactive_file 10\n")
    assert device._cgroup_memory(root, membership)[1] == (9000, 80), "what is only cached is free"
    monkeypatch.setattr(device, "_cgroup_memory", lambda *_: limits)
    machine = device.survey()
    assert (machine.ram_bytes, machine.ram_free_bytes) == (5000, 1000)


@pytest.mark.parametrize("name", ["cuda:99", "cuda:x", "tpu", "", "cpu:1"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(LocalError, match="HP-GPU-002: there is no device"):
        device.pick(name)


def test_cpu_is_measured_within_a_second():
    assert device.pick("cpu") == torch.device("cpu")
    began = time.process_time()
    assert device.measure_flops(torch.device("cpu"), 0.2) > 1e7
    assert time.process_time() - began < 2


def test_a_device_that_has_little_memory_is_measured_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, sizes = torch.ones, []

    def little(rows, columns, **options):
        sizes.append(rows)
        if rows > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ones(rows, columns, **options)

    monkeypatch.setattr(torch, "ones", little)
    assert device.measure_flops(torch.device("cpu"), 60.0) > 1e7
    assert sizes == [256, 512]
