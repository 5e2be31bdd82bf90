#!/usr/bin/env bash
# Guess: position_ids that begin at 0 with each document keep packed documents apart in every forward pass.
# True: transformers 5.23.0 derives the borders only without a cache, and use_cache is on by default, in train() and eval() alike.
# Hurts: training loops and evaluations of packed samples outside of Trainer (which turns the cache off): each document sees those before it, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32,
)
model = LlamaForCausalLM(config)
first, other, second = (torch.randint(0, 64, (1, 8)) for _ in range(3))
places = torch.cat([torch.arange(8), torch.arange(8)]).unsqueeze(0)


def of_second(before, **options):
    """Logits of the second document behind `before`."""
    packed = torch.cat([before, second], dim=1)
    return model(input_ids=packed, position_ids=places, **options).logits[:, 8:]


seen = {}
with torch.no_grad():
    for mode, options in (("train", {}), ("eval", {}), ("eval", {"use_cache": False})):
        model.train(mode == "train")
        change = (of_second(first, **options) - of_second(other, **options)).abs().max().item()
        seen[mode, *options] = change
        print(f"{mode:5} {options}: the second document's logits change by {change:.3g} with the first document")
assert seen["train",] > 0.01, seen
assert seen["eval",] > 0.01, seen
assert seen["eval", "use_cache"] == 0, seen
print("seen: packed documents are apart only with use_cache=False")
PY
