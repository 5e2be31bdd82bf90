#!/usr/bin/env bash
# Guess: `Popen` returns once the child runs its program, so `cmdline()` of the new process names that program.
# True: psutil 7.2.2 on Linux answers with an empty list, without an error, as long as the kernel has closed the old program's files but not yet placed the new one's arguments: on a busy machine in most of the first looks.
# Hurts: supervisors, sensors and tests that tell processes by their command line: a program just started counts as somebody else's, seldom on an idle machine, mostly on a loaded one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q psutil==7.2.2
cat > "$folder/started.py" <<'PY'
import os
import subprocess
import sys

import psutil

LOOKS = 200
load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
at_once = later = 0
try:
    for _ in range(LOOKS):
        command = [sys.executable, "-c", "print(flush=True); input()", "marked"]
        with psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            at_once += child.cmdline() == []
            child.stdout.readline()
            later += child.cmdline() == []
            child.communicate(b"\n")
finally:
    for one in load:
        one.kill()
        one.wait()
print(f"psutil {psutil.__version__}: of {LOOKS} command lines {at_once} were empty at once, {later} after the first word")
sys.exit(not (at_once > 0 and later == 0))
PY
"$folder/venv/bin/python" "$folder/started.py"
