"""Reading and tokenizing a .jsonl for `hetpeer init`, beside `datasets.map` with as many processes.

Ours reads records, tokenizes them by all cores, packs documents into samples, shuffles them and writes
shards; theirs loads the file and maps a tokenizer over it (`datasets`), and writes Arrow files. Both are
processes of their own and take turns. Then a large file is read once by each, and the most memory of a
process and its children is noted. The text is the documentation and source of Python's library, one
record for each 2,000 characters; the tokenizer is a byte-level BPE that is trained on it.

    python -m benchmarks.tokenizing
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.byte_pairs import byte_level_bpe
from hetpeer.stages.data.token_shards import python_standard_library_paths, readable_texts

VOCABULARY, LENGTH, RECORD = 8192, 512, 2000
SPEED, MEMORY_MIB = 0.8, 1024
LOOK_S = 0.05
WAYS = ("hetpeer", "datasets")


def pieces() -> Iterator[str]:
    """Texts of the library, over and over."""
    while True:
        for chunk in readable_texts(python_standard_library_paths()):
            text = chunk.decode(errors="replace")
            yield from (text[at : at + RECORD] for at in range(0, len(text), RECORD))


def make_data(path: Path, nbytes: int) -> None:
    """A .jsonl of about `nbytes`."""
    with path.open("w") as file:
        for number, text in enumerate(pieces()):
            file.write(json.dumps({"id": number, "text": text}) + "\n")
            if file.tell() >= nbytes:
                return


def make_tokenizer(folder: Path) -> None:
    """A folder as `save_pretrained` writes it."""
    from itertools import islice

    from transformers import PreTrainedTokenizerFast

    made = byte_level_bpe(islice(pieces(), 3000), VOCABULARY, ("<|pad|>", "<|end|>"))
    folder_of = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>")
    folder_of.save_pretrained(folder)


def ours(data: Path, tokenizer: Path, out: Path) -> int:
    """Write packed samples into `out`; returns how many tokens they have room for."""
    from hetpeer.bootstrap.samples.formats import data_files
    from hetpeer.bootstrap.samples.source import Wanted, tokenized
    from hetpeer.bootstrap.samples.tokenizer import Tokenizer

    wanted = Wanted(length=LENGTH, most=None, seed=0, tell=_quietly)
    files = data_files([data], _quietly)
    source = tokenized(
        files, None, Tokenizer(tokenizer), wanted, pack=True, masked=False, takes=lambda _name: True
    )
    written = source.write(out, [])
    return LENGTH * sum(shard["samples"] for shard in (*written["train"], *written["heldout"]))


def theirs(data: Path, tokenizer: Path, out: Path) -> int:
    """Map the tokenizer over the file with a process for each core; returns the number of tokens."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    made = AutoTokenizer.from_pretrained(tokenizer)
    read = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(out))
    mapped = read.map(
        lambda rows: {"input_ids": made(rows["text"], return_attention_mask=False)["input_ids"]},
        batched=True,
        num_proc=os.cpu_count(),
        remove_columns=read.column_names,
    )
    return len(mapped)


def _quietly(_line: str) -> None:
    """Ignore a line about progress."""


def spent(way: str, data: Path, tokenizer: Path) -> dict[str, float]:
    """One reading in a process of its own: seconds, processor seconds, and the most MiB at a time.

    The last two are those of the process and its children.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-P", "-m", "benchmarks.tokenizing", "--read", way, data, tokenizer, out]
        environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "TOKENIZERS_PARALLELISM": "true"}
        if way == "datasets":
            environment["TOKENIZERS_PARALLELISM"] = "false"  # its processes are forked, and share the cores
        began, most, before = time.monotonic(), 0, _processor_seconds()
        child = subprocess.Popen(map(str, command), env=environment, stdout=subprocess.DEVNULL)
        while child.poll() is None:
            most = max(most, _held(child.pid))
            time.sleep(LOOK_S)
        if child.returncode:
            raise SystemExit(f"{way} failed")
        figures = {
            "seconds": round(time.monotonic() - began, 2),
            "processor_seconds": round(_processor_seconds() - before, 2),
            "mib": round(most / 2**20),
        }
    size = data.stat().st_size / 2**20
    print(f"{way}, {size:.0f} MiB: {figures}", file=sys.stderr, flush=True)
    return figures


def _processor_seconds() -> float:
    """Processor seconds of all children that have ended, and of their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _held(pid: int) -> int:
    """Bytes of private memory of a process and its children: maps of files are the page cache's."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for one in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                memory = one.memory_info()
                total += memory.rss - memory.shared
    return total


def measure(options: Any) -> dict[str, Any]:
    """Turns of both on a small file, then one of each on a large one; figures are kept after each part."""
    with tempfile.TemporaryDirectory(prefix="hetpeer-tokenizing-") as scratch:
        folder = Path(scratch)
        tokenizer, small, large = folder / "tokenizer", folder / "small.jsonl", folder / "large.jsonl"
        make_tokenizer(tokenizer)
        make_data(small, options.megabytes * 2**20)
        turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            for way in WAYS[:: 1 if number % 2 else -1]:
                turns[way].append(spent(way, small, tokenizer))
        found = _small(turns) | {"megabytes": options.megabytes, "rounds": options.rounds}
        report.keep("tokenizing", found, seed=options.seed)
        if options.large:
            make_data(large, options.large * 2**20)
            found |= {"large_megabytes": options.large, "large": {}}
            for way in WAYS:
                found["large"][way] = spent(way, large, tokenizer)
                report.keep("tokenizing", found, seed=options.seed)
            found["goals"]["memory"] = found["large"]["hetpeer"]["mib"] <= MEMORY_MIB
    return found | {"met": all(found["goals"].values())}


def _small(turns: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians of the small file, and how fast ours is beside theirs in pairs of turns."""
    whole = ("seconds", "processor_seconds")
    medians = {
        way: {name: statistics.median(one[name] for one in turns[way]) for name in whole} for way in WAYS
    }
    pairs = [*zip(turns["datasets"], turns["hetpeer"], strict=True)]
    speed, work = (statistics.median(theirs[name] / ours[name] for theirs, ours in pairs) for name in whole)
    return {
        "small": medians,
        "speed": round(speed, 3),
        "speed_per_processor_second": round(work, 3),
        "goals": {"speed": speed >= SPEED},
    }


def show(figures: dict[str, Any]) -> None:
    ours, theirs = (figures["small"][way] for way in WAYS)
    print(
        f"{figures['megabytes']} MiB: {ours['seconds']:.1f} s, datasets {theirs['seconds']:.1f} s: "
        f"{figures['speed']:.2f} of its speed; processor seconds {ours['processor_seconds']:.1f} and "
        f"{theirs['processor_seconds']:.1f}"
    )
    for way, one in figures.get("large", {}).items():
        print(
            f"{figures['large_megabytes']} MiB by {way}: {one['seconds']:.0f} s, {one['mib']:.0f} MiB at most"
        )
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=64, help="MiB of the small file (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument(
        "--large", type=int, default=1024, help="MiB of the large file, 0: none (default: 1024)"
    )
    parser.add_argument(
        "--read", nargs=4, metavar=("WAY", "DATA", "TOKENIZER", "OUT"), help="what a child does"
    )
    options = parser.parse_args()
    if options.read:
        way, *paths = options.read
        print((ours if way == "hetpeer" else theirs)(*map(Path, paths)))
        return 0
    return report.finish("tokenizing", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
