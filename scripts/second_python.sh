#!/bin/sh
# Run the quick tests of the protocol cores on another Python. Usage: scripts/second_python.sh PYTHON
# Its environment has neither torch nor hivemind: they take gigabytes, and these cores need neither.
set -eu
python=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" - >"$folder/needs.txt" <<'PYTHON'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
tools = [each for each in project["optional-dependencies"]["dev"] if re.match("hypothesis|pytest", each)]
print(*(each for each in [*project["dependencies"], *tools] if not re.match("torch|hivemind", each)), sep="\n")
PYTHON
"$folder/venv/bin/python" -m pip install -q -c constraints.txt -r "$folder/needs.txt"
"$folder/venv/bin/python" -m pytest -q -p no:cacheprovider -m 'not swarm and not grid and not proof and not alone' \
    tests/simulation/test_histories.py tests/simulation/test_transcripts.py \
    tests/averaging --ignore tests/averaging/test_outer_optimizer.py --ignore tests/averaging/test_update_rules.py \
    --ignore tests/averaging/test_averaging_pace.py
