"""Asking NVIDIA's library: a stand-in with its C interface, compiled here, since few machines that run
tests have a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from hetpeer.peer.limits import nvml
from hetpeer.peer.limits.nvml import GpuLoad, Gpus, GpuState, GpuWatch

FIRST, SECOND, ELSEWHERE = "GPU-0a00", "GPU-0b1c", "GPU-0c2d"
SOURCE = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
static int open_count;
static char devices[2];
int nvmlInitWithFlags(unsigned int flags) { if (BROKEN) return 18; open_count++; return 0; }
int nvmlShutdown(void) { open_count--; return 0; }
const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "?"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int room) { snprintf(text, room, "580.65"); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index == 2 || !open_count) return 15;  /* it has fallen off the bus */
    *device = devices + index;
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int room) {
    snprintf(name, room, "Card %d", (int)((char *)device - devices));
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int room) {
    if (device == devices + 1) snprintf(uuid, room, "GPU-0b1c");
    else snprintf(uuid, room, "GPU-0a00");
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 12ULL << 30; memory->used = 3ULL << 30; memory->free = 9ULL << 30;
    return 0;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    *celsius = device == devices ? 71 : 64;
    return sensor;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    static unsigned long long total = 1000000;
    if (device == devices + 1) return 3;  /* not supported */
    *millijoules = total += 360000;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    *milliwatts = device == devices ? 99500 : 120250;
    return 0;
}
typedef struct {
    unsigned int pid; unsigned long long when; unsigned int sm, memory, encoder, decoder;
} sample_t;
int nvmlDeviceGetProcessUtilization(
    void *device, sample_t *samples, unsigned int *count, unsigned long long since
) {
    if (device == devices + 1) return 6;  /* nobody has used it */
    if (!samples) { *count = 3; return 7; }  /* so many have to have room */
    samples[0] = (sample_t){41, since + 1, 90};
    samples[1] = (sample_t){42, since + 3, 25};
    samples[2] = (sample_t){42, since + 2, 60};
    *count = 3;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *busy) {
    if (device == devices + 1) return 3;  /* not supported */
    busy->gpu = 87; busy->memory = 20;
    return 0;
}
"""


def library(folder: Path, *, broken: bool) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    path = folder / f"libnvidia-{broken}.so"
    (folder / "nvml.c").write_text(SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-DBROKEN={int(broken)}", "-o", path, folder / "nvml.c"],
        check=True,
        timeout=60,
    )
    return str(path)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the binding load this library from now on."""

    def use(path: str) -> None:
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(pynvml, "CDLL", lambda _name: ctypes.CDLL(path))

    return use


def test_the_driver_and_what_it_sees(tmp_path: Path, driver: Callable[[str], None]) -> None:
    driver(library(tmp_path, broken=False))
    assert nvml.gpus() == Gpus(driver="580.65", names=("Card 0", "Card 1"))
    memory = {"memory_used": 3 << 30, "memory_total": 12 << 30}
    assert nvml.loads() == [
        GpuLoad(name="Card 0", busy=0.87, **memory),
        GpuLoad(name="Card 1", busy=0.0, **memory),
    ]


def test_how_hot_they_are_and_who_uses_them(tmp_path: Path, driver: Callable[[str], None]) -> None:
    """Of one that is not found among them nobody knows which it is: any may be the one."""
    driver(library(tmp_path, broken=False))
    watch = GpuWatch()
    watch.heed((ELSEWHERE,))
    assert (bool(watch._handles()), watch.hottest()) == (True, 71.0)
    assert watch.foreign_share({41}.__contains__) == 0.25, "the last word of each process counts"
    assert watch.foreign_share({41, 42}.__contains__) == 0.0
    assert watch.foreign_share(().__contains__) == 1.15


def test_what_they_draw(tmp_path: Path, driver: Callable[[str], None]) -> None:
    """By the energy since the last look where a card counts it; the other one says what it takes at the
    moment.
    """
    driver(library(tmp_path, broken=False))
    watch = GpuWatch()
    watch.heed((ELSEWHERE,))
    assert watch.drawn(10.0) == 120.25, "of the first one nothing is known yet but the moment"
    assert watch.drawn(12.0) == 180.0
    assert watch.drawn(22.0) == 120.25, "the first one has drawn 36 W"


def test_how_it_is_with_the_one_that_is_computed_on(tmp_path: Path, driver: Callable[[str], None]) -> None:
    """What it draws is the same for all who ask at one look."""
    driver(library(tmp_path, broken=False))
    memory = {"memory_used": 3 << 30, "memory_total": 12 << 30}
    first = GpuState(number=0, load=GpuLoad(name="Card 0", busy=0.87, **memory), celsius=71.0, watts=99.5)
    second = GpuState(number=1, load=GpuLoad(name="Card 1", busy=0.0, **memory), celsius=64.0, watts=120.25)
    watch = GpuWatch()
    assert watch.states(8.0) == (first, second), "which one it is nobody knows yet"
    watch.heed((FIRST,))
    (state,) = watch.states(10.0)
    assert (state.watts, watch.drawn(10.0), watch.drawn(12.0)) == (180.0, 180.0, 180.0)
    watch.heed((SECOND,))
    assert watch.states(14.0) == (second,)
    watch.heed(())
    assert watch.states(16.0) == ()


def test_the_one_that_is_computed_on_counts(tmp_path: Path, driver: Callable[[str], None]) -> None:
    """Somebody's work on the first card is no business of who computes on the second, nor is its heat."""
    driver(library(tmp_path, broken=False))
    watch = GpuWatch()
    watch.heed((FIRST,))
    assert (watch.hottest(), watch.foreign_share(().__contains__)) == (71.0, 1.15)
    assert (watch.drawn(10.0), watch.drawn(12.0)) == (99.5, 180.0)
    watch.heed((SECOND,))
    assert (watch.hottest(), watch.foreign_share(().__contains__), watch.drawn(14.0)) == (64.0, 0.0, 120.25)


def test_who_computes_on_none_yields_to_a_game_on_any(tmp_path: Path, driver: Callable[[str], None]) -> None:
    driver(library(tmp_path, broken=False))
    watch = GpuWatch()
    watch.heed(())
    assert (watch.hottest(), watch.drawn(10.0), watch.foreign_share(().__contains__)) == (None, None, 1.15)


def test_before_a_worker_says_which_it_is_what_all_of_them_have_counts(
    tmp_path: Path, driver: Callable[[str], None]
) -> None:
    """Else who is asked to use the second would be held for ever by a game on the first, before any worker
    could say so.
    """
    driver(library(tmp_path, broken=False))
    watch = GpuWatch()
    assert (watch.hottest(), watch.foreign_share(().__contains__), watch.drawn(10.0)) == (64.0, 0.0, 99.5)


def test_why_torch_uses_none() -> None:
    assert Gpus().unused("2.13.0") is None
    found = Gpus(driver="580", names=("A10", "A2")).unused("2.13.0+cpu")
    assert found is not None
    assert found.code == "HP-GPU-004"
    assert found.line() == (
        "HP-GPU-004: torch cannot use A10, A2; why: torch 2.13.0+cpu was built without CUDA (580);"
        " do: install torch for CUDA, or a newer driver; until then the processor computes"
    )


def test_a_driver_that_does_not_answer_says_why(tmp_path: Path, driver: Callable[[str], None]) -> None:
    driver(library(tmp_path, broken=True))
    assert nvml.gpus() == Gpus(
        wrong="the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch."
    )
    assert nvml.loads() == []
    assert not bool(GpuWatch()._handles())


def test_a_driver_that_answers_later_is_heard(tmp_path: Path, driver: Callable[[str], None]) -> None:
    """It is loaded, or the card put in, after the daemon has begun."""
    (tmp_path / "none").mkdir()
    driver(library(tmp_path / "none", broken=True))
    watch = GpuWatch()
    watch.heed((FIRST,))
    assert watch.hottest() is None
    driver(library(tmp_path, broken=False))
    assert watch.hottest() == 71.0


def test_a_gpu_that_a_worker_names_and_nobody_knows_is_looked_for_once(
    tmp_path: Path, driver: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(library(tmp_path, broken=False))
    watch = GpuWatch()
    monkeypatch.setattr(nvml, "_all", lambda: iter(()))
    assert not bool(watch._handles())
    monkeypatch.undo()
    driver(library(tmp_path, broken=False))
    assert not bool(watch._handles())
    watch.heed((SECOND,))
    assert watch.hottest() == 64.0
    watch.heed((ELSEWHERE,))
    assert watch.hottest() == 71.0
    known = watch._gpus
    watch.heed((ELSEWHERE,))
    assert watch._gpus is known


def test_without_a_driver_there_are_none(driver: Callable[[str], None]) -> None:
    driver("libno-such-driver.so.1")
    assert nvml.gpus() == Gpus()
    assert nvml.loads() == []
    watch = GpuWatch()
    assert (
        bool(watch._handles()),
        watch.hottest(),
        watch.foreign_share({1}.__contains__),
        watch.drawn(1.0),
    ) == (
        False,
        None,
        None,
        None,
    )
