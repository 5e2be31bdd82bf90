"""The run of benchmarks/finetune.py again by transformers' Trainer, in one process:
`python -m benchmarks.finetune_trainer RUN MODEL TUNED OUT.json`.

The samples come in the run's order, in microbatches of its size, which Trainer accumulates. Then the held-out
loss is computed of the result, and of the model in the folder TUNED, and both answer a few questions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hetpeer.bootstrap.run.run_directory import RunDirectory

ANSWER_TOKENS = 24


class InOrder(Trainer):
    """Trainer that takes the samples as they come."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Samples(Dataset[dict[str, Tensor]]):
    """Training samples of a run in the order of its steps."""

    def __init__(self, run: RunDirectory) -> None:
        plan, reader = run.manifest.data_plan, run.batches()
        steps, numbers = run.manifest.training.steps, range(plan.microbatches)
        parts = (reader.microbatch(step, number) for step in range(steps) for number in numbers)
        self._rows = [row for part in parts for row in _rows(part)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return self._rows[at]


def _rows(arrays: Any) -> Iterator[dict[str, Tensor]]:
    for row in range(len(next(iter(arrays.values())))):
        yield {name: torch.from_numpy(array[row].copy()) for name, array in arrays.items()}


def trained(run: RunDirectory, folder: Path, scratch: Path) -> Any:
    """The model of `folder`, trained as the run says."""
    training = run.manifest.training
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(scratch),
        per_device_train_batch_size=training.microbatch_size,
        gradient_accumulation_steps=training.microbatches,
        max_steps=training.steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=training.weight_decay,
        adam_beta1=training.optimizer.betas[0],
        adam_beta2=training.optimizer.betas[1],
        adam_epsilon=training.optimizer.eps,
        max_grad_norm=training.clip_norm or 0.0,
        seed=run.manifest.seed,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    InOrder(model=model, args=arguments, train_dataset=Samples(run)).train()
    return model


@torch.no_grad()
def held_out_loss(run: RunDirectory, model: Any) -> float:
    """Mean loss of the targets of the samples that an evaluation of the run has."""
    reader, plan = run.batches(), run.manifest.data_plan
    model.eval()
    total, targets = 0.0, 0
    for number in plan.evaluation:
        part = {name: torch.from_numpy(array) for name, array in reader.microbatch(0, number).items()}
        count = int((part["labels"][:, 1:] != -100).sum())
        if count:
            # With a cache, which is the default, transformers would not keep packed documents apart.
            total += float(model(**part, use_cache=False).loss) * count
            targets += count
    return total / targets


def answers(model: Any, folder: Path, questions: list[str]) -> list[str]:
    """Likeliest answers to `questions`."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(asked, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def main(run_path: str, folder: str, tuned_path: str, out: str, *questions: str) -> None:
    """Train, compare and write the figures to `out`."""
    torch.set_num_threads(2)
    run, asked = RunDirectory.open(Path(run_path)), [*questions]
    own = trained(run, Path(folder), Path(out).with_suffix(".trainer"))
    tuned = AutoModelForCausalLM.from_pretrained(tuned_path, dtype=torch.float32)
    figures = {
        "trainer": held_out_loss(run, own),
        "tuned": held_out_loss(run, tuned),
        "answers": {
            "trainer": answers(own, Path(folder), asked),
            "tuned": answers(tuned, Path(tuned_path), asked),
        },
    }
    Path(out).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
