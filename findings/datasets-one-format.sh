#!/bin/sh
# One would guess: a data set with two configurations, one of parquet files and one of JSON lines, loads as its card says.
# True: datasets 5.0.0 picks one format for all of them; the configuration of JSON lines is read as parquet, and fails.
# Hurts: whoever adds a configuration in another format: each one alone loads, and together one of them does not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.0.0 pyarrow==24.0.0 huggingface_hub==1.24.0
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" venv/bin/python - <<'PYTHON'
import datasets
