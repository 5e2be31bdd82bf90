"""Architectures of transformers as runs: small random configurations against their own eager training.

Each is traced, cut and compared on one microbatch as `init` does it, in a process of its own with bounded
time and memory. Writes benchmarks/results/zoo.json and docs/models.md.

    python -m benchmarks.zoo [NAME …] [--family FAMILY]
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.zoo_table import FAMILIES, SETTINGS, SIZES
from hetpeer.dht.base.errors import LocalError

TIME_S = 240.0
"""Seconds of one architecture."""
REASON = 150
"""Characters of a reason on the page."""
MEMORY = 8 << 30
"""Bytes of one architecture's process."""
SAMPLES, LENGTH = 4, 16
PAGE = Path(__file__).parents[1] / "docs" / "models.md"

Data = dict[str, Tensor]


class Loss(nn.Module):
    """A model of transformers as a function of its arrays that returns the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arrays: Tensor) -> Tensor:
        return self.model(**arrays).loss  # type: ignore[no-any-return]


def small(kind: type[Any], own: Mapping[str, Any]) -> Any:
    """A new small configuration of a class: `SIZES` where it has them, then `own`."""
    usual = kind()
    settings = {
        name: size for name, size in SIZES.items() if isinstance(getattr(usual, name, None), (int, float))
    }
    for name, part in vars(usual).items():
        if hasattr(part, "to_dict"):
            settings[name] = small(type(part), own.get(name, {})).to_dict()
    return kind(**(settings | own))


# ── Tasks ──────────────────────────────────────────────────────────────────────────────────────────────────


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, 128, (SAMPLES, length))


def _causal(_: Any) -> Data:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens.clone()}


def _seq2seq(_: Any) -> Data:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _sequence(_: Any) -> Data:
    return {"input_ids": _tokens(), "labels": torch.arange(SAMPLES) % 2}


def _per_token(_: Any) -> Data:
    return {"input_ids": _tokens(), "labels": _tokens() % 2}


def _answers(_: Any) -> Data:
    ends = torch.arange(SAMPLES)
    return {"input_ids": _tokens(), "start_positions": ends, "end_positions": ends + 3}


def _pixels(config: Any) -> Tensor:
    size = getattr(config, "image_size", 32)
    return torch.randn(SAMPLES, 3, *(size if isinstance(size, (list, tuple)) else (size, size)))


def _image(config: Any) -> Data:
    return {"pixel_values": _pixels(config), "labels": torch.arange(SAMPLES) % 2}


def _audio(config: Any) -> Data:
    values = torch.randn(SAMPLES, config.max_length, config.num_mel_bins)
    return {"input_values": values, "labels": torch.arange(SAMPLES) % 2}


def _ctc(_: Any) -> Data:
    return {"input_values": torch.randn(SAMPLES, 4000), "labels": torch.randint(3, 30, (SAMPLES, 4))}


def _speech(config: Any) -> Data:
    frames = 2 * config.max_source_positions
    shape = (config.num_mel_bins, frames) if config.model_type == "whisper" else (frames, 80)
    return {"input_features": torch.randn(SAMPLES, *shape), "labels": _tokens()}


def _raw_speech(_: Any) -> Data:
    return {"input_values": torch.randn(SAMPLES, 4000), "labels": _tokens()}


def _contrast(config: Any) -> Data:
    return {"input_ids": _tokens(), "pixel_values": _pixels(config.vision_config)}


def _series(config: Any) -> Data:
    past = torch.randn(SAMPLES, config.context_length, config.num_input_channels)
    return {
        "past_values": past,
        "future_values": torch.randn(SAMPLES, config.prediction_length, past.shape[2]),
    }


def _image_text(config: Any) -> Data:
    tokens = _tokens(32)
    vision = config.vision_config
    tokens[:, : (vision.image_size // vision.patch_size) ** 2] = config.image_token_id
    return {"input_ids": tokens, "pixel_values": _pixels(vision), "labels": tokens.clone()}


def _pretraining(config: Any) -> Data:
    if config.model_type == "videomae":
        patches = (config.image_size // config.patch_size) ** 2 * config.num_frames // config.tubelet_size
        video = torch.randn(SAMPLES, config.num_frames, 3, config.image_size, config.image_size)
        mask = torch.zeros(SAMPLES, patches, dtype=torch.bool)
        mask[:, ::2] = True
        return {"pixel_values": video, "bool_masked_pos": mask}
    return {"pixel_values": _pixels(config)}


TASKS: Mapping[str, tuple[str, Callable[[Any], Data], Mapping[str, Any]]] = {
    "causal": ("AutoModelForCausalLM", _causal, {}),
    "masked": ("AutoModelForMaskedLM", _causal, {}),
    "seq2seq": ("AutoModelForSeq2SeqLM", _seq2seq, {"decoder_start_token_id": 0}),
    "image": ("AutoModelForImageClassification", _image, {"num_labels": 2}),
    "audio": ("AutoModelForAudioClassification", _audio, {"num_labels": 2, "max_length": 64}),
    "ctc": ("AutoModelForCTC", _ctc, {"ctc_zero_infinity": True, "mask_time_prob": 0.0}),
    "speech": ("AutoModelForSpeechSeq2Seq", _speech, {}),
    "raw-speech": ("AutoModelForSpeechSeq2Seq", _raw_speech, {}),
    "contrast": ("AutoModel", _contrast, {}),
    "series": ("AutoModel", _series, {"context_length": 32, "prediction_length": 8, "num_input_channels": 2}),
    "image-text": ("AutoModelForImageTextToText", _image_text, {}),
    "pretraining": ("AutoModelForPreTraining", _pretraining, {}),
    "sequence": ("AutoModelForSequenceClassification", _sequence, {"num_labels": 2}),
    "tokens": ("AutoModelForTokenClassification", _per_token, {"num_labels": 2}),
    "answers": ("AutoModelForQuestionAnswering", _answers, {}),
    "lora": ("AutoModelForCausalLM", _causal, {}),
    "dora": ("AutoModelForCausalLM", _causal, {}),
}
"""Task → the class of transformers, a microbatch for a configuration, settings."""


def make(name: str, task: str) -> tuple[nn.Module, Data]:
    """A small model of an architecture, and a microbatch for it."""
    import transformers

    auto, data, usual = TASKS[task]
    own = {**usual, **SETTINGS.get(name, {}), **SETTINGS.get(f"{name}:{task}", {})}
    config = small(transformers.CONFIG_MAPPING[name], own)
    torch.manual_seed(0)
    model_class: Any = SERIES.get(name) if task == "series" else auto
    loader = getattr(transformers, model_class)
    # from_config keeps and changes the configuration that it gets
    kept = copy.deepcopy(config)
    model = loader.from_config(kept) if hasattr(loader, "from_config") else loader(kept)
    if task in ("lora", "dora"):
        import peft

        settings = peft.LoraConfig(
            r=4, target_modules="all-linear", use_dora=task == "dora", lora_dropout=0.1
        )
        model = peft.get_peft_model(model, settings)
    extra = data(config)
    if task == "contrast":
        model = _Contrast(model)
    return Loss(model), extra


SERIES = {"patchtst": "PatchTSTForPrediction", "patchtsmixer": "PatchTSMixerForPrediction"}


class _Contrast(nn.Module):
    """A model of two senses that is asked for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arrays: Tensor) -> Any:
        return self.model(**arrays, return_loss=True)


# ── One architecture ───────────────────────────────────────────────────────────────────────────────────────


def attempt(name: str, task: str) -> dict[str, Any]:
    """Result of an architecture: whether it works, else why not; differences from eager training."""
    from hetpeer.bootstrap.authoring.equivalence import check_likeness, compare
    from hetpeer.stages.tracing.cut import cut_blocks
    from hetpeer.stages.tracing.trace import trace

    try:
        model, example = make(name, task)
        model.train()
        model(**example).backward()
        model.zero_grad(set_to_none=True)
    except Exception as error:  # noqa: BLE001 - the zoo's own configuration may be wrong in any way
        return {"eager": False, "why": f"{type(error).__name__}: {error}"[:300]}
    began = time.monotonic()
    try:
        dag = trace(model, example)
        specs = cut_blocks(dag)
        check_likeness(model, example, dag, specs)
        loss, gradient = compare(model, example, dag, specs).worst()
    except LocalError as error:
        return {"works": False, "code": error.code, "why": f"{error.what}: {error.why}"}
    return {
        "works": True,
        "loss": loss,
        "gradient": gradient,
        "blocks": len(specs),
        "operators": len(dag.nodes),
        "seconds": round(time.monotonic() - began, 1),
    }


def _child(name: str, task: str, answers: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with (
        Path("/dev/null").open("w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        try:
            answer = attempt(name, task)
        except Exception as error:  # noqa: BLE001 - a fault of ours is a finding
            answer = {"works": False, "why": f"{type(error).__name__}: {error}"[:300]}
    answers.send(answer)


def bounded(name: str, task: str) -> dict[str, Any]:
    """`attempt` in a process of its own, which is ended after `TIME_S` seconds."""
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, task, theirs))
    process.start()
    theirs.close()
    try:
        if not mine.poll(TIME_S):
            return {"works": False, "why": f"not done within {TIME_S:.0f} s"}
        return mine.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return {"works": False, "why": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def entries(family: str | None, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(family, name, task) of the table, or of those asked for."""
    for title, (usual, listed) in FAMILIES.items():
        for entry in listed.split():
            name, _, task = entry.partition(":")
            if family in (None, title) and (not names or name in names or entry in names):
                yield title, name, task or usual


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of docs/models.md."""
    import transformers

    lines = [
        "# Architectures that were tried",
        "",
        "Made by `make zoo` (`benchmarks/zoo.py`); not edited by hand. Small random configurations of",
        f"transformers {transformers.__version__} with torch {torch.__version__}: each is traced, cut",
        "and compared on one microbatch with the eager module. Figures: the largest relative differences of",
        "the loss and of a parameter's gradient. Layer drop is off: a layer left out at random is no",
        "operator.",
        "",
        "| family | works | tried |",
        "| --- | --- | --- |",
    ]
    for family in FAMILIES:
        found = [row for row in rows if row["family"] == family and row.get("eager", True)]
        lines.append(f"| {family} | {sum(row['works'] for row in found)} | {len(found)} |")
    for family in FAMILIES:
        lines += ["", f"## {family[0].upper()}{family[1:]}", "", "| model | result | loss | gradient |"]
        lines.append("| --- | --- | --- | --- |")
        for row in rows:
            if row["family"] == family and row.get("eager", True):
                if row["works"]:
                    result = f"works | {row['loss']:.0e} | {row['gradient']:.0e}"
                else:
                    result = f"{_short(row['why'])} | |"
                lines.append(f"| {row['name']} ({row['task']}) | {result}{'' if not row['works'] else ' |'}")
    return "\n".join(lines) + "\n"


def _short(why: str) -> str:
    """A reason for a table's cell: without paths, at most one line."""
    said = re.sub(r",? (at )?/\S+", "", why).replace("|", "/").replace("\n", " ")
    return said if len(said) <= REASON else said[: REASON - 1] + "…"


def main() -> int:
    options = report.parser(__doc__ or "")
    options.add_argument(
        "names", nargs="*", metavar="NAME", help="these alone; the others keep their results"
    )
    options.add_argument("--family", choices=FAMILIES)
    options.add_argument("--jobs", type=int, default=2)
    asked = options.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.zoo_preload"])
    kept = report.FOLDER / "zoo.json"
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    if (asked.names or asked.family) and kept.exists():
        rows = {(r["family"], r["name"], r["task"]): r for r in json.loads(kept.read_text())["rows"]}

    def row(entry: tuple[str, str, str]) -> None:
        family, name, task = entry
        rows[entry] = {"family": family, "name": name, "task": task, **bounded(name, task)}
        said = "works" if rows[entry].get("works") else rows[entry]["why"]
        print(f"{family} | {name}:{task} | {said}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(asked.jobs) as pool:
        for _ in pool.map(row, entries(asked.family, asked.names)):
            listed = [rows[entry] for entry in entries(None, []) if entry in rows]
            report.keep("zoo", {"rows": listed}, seed=asked.seed)  # after each: Ctrl-C loses nothing
    PAGE.write_text(page(listed))
    if asked.json:
        print(json.dumps(listed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
