#!/usr/bin/env bash
# Guess: typer stands on click, so `except click.UsageError` catches a wrong option, and a raised click.ClickException ends a command with one line.
# True: typer 0.29.2 carries a copy of click and does not need click itself; neither class is the other, so nothing is caught and the raised one is a traceback.
# Hurts: whoever wraps a typer app to show usage errors in their own form, or raises click's errors in its commands, and upgrades typer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --target "$folder" typer==0.29.2 click==8.5.1
cat > "$folder/app.py" <<'PY'
import subprocess
import sys
from importlib.metadata import requires

import click
import typer

app = typer.Typer()


@app.command()
def wait(seconds: int) -> None:
    raise click.ClickException(f"{seconds} s are too long")


if sys.argv[1:]:
    app()

try:
    app(["soon"], standalone_mode=False)
except click.ClickException:
    caught = "click's"
except Exception as error:
    caught = f"{type(error).__module__}.{type(error).__qualname__}"
needs_click = any(one.split(">")[0] == "click" for one in requires("typer") or [])
ended = subprocess.run([sys.executable, __file__, "99"], stderr=subprocess.PIPE, text=True)
raised = "a traceback" if "Traceback" in ended.stderr else ended.stderr.strip()
print(f"typer 0.29.2 needs click: {needs_click}; a wrong option raises {caught}; a raised click.ClickException shows {raised}")
sys.exit((needs_click, caught, raised) != (False, "typer._click.exceptions.BadParameter", "a traceback"))
PY
PYTHONPATH="$folder" python3 "$folder/app.py"
