#!/usr/bin/env bash
# Guess: under FakeTensorMode an embedding with sparse=True goes backward as a dense one does, with or without a padding_idx: no number is needed to know the gradient's memory.
# True: torch 2.13.0 makes the fake sparse gradient without a padding_idx, but with one the backward drops the padded tokens by their values and raises DynamicOutputShapeException; the dense embedding works with both.
# Hurts: those who estimate the memory of a training step without running it (fake tensors, memory trackers): BERT's word embedding has a padding_idx, GPT-2's has none, so the estimate works on one model and fails on the other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode


def gradient(sparse, padding):
    with FakeTensorMode():
        table = nn.Embedding(100, 8, padding_idx=padding, sparse=sparse)
        out = table(torch.randint(0, 100, (2, 30)))
        try:
            (found,) = torch.autograd.grad(out, table.weight, torch.empty_like(out))
        except DynamicOutputShapeException as error:
            return type(error).__name__
        return f"sparse, {found._values().shape[0]} rows" if found.is_sparse else "dense"


seen = {(sparse, padding): gradient(sparse, padding) for sparse in (False, True) for padding in (None, 0)}
print(f"torch {torch.__version__}, gradient of a fake embedding:")
for (sparse, padding), what in seen.items():
    print(f"  sparse={sparse}, padding_idx={padding}: {what}")
assert seen == {
    (False, None): "dense",
    (False, 0): "dense",
    (True, None): "sparse, 60 rows",
    (True, 0): "DynamicOutputShapeException",
}, seen
PY
