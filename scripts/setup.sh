#!/bin/sh
# Make .venv with the versions of constraints.txt; quick when nothing has changed. Usage: scripts/setup.sh [PYTHON]
# Without PYTHON, takes the newest supported Python on PATH that works. If none does: one line on stderr that says
# what is missing and which package brings it, and exit status 3.
set -eu

PYTHONS="python3.14 python3.13 python3.12 python3.11 python3"
asked=${1-}
venv=.venv/bin/python

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

fail() {
    echo "hetpeer: $1 (or choose another Python: make setup PYTHON=/path/to/python3)" >&2
    exit 3
}

# An environment of another Python than the one asked for is made anew.
usable() { [ -x $venv ] && { [ -z "$asked" ] || [ "$(version "$asked")" = "$(version $venv)" ]; }; }

if usable && [ .venv/.stamp -nt pyproject.toml ] && [ .venv/.stamp -nt constraints.txt ] &&
    [ .venv/.stamp -nt hashes.txt ]; then
    exit 0
fi

# Print the first Python that works, of the one asked for or of PYTHONS; fail with what keeps the newest one out.
find_python() {
    why=
    for each in ${asked:-$PYTHONS}; do
        command -v "$each" >/dev/null || continue
        # A pyenv shim of a version that is switched off is found, but does not start.
        [ -n "$(version "$each")" ] || continue
        if said=$("$each" scripts/usable_python.py 2>&1); then
            echo "$each"
            return
        fi
        why=${why:-$each: $(printf '%s' "$said" | tail -n 1)}
    done
    [ -z "$asked" ] || fail "${why:-$asked was not found, or does not start}"
    fail "${why:-no Python 3.11 to 3.14 was found: apt-get install python3 python3-venv}"
}

if ! usable || ! $venv -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Making .venv with Python $(version "$python"). torch comes along: some GB the first time." >&2
    "$python" -m venv --clear .venv
fi
# All but torch by its hash; torch's file depends on the index (CUDA or not), and so do its CUDA libraries. First what
# builds those packages that have no wheel: pip would fetch it without a hash.
sed -n '/^setuptools==/,/[^\]$/p' hashes.txt >.venv/builds.txt
$venv -m pip install -q --require-hashes --no-deps -r .venv/builds.txt
$venv -m pip install -q --require-hashes --no-deps --prefer-binary --no-build-isolation -r hashes.txt
$venv -m pip install -q -c constraints.txt torch
# Nothing is left to fetch: neither dependencies nor what builds the package.
$venv -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
touch .venv/.stamp
