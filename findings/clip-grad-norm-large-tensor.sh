#!/usr/bin/env bash
# Guess: after clip_grad_norm_(parameters, 1.0) the gradients of a model have 2-norm 1, to float32's six digits, whatever the size of its largest tensor.
# True: on a processor torch 2.13.0 adds a tensor's squares in a few float32 sums, one number after the other: of 38.6 million numbers (GPT-2's table of tokens) the norm comes out 0.3 % too small, of 155.6 million 2 %, and so much too much is left of all gradients. With squares added up in float64, or with x.square().sum().sqrt(), it is right.
# Hurts: whoever compares a clipped run on processors with one on a GPU, with a model in shards or with a pipeline: their losses part step by step; and whoever logs gradient norms.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch

torch.manual_seed(0)
off = {}
for numbers in (3_000, 38_600_000, 155_648_000):
    table = torch.nn.Parameter(torch.empty(0))
    table.data = torch.zeros(numbers)
    table.grad = torch.randn(numbers)
    told = torch.nn.utils.clip_grad_norm_([table], 1.0).item()
    left = torch.linalg.vector_norm(table.grad, dtype=torch.float64).item()
    off[numbers] = left - 1.0
    print(f"torch {torch.__version__}, {numbers:,} gradients: norm {told:.6g}, after clipping to 1 it is {left:.6f}")
assert abs(off[3_000]) < 1e-6
assert off[38_600_000] > 1e-3
assert off[155_648_000] > 1e-2
PY
