# Everything a newcomer or CI needs. `make setup` is quick when nothing changed.
# The Python of .venv; empty: the newest that works of those found, 3.11 to 3.14.
PYTHON ?=
BIN := .venv/bin
PY := $(BIN)/python

.PHONY: setup lint format quick test proof-tests fuzz hashes audit-deps zoo browser screenshots grid demo proof proof-3 proof-4 proof-5 proof-6 proof-7 proof-8 proof-9 proof-10 proof-churn proof-real-size proof-seven-billion proof-async proof-averaging chaos hostile besieged gpu clean

setup:
	@sh scripts/setup.sh $(PYTHON)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .

# Within a minute: the linters, the quick tests of what has changed, twenty simulated histories.
quick: export PYTHONDONTWRITEBYTECODE =
quick: setup
	$(PY) -m tests.quick

# Dozens of processes start from the same sources: compile them once even where the environment says otherwise.
test: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(PY) -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder -m 'not grid and not proof and not alone'
	$(PY) -m pytest -q -m 'alone and not proof'

# What takes minutes: long swarms, grids, many seeds, all examples (docs/testing.md).
proof-tests: export PYTHONDONTWRITEBYTECODE =
proof-tests: setup
	$(PY) -m pytest -q -n 3 --dist loadgroup --no-loadscope-reorder --hypothesis-profile=proof \
	    -m '(proof or hypothesis) and not grid and not alone'
	$(PY) -m pytest -q -m 'alone and proof'

# Every decoder of bytes from outside, a million times each: hours. Interrupted, it goes on where it was (fuzz-run).
fuzz: setup
	$(PY) -m pip install -q -c constraints.txt -e '.[fuzz]'
	$(PY) -m benchmarks.fuzz

# The sha256 of what `make setup` installs, after constraints.txt or pyproject.toml has changed: five minutes.
hashes:
	@[ -x $(PY) ] || { echo "make setup first, before the pins change" >&2; exit 3; }
	$(PY) scripts/hashes.py

# Are advisories known of what constraints.txt pins? Asks PyPI: no part of the tests.
audit-deps: setup
	$(PY) -m pip install -q -c constraints.txt -e '.[audit]'
	$(PY) -m benchmarks.advisories

# Architectures of transformers and timm against their eager training: docs/models.md anew. Names alone, or one library:
# `python -m benchmarks.zoo NAME …`, `python -m benchmarks.zoo --family timm`.
zoo: setup
	$(PY) -m pip install -q -c constraints.txt -e '.[zoo]'
	# Beside another build of torch than its own torchvision does not import, and transformers then neither.
	$(PY) -c 'import torchvision' 2>/dev/null || $(PY) -m pip uninstall -q -y torchvision
	$(PY) -m benchmarks.zoo

# The dashboard in a headless Chromium: `apt-get install chromium`.
browser: setup
	HETPEER_REQUIRE_BROWSER=1 $(PY) -m pytest -q -m browser

# Pictures for the README.
screenshots: setup
	mkdir -p docs/pictures
	HETPEER_REQUIRE_BROWSER=1 HETPEER_SCREENSHOTS=docs/pictures $(PY) -m pytest -q tests/swarm/test_dashboard.py
	rm -rf demo-run
	$(BIN)/hetpeer demo --peers 4 --steps 60 --kill 1 --out demo-run
	cp demo-run/loss.svg docs/pictures/demo.svg

# Every place of the protocol at which a process may die, one after the other.
grid: export PYTHONDONTWRITEBYTECODE =
grid: setup
	$(PY) -m benchmarks.grid

demo: setup
	$(BIN)/hetpeer demo --peers 4 --steps 60 --kill 1 --out demo-run

proof: proof-tests
	$(PY) -m benchmarks.proof

proof-3: setup
	$(PY) -m benchmarks.models
	$(PY) -m benchmarks.bf16
	$(PY) -m benchmarks.overhead
	$(PY) -m benchmarks.planning

proof-4: setup
	$(PY) -m benchmarks.compression
	$(PY) -m benchmarks.links
	$(PY) -m benchmarks.overlap
	$(PY) -m benchmarks.adaptive
	$(PY) -m benchmarks.prediction
	$(PY) -m benchmarks.endtoend

proof-5: setup
	$(PY) -m benchmarks.churn
	$(PY) -m benchmarks.fronted
	$(PY) -m benchmarks.failover

# A hundred thousand simulated histories: hours.
proof-churn: setup
	$(PY) -m benchmarks.histories
	$(PY) -m benchmarks.mutants

# GPT-2 by four volunteers on this machine, beside one process: 150 steps of each, an hour on two cores.
proof-real-size: setup
	$(PY) -m benchmarks.real_size

# Seven billion parameters authored and, block by block, fetched and trained: twenty minutes on two cores, 14 GiB of
# memory, 40 GB of disk.
proof-seven-billion: setup
	$(PY) -m benchmarks.seven_billion

proof-averaging: setup
	$(PY) -m benchmarks.grouping
	$(PY) -m benchmarks.no_pause

proof-6: setup
	$(PY) -m benchmarks.grouping
	$(PY) -m benchmarks.averaging
	$(PY) -m benchmarks.stragglers
	$(PY) -m benchmarks.windows
	$(PY) -m benchmarks.time_to_loss
	$(PY) -m benchmarks.sparse_lines
	$(PY) -m benchmarks.curves

proof-7: setup
	$(PY) -m benchmarks.optima
	$(PY) -m benchmarks.grids
	$(PY) -m benchmarks.kernighan_lin
	$(PY) -m benchmarks.networkx_parts
	$(PY) -m benchmarks.formation
	$(PY) -m benchmarks.formation_swarm
	$(PY) -m benchmarks.growth
	$(PY) -m benchmarks.testbeds
	$(PY) -m benchmarks.prediction --volunteers 5 6
	$(PY) -m benchmarks.takeover
	$(PY) -m benchmarks.departures
	$(PY) -m benchmarks.eight

# Two thousand simulated histories in which steps overlap, half of them of clusters that average; as many with later
# stages less stale.
proof-async: setup
	$(PY) -m benchmarks.histories --kind overlapping --count 2000 --journal histories-overlapping.journal
	$(PY) -m benchmarks.histories --kind by-stage --count 2000 --journal histories-by-stage.journal

proof-8: setup
	$(PY) -m benchmarks.prediction --staleness 1
	$(PY) -m benchmarks.busy
	$(PY) -m benchmarks.stale
	$(PY) -m benchmarks.stale_stages
	$(PY) -m benchmarks.speedup

proof-9: setup
	$(PY) -m benchmarks.limits
	$(PY) -m benchmarks.firstjoin
	$(PY) -m benchmarks.pageupdates
	$(PY) -m benchmarks.idle

# Who counts false sums, who is banned without, what checks cost, and what robust means keep out: two hours.
proof-10: setup
	$(PY) -m benchmarks.honest
	$(PY) -m benchmarks.checked
	$(PY) -m benchmarks.liars
	$(PY) -m benchmarks.robust

# Twelve volunteers in the laboratory (root), a fault every half minute for twenty minutes.
chaos: setup
	$(PY) -m benchmarks.chaos

# Root. Four volunteers under ten attackers at once: seven minutes (`make besieged`). Then nine honest and three hostile
# volunteers and a stranger in the laboratory, one attack after the other: half an hour.
hostile: besieged
	$(PY) -m benchmarks.hostile

besieged: setup
	$(PY) -m benchmarks.besieged

gpu: setup
	$(PY) -m benchmarks.gpu
	$(PY) -m benchmarks.offload --device cuda --width 2048 --layers 6 --context 1024 --samples 16
	$(PY) -m benchmarks.stage_peak --device cuda

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache demo-run
