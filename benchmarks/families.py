"""Five kinds of models of transformers from init to `from_pretrained`, each small and random.

They are a mixture of experts, a hybrid of attention and state space, T5, ViT and Whisper. Two volunteers in
two stages train one, and one of them is killed and comes back. Then the log is audited, each step is computed
again, and the export is loaded by transformers: its held-out loss must be the run's.

    python -m benchmarks.families [NAME …]
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.alone import held_out_loss
from benchmarks.swarm import running
from hetpeer.bootstrap.audit.audit import audit
from hetpeer.bootstrap.audit.replay import replay
from hetpeer.bootstrap.log.history import History
from hetpeer.bootstrap.log.record_log import read_log
from hetpeer.bootstrap.run.run_directory import RunDirectory
from hetpeer.peer.process.hetpeer_children import COMMAND

VOLUNTEERS, STAGES, KILLED = 2, 2, 2
NEAR = 1e-5
"""Largest relative difference of two held-out losses of the same weights."""
WITHIN_S = 900.0
WIDTH, VOCABULARY, LENGTH = 32, 64, 24
SAMPLES = """
import numpy as np

VOCABULARY, LENGTH = {vocabulary}, {length}


def words(draw):
    return (np.cumsum(draw.integers(1, 4, LENGTH)) % (VOCABULARY - 4) + 4).astype(np.int64)


def samples():
    for number in range(200):
        draw = np.random.default_rng(number)
        yield {arrays}
"""
TEXT = '{"input_ids": (ids := words(draw)), "labels": ids}'
PAIR = '{"input_ids": (ids := words(draw)), "labels": ids[::-1].copy()}'
IMAGE = (
    '{"pixel_values": (draw.normal(size=(3, 16, 16)) + number % 4).astype(np.float32), '
    '"labels": np.array(number % 4)}'
)
SPEECH = '{"input_features": draw.normal(size=(16, 64)).astype(np.float32), "labels": words(draw)}'
OWN = """
from transformers import WhisperForConditionalGeneration


def build():
    return WhisperForConditionalGeneration.from_pretrained({folder!r})
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, the arrays of its samples, and its task; None: a function of the author's builds it."""

    build: Callable[[Any], Any]
    """transformers → the model."""
    arrays: str
    task: str | None


KINDS = {
    "mixtral": Kind(
        lambda t: t.MixtralForCausalLM(
            t.MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                max_position_embeddings=LENGTH,
            )
        ),
        TEXT,
        "causal-lm",
    ),
    "jamba": Kind(
        lambda t: t.JambaForCausalLM(
            t.JambaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_experts=2,
                num_experts_per_tok=1,
                attn_layer_period=2,
                attn_layer_offset=1,
                expert_layer_period=2,
                expert_layer_offset=1,
                mamba_d_state=4,
                mamba_dt_rank=4,
                max_position_embeddings=LENGTH,
            )
        ),
        TEXT,
        "causal-lm",
    ),
    "t5": Kind(
        lambda t: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=VOCABULARY,
                d_model=WIDTH,
                d_kv=8,
                d_ff=2 * WIDTH,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
            )
        ),
        PAIR,
        "seq2seq",
    ),
    "vit": Kind(
        lambda t: t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                num_labels=4,
            )
        ),
        IMAGE,
        "image-classification",
    ),
    "whisper": Kind(
        lambda t: t.WhisperForConditionalGeneration(
            t.WhisperConfig(
                vocab_size=VOCABULARY,
                d_model=WIDTH,
                num_mel_bins=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=2 * WIDTH,
                decoder_ffn_dim=2 * WIDTH,
                max_source_positions=32,
                max_target_positions=LENGTH,
                decoder_start_token_id=0,
                pad_token_id=0,
                bos_token_id=0,
                eos_token_id=1,
                suppress_tokens=[],
                begin_suppress_tokens=[],
            )
        ),
        SPEECH,
        None,
    ),
}


def hetpeer(*arguments: str) -> None:
    """Give a command; its output is shown if it fails."""
    done = subprocess.run((*COMMAND, *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arguments[0]}: {done.stderr[-2000:]}")


async def train(run: RunDirectory, folder: Path, steps: int) -> None:
    """All steps, with one death."""
    async with running(run, folder, VOLUNTEERS) as swarm:
        await swarm.until(steps * 2 // 5, WITHIN_S)
        swarm.at_liberty.add(KILLED)
        await swarm.kill(KILLED)
        await swarm.start(KILLED)
        await swarm.until(steps, WITHIN_S)
        await swarm.finished([n for n in swarm.volunteers if n != KILLED], WITHIN_S)


def trial(name: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """One kind of model, from its folder to the export."""
    import torch
    import transformers

    kind, model = KINDS[name], folder / "model"
    torch.manual_seed(seed)
    kind.build(transformers).save_pretrained(model)
    text = SAMPLES.replace("{vocabulary}", str(VOCABULARY)).replace("{length}", str(LENGTH))
    (folder / "samples.py").write_text(text.replace("{arrays}", kind.arrays))
    (folder / "own.py").write_text(OWN.replace("{folder!r}", repr(str(model))))
    reference = [f"--model={folder / 'own.py'}:build"]
    if kind.task is not None:
        reference = [f"--model=hf:{model}", f"--task={kind.task}"]
    settings = {
        "steps": steps,
        "batch-size": 8,
        "microbatch-size": 2,
        "learning-rate": 3e-3,
        "eval-every": steps // 2,
        "eval-samples": 8,
        "checkpoint-every": 10,
        "stages": STAGES,
        "seed": seed,
        "data": f"{folder / 'samples.py'}:samples",
    }
    where = str(folder / "run")
    hetpeer(
        "init", where, *reference, "--unchecked", *(f"--{name}={value}" for name, value in settings.items())
    )
    run = RunDirectory.open(folder / "run")
    asyncio.run(train(run, folder, steps))
    hetpeer("export", where, str(folder / "tuned"))
    verdict, again = audit(run.path), replay(run.path)
    losses = History.of(list(read_log(run.log_path))).evaluations
    loaded = held_out_loss(run, getattr(transformers, _class(model)).from_pretrained(folder / "tuned"))
    difference = abs(loaded - losses[steps]) / losses[steps]
    exact = verdict.ok and not again.problems and again.equal == again.steps == steps
    return {
        "model": name,
        "blocks": len(run.manifest.blocks),
        "parameters": run.manifest.parameters,
        "steps": verdict.steps,
        "rollbacks": verdict.rollbacks,
        "held_out_at_first": losses[0],
        "held_out": losses[steps],
        "loaded": loaded,
        "difference": difference,
        "bit_for_bit": f"{again.equal} of {again.steps}",
        "problems": [*verdict.problems, *again.problems][:3],
        "works": exact and difference <= NEAR,
    }


def _class(model: Path) -> str:
    """Name of the class that a folder of transformers says it is of."""
    import json

    (name,) = json.loads((model / "config.json").read_text())["architectures"]
    return str(name)


def measure(options: Any) -> dict[str, Any]:
    """All kinds."""
    trials = []
    for name in options.names or KINDS:
        with tempfile.TemporaryDirectory(prefix="hetpeer-families-") as scratch:
            trials.append(trial(name, Path(scratch), options.steps, options.seed))
        print(name, "works" if trials[-1]["works"] else trials[-1]["problems"], file=sys.stderr, flush=True)
    return {"trials": trials, "met": all(one["works"] for one in trials)}


def show(figures: dict[str, Any]) -> None:
    for one in figures["trials"]:
        print(
            f"{one['model']:8} {one['blocks']:2} blocks, held-out loss {one['held_out_at_first']:.3f} → "
            f"{one['held_out']:.5f}, loaded {one['loaded']:.5f}; {one['bit_for_bit']} steps equal, "
            f"{one['rollbacks']} roll-backs: {'works' if one['works'] else one['problems'] or 'MISSED'}"
        )


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(KINDS)}")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    return report.finish("families", measure(options), options, show)


if __name__ == "__main__":
    sys.exit(main())
