"""Fine-tuning a chat model without glue code, beside transformers' Trainer in one process.

A model of transformers is made on the spot: Llama in bfloat16, with a byte-level BPE of the
documentation of Python's library. The chats, in parquet, ask what its functions do. `hetpeer init` packs
them, with loss on the answers only; three volunteers in two stages train, and one is killed and comes
back. Trainer gets the same samples in the same order. Compared are the held-out losses, and what
`from_pretrained` makes of `hetpeer export`.

    python -m benchmarks.finetune
"""

from __future__ import annotations

import asyncio
import builtins
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.byte_pairs import byte_level_bpe
from benchmarks.swarm import running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.process.hetpeer_children import COMMAND

VOLUNTEERS, STAGES, KILLED = 3, 2, 2
LENGTH, VOCABULARY, WIDTH = 128, 2048, 128
NEAR = 1e-4
"""Largest relative difference of the held-out losses of the run and of Trainer."""
WITHIN_S = 1800.0
MODULES = """
    argparse ast asyncio bisect calendar collections configparser contextlib copy csv datetime
    decimal difflib email enum fnmatch fractions functools glob gzip hashlib heapq html http inspect
    io ipaddress itertools json locale logging math mimetypes operator os os.path pathlib pickle
    platform plistlib pprint queue random re sched secrets selectors shelve shlex shutil signal
    socket sqlite3 ssl statistics string struct subprocess sys tarfile tempfile textwrap threading
    time timeit token tokenize trace traceback types typing unicodedata unittest urllib.parse uuid
    warnings wave weakref xml.dom zipfile zlib
"""
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ("What does math.sqrt do?", "What does os.path.join do?", "What does json.dumps do?")


def chats() -> Iterator[list[dict[str, str]]]:
    """A question about each documented name of the library, and the first words of its documentation."""
    for name in ("builtins", *MODULES.split()):
        module = builtins if name == "builtins" else importlib.import_module(name)
        for member in sorted(dir(module)):
            text = inspect.getdoc(getattr(module, member, None)) or ""
            first = " ".join(text.split("\n\n")[0].split())[:300]
            if not member.startswith("_") and len(first) > 20:
                yield [
                    {"role": "user", "content": f"What does {name}.{member} do?"},
                    {"role": "assistant", "content": first},
                ]


def shape(width: int) -> dict[str, int]:
    """Settings of a Llama of this width."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    }


def make_model(folder: Path, seed: int, width: int = WIDTH) -> None:
    """A folder as `save_pretrained` leaves it: model in bfloat16, tokenizer, chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = (part["content"] for chat in chats() for part in chat)
    trained = byte_level_bpe(texts, VOCABULARY, ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        **shape(width) | {"vocab_size": len(tokenizer)},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_data(path: Path) -> int:
    """A parquet file of the chats; returns how many there are."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    found = list(chats())
    write_table(pa.table({"messages": found}), path)
    return len(found)


def hetpeer(*arguments: str) -> None:
    subprocess.run((*COMMAND, *arguments), check=True, stdout=subprocess.DEVNULL)


def benchmark(name: str, *arguments: str | Path) -> str:
    """Output of the module `benchmarks.NAME`, run in a process of its own."""
    command = (sys.executable, "-P", "-m", f"benchmarks.{name}", *map(str, arguments))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


async def train(run: RunDirectory, folder: Path, steps: int) -> None:
    """All steps, with one death."""
    async with running(run, folder, VOLUNTEERS) as swarm:
        await swarm.until(steps * 2 // 5, WITHIN_S)
        swarm.at_liberty.add(KILLED)
        await swarm.kill(KILLED)
        await swarm.until(steps * 3 // 5, WITHIN_S)
        await swarm.start(KILLED)
        await swarm.finished([n for n in swarm.volunteers if n != KILLED], WITHIN_S)


def make_run(where: Path, model: Path, data: Path, steps: int, seed: int, *more: str) -> RunDirectory:
    """The run of `hetpeer init`; `more`: further options."""
    settings = {
        "steps": steps,
        "batch-size": 16,
        "microbatch-size": 4,
        "sequence-length": LENGTH,
        "learning-rate": 1e-3,
        "weight-decay": 0.0,
        "eval-every": max(1, steps // 4),
        "checkpoint-every": 20,
        "stages": STAGES,
        "seed": seed,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    what = (f"--model=hf:{model}", f"--data={data}", "--packed", "--unchecked")
    hetpeer("init", str(where), *what, *options, *more)
    return RunDirectory.open(where)


def trial(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """One run and one of Trainer; figures of both."""
    model, data = folder / "model", folder / "chats.parquet"
    make_model(model, seed)
    count = make_data(data)
    run = make_run(folder / "run", model, data, steps, seed)
    asyncio.run(train(run, folder, steps))
    hetpeer("export", str(run.path), str(folder / "tuned"))
    out = folder / "trainer.json"
    benchmark("finetune_trainer", run.path, model, folder / "tuned", out, *QUESTIONS)
    beside, verdict, again = json.loads(out.read_text()), audit(run.path), replay(run.path)
    loss = evaluations(run)
    return {
        "seed": seed,
        "chats": count,
        "steps": verdict.steps,
        "held_out_at_first": loss[0],
        "held_out": loss[steps],
        "trainer": beside["trainer"],
        "tuned": beside["tuned"],
        "difference": abs(loss[steps] - beside["trainer"]) / beside["trainer"],
        "export_difference": abs(loss[steps] - beside["tuned"]) / loss[steps],
        "answers": beside["answers"],
        "exactly_once": verdict.ok,
        "bit_for_bit": f"{again.equal} of {again.steps}",
        "replay_problems": again.problems[:3],
    }


def evaluations(run: RunDirectory) -> dict[int, float]:
    """Version → held-out loss."""
    from hetpeer.bootstrap.log.history import History
    from hetpeer.bootstrap.log.record_log import read_log

    return dict(History.of(list(read_log(run.log_path))).evaluations)


def measure(options: Any) -> dict[str, Any]:
    """All trials."""
    trials = []
    for seed in range(options.seed, options.seed + options.runs):
        with tempfile.TemporaryDirectory(prefix="hetpeer-finetune-") as scratch:
            trials.append(trial(Path(scratch), options.steps, seed))
        print(f"seed {seed}: {trials[-1]['difference']:.1e} from Trainer", file=sys.stderr, flush=True)
    goals = {
        "held-out loss as Trainer's": all(one["difference"] <= NEAR for one in trials),
        "the export answers alike": all(one["export_difference"] <= NEAR for one in trials),
        "exactly once": all(one["exactly_once"] and not one["replay_problems"] for one in trials),
    }
    middle = statistics.median(one["difference"] for one in trials)
    return {"trials": trials, "difference": middle, "goals": goals, "met": all(goals.values())}


def show(figures: dict[str, Any]) -> None:
    for one in figures["trials"]:
        print(
            f"seed {one['seed']}: held-out loss {one['held_out_at_first']:.4f} → {one['held_out']:.6f}, "
            f"Trainer {one['trainer']:.6f} ({one['difference']:.1e}), exported {one['tuned']:.6f}; replay "
            f"{one['bit_for_bit']}"
        )
        for question, ours, theirs in zip(QUESTIONS, *one["answers"].values(), strict=True):
            print(f"  {question}\n    Trainer: {ours}\n    export:  {theirs}")
    report.show_goals(figures["goals"])


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    return report.finish("finetune", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
