#!/usr/bin/env bash
# Guess: beside other programs that keep all cores busy, a torch loop with a thread for each core gets its share of them and takes two or three times as long.
# True: the libgomp in torch 2.13.0's Linux wheel has threads that wait for one another spin: each short operator waits for a thread that has no core, for whole time slices. It takes 10 times as long and more; OMP_WAIT_POLICY=PASSIVE alone brings that down to the fair share.
# Hurts: whoever trains on processors that others use too (volunteers, shared nodes, containers with fewer cores than they see): optimizer updates and other elementwise work, most of all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import os
import statistics
import subprocess
import sys

LOOP = """
import os, time, torch
torch.set_num_threads(max(len(os.sched_getaffinity(0)), 2))
a, b, c = torch.randn(1 << 20), torch.randn(1 << 20), torch.zeros(1 << 20)
for _ in range(20):
    c.mul_(0.9).addcmul_(a, b, value=0.1)
began = time.perf_counter()
for _ in range(200):
    c.mul_(0.9).addcmul_(a, b, value=0.1)
print(time.perf_counter() - began, torch.__version__)
"""
usual = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}


def seconds(**settings):
    told = subprocess.check_output([sys.executable, "-c", LOOP], env=usual | settings, text=True).split()
    return float(told[0]), told[1]


others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
try:
    turns = [(seconds(), seconds(OMP_WAIT_POLICY="PASSIVE")) for _ in range(5)]
finally:
    for other in others:
        other.kill()
        other.wait()
version = turns[0][0][1]
spinning, passive = (statistics.median(turn[way][0] for turn in turns) for way in (0, 1))
print(f"torch {version}, {len(others)} busy processes on {len(others)} cores, medians of 5 turns:")
print(f"  by default {spinning:.2f} s, with OMP_WAIT_POLICY=PASSIVE {passive:.2f} s: {spinning / passive:.0f} times as long")
assert spinning > 5 * passive
PY
