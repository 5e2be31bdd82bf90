"""The data of a run: what `hetpeer init --data` names, written as shards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetpeer.bootstrap.run.durable_files import disk_errors
from hetpeer.bootstrap.run.user_code import DATA, absolute_reference, author_samples
from hetpeer.stages.data.array_shards import write_samples
from hetpeer.stages.data.token_shards import python_standard_library_paths, sample_of, write_text

HELDOUT_FRACTION = 0.1
FUNCTION = re.compile(r".+\.py:[^/]*")


def absolute_data(data: Sequence[Path | str]) -> tuple[str, ...]:
    """`data` with absolute paths: one `module.py:function`, or paths of texts.

    Raises `LocalError` HP-DATA-004.
    """
    names = [str(name) for name in data]
    functions = [name for name in names if FUNCTION.fullmatch(name)]
    if not functions:
        return tuple(str(Path(name).resolve()) for name in names)
    if len(names) > 1:
        raise DATA.error(functions[0], "it is not the only --data")
    return (absolute_reference(functions[0], DATA),)


def write_data(folder: Path, data: Sequence[str], seed: int, sequence_length: int) -> dict[str, Any]:
    """Write the shards of `absolute_data`'s data into `folder`; returns the fields of `DataSettings`.

    Raises `LocalError` HP-DATA-*, HP-DISK-*.
    """
    is_text = not any(map(FUNCTION.fullmatch, data))
    with disk_errors(folder):
        if is_text:
            paths = [Path(name) for name in data] or python_standard_library_paths()
            sample = sample_of(sequence_length)
            train, heldout = write_text(paths, folder, HELDOUT_FRACTION, sequence_length)
        else:
            samples = author_samples(data[0])
            sample, train, heldout = write_samples(samples, folder, HELDOUT_FRACTION, seed)
    return {
        "kind": "text" if is_text else "arrays",
        "sample": {name: asdict(spec) for name, spec in sample.items()},
        "train": [asdict(shard) for shard in train],
        "heldout": [asdict(shard) for shard in heldout],
    }
