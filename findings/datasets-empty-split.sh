#!/usr/bin/env bash
# Guess: whatever `Dataset.save_to_disk` has written without complaint, `load_from_disk` reads back, also a split without rows.
# True: datasets 5.2.0 writes a split that was made without rows as two JSON files and no Arrow file, and loading it ends in IndexError; a split that a filter has emptied has an Arrow file and loads.
# Hurts: pipelines that write splits by language, source or shard number and load them elsewhere: the one that is empty stops all, and the message names neither folder nor reason.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q datasets==5.2.0 pyarrow==26.0.1
cat > "$folder/empty.py" <<'PY'
import sys
from pathlib import Path

import datasets

datasets.disable_progress_bars()
folder = Path(sys.argv[1])


def loaded(name: str, split: datasets.Dataset) -> str:
    split.save_to_disk(folder / name)
    files = len(list((folder / name).glob("*.arrow")))
    try:
        return f"{files} Arrow files, {len(datasets.load_from_disk(folder / name))} rows"
    except Exception as error:
        return f"{files} Arrow files, {type(error).__name__}: {error}"


made = loaded("made", datasets.Dataset.from_dict({"text": []}))
emptied = loaded("emptied", datasets.Dataset.from_dict({"text": ["one"]}).filter(lambda row: False))
print(f"datasets {datasets.__version__}: made without rows: {made}; emptied by a filter: {emptied}")
sys.exit((made, emptied) != ("0 Arrow files, IndexError: list index out of range", "1 Arrow files, 0 rows"))
PY
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" "$folder/venv/bin/python" "$folder/empty.py" "$folder"
