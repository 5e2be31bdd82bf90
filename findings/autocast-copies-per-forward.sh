#!/usr/bin/env bash
# Guess: autocast casts a weight once and caches it, so three microbatches between forward and backward share one bfloat16 copy of the weights.
# True: torch 2.13.0 drops the cache at the end of each autocast region: with a region for each forward, as the docs show it, autograd keeps a copy for each microbatch (6 bytes a parameter for three), and one copy only if one region spans all forwards.
# Hurts: pipelines with microbatches in flight (1F1B, GPipe): with seven of them bfloat16 autocast keeps 14 bytes a parameter that no memory estimate of weights, gradients and optimizer counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn

WIDTH, LAYERS, MICROBATCHES = 512, 4, 3
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
parameters = sum(p.numel() for p in model.parameters())
kept = {}


def keep(tensor):
    kept[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def bytes_of_copies(regions):
    kept.clear()
    x = torch.randn(1, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if regions == 1:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = [model(x) for _ in range(MICROBATCHES)]
        else:
            outputs = []
            for _ in range(MICROBATCHES):
                with torch.autocast("cpu", torch.bfloat16):
                    outputs.append(model(x))
    weights = [t for t in kept.values() if t.dtype == torch.bfloat16 and t.untyped_storage().nbytes() == 2 * WIDTH**2]
    sum(out.float().sum() for out in outputs).backward()
    return sum(t.untyped_storage().nbytes() for t in weights) / parameters


together, apart = bytes_of_copies(1), bytes_of_copies(MICROBATCHES)
print(f"torch {torch.__version__}: bytes a parameter of bfloat16 copies kept for {MICROBATCHES} microbatches:")
print(f"  one region around all forwards: {together:g}; a region for each forward: {apart:g}")
assert (together, apart) == (2.0, 6.0)
PY
