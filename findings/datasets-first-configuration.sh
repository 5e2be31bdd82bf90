#!/usr/bin/env bash
# Guess: the files of a data set's configuration are read by their own format, whatever other configurations its card lists.
# True: datasets 5.2.0 takes the format of the configuration that the card lists first for all of them. Behind one of .txt files a configuration of .jsonl files loads without an error, each JSON object as a line of text; in the other order it has its fields, and the texts fail.
# Hurts: whoever adds a configuration on top of a card: what others load from the old ones becomes other data, and a training goes on with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q datasets==5.2.0 pyarrow==26.0.1 huggingface_hub==2.4.0
cat > "$folder/first.py" <<'PY'
import logging
import sys
from pathlib import Path

import datasets

datasets.disable_progress_bars()
logging.disable(logging.ERROR)
FILES = {"texts": ("a.txt", "a line\n"), "records": ("a.jsonl", '{"text": "hello", "label": 1}\n')}


def loaded(*order: str) -> dict[str, object]:
    """Each configuration of a folder whose card lists them in this order."""
    folder, card = Path(sys.argv[1], "-".join(order)), "---\nconfigs:\n"
    for name in order:
        file, content = FILES[name]
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(content)
        card += f'- config_name: {name}\n  data_files: "{name}/{file}"\n'
    (folder / "README.md").write_text(card + "---\n")
    found = {}
    for name in order:
        try:
            found[name] = datasets.load_dataset(str(folder), name, split="train")[0]
        except Exception as error:
            found[name] = type(error).__name__
    return found


texts_first, records_first = loaded("texts", "records"), loaded("records", "texts")
print(f"datasets {datasets.__version__}: {texts_first}; {records_first}")
record = {"text": "hello", "label": 1}
raw = {"text": '{"text": "hello", "label": 1}'}
sys.exit((texts_first["records"], records_first) != (raw, {"records": record, "texts": "DatasetGenerationError"}))
PY
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" "$folder/venv/bin/python" "$folder/first.py" "$folder"
