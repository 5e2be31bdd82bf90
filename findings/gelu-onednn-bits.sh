#!/usr/bin/env bash
# Guess: ATEN_CPU_CAPABILITY=avx2 makes torch on an AVX-512 processor give the numbers of an AVX2 one, above all in elementwise functions, which are ATen's own.
# True: torch 2.13.0 (CPU build) hands float32 gelu to oneDNN, so only ONEDNN_MAX_CPU_ISA changes its bits; softmax follows ATEN_CPU_CAPABILITY alone, and gelu's backward has the same bits in all three runs.
# Hurts: anybody who checks on one machine that a result repeats on another processor: a transformer's gelu keeps its AVX-512 bits, the check passes, and the other machine differs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/bits.py" <<'PY'
import hashlib
import json

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(64, 257, requires_grad=True)
gelu = torch.nn.functional.gelu(x)
(back,) = torch.autograd.grad(gelu.sum(), x)
found = {"gelu": gelu, "gelu backward": back, "softmax": x.softmax(-1)}
print(json.dumps({name: hashlib.sha256(t.detach().numpy().tobytes()).hexdigest()[:12] for name, t in found.items()}
                 | {"capability": torch.backends.cpu.get_cpu_capability()}))
PY
run() { env "$@" "$folder/venv/bin/python" "$folder/bits.py"; }
run LC_ALL=C > "$folder/native"
run ATEN_CPU_CAPABILITY=avx2 > "$folder/aten"
run ONEDNN_MAX_CPU_ISA=AVX2 > "$folder/onednn"
"$folder/venv/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

native, aten, onednn = (json.loads((Path(sys.argv[1]) / name).read_text()) for name in ("native", "aten", "onednn"))
if native["capability"] != "AVX512":
    sys.exit("this needs a processor with AVX-512")
print("torch 2.13.0; bits that change with ATEN_CPU_CAPABILITY=avx2, with ONEDNN_MAX_CPU_ISA=AVX2:")
seen = {name: (native[name] != aten[name], native[name] != onednn[name]) for name in native if name != "capability"}
for name, changed in seen.items():
    print(f"  {name}: {changed[0]}, {changed[1]}")
assert seen == {"gelu": (False, True), "gelu backward": (False, False), "softmax": (True, False)}, seen
PY
