"""Cost of planning: cutting a model that no home machine could hold, without its weights.

Each model is planned by the user's own command, `hetpeer inspect FILE:FUNCTION --json`, in a process of its
own; counted are its CPU seconds and its largest resident memory, imports included.

    python -m benchmarks.planning
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks import report
from benchmarks.counted import counted, cpu_s
from hetpeer.examples import gpt

MODELS = {
    "GPT 1.3B, 24 layers": f"{gpt.__file__}:{gpt.build_1b3.__name__}",
    "GPT 7B, 32 layers": f"{gpt.__file__}:{gpt.build_7b.__name__}",
}
GOAL_CPU_S, GOAL_RSS_GIB = 60.0, 3.0


def plan(model: str, options: Any) -> dict[str, Any]:
    """One process; what it says and what it took."""
    arguments = [
        "--microbatch-size",
        options.batch,
        "--sequence-length",
        options.tokens,
        "--stages",
        options.stages,
    ]
    began = time.monotonic()
    found, usage = counted("inspect", model, "--json", *map(str, arguments))
    (layout,) = found["layouts"]
    return {
        "parameters": found["parameters"],
        "blocks": len(found["blocks"]),
        "flops_forward": sum(block["flops_forward"] for block in found["blocks"]),
        "flops_backward": sum(block["flops_backward"] for block in found["blocks"]),
        "stages": [
            {
                "blocks": [stage["begin"], stage["end"]],
                "sent_bytes": sum(stage["leaves"].values()),
                "peak_gib": round(stage["memory"]["total"] / 2**30, 2),
            }
            for stage in layout
        ],
        "cpu_s": round(cpu_s(usage), 1),
        "wall_s": round(time.monotonic() - began, 1),
        "rss_gib": round(usage.ru_maxrss / 2**20, 2),
    }


def show(figures: dict[str, Any]) -> None:
    for name, model in figures["models"].items():
        print(
            f"{name}: {model['parameters'] / 1e9:.2f} billion parameters in {model['blocks']} blocks, "
            f"{model['cpu_s']:.0f} CPU seconds, {model['rss_gib']:.2f} GiB"
        )
        for number, stage in enumerate(model["stages"]):
            begin, end = stage["blocks"]
            print(
                f"  stage {number}: blocks {begin}-{end - 1}, sends {stage['sent_bytes'] / 2**20:.0f} MiB, "
                f"takes {stage['peak_gib']:.1f} GiB"
            )
    print(
        f"goal: {GOAL_CPU_S:.0f} CPU seconds, {GOAL_RSS_GIB:.0f} GiB: {'met' if figures['met'] else 'MISSED'}"
    )


def main() -> int:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--batch", type=int, default=2, help="samples of a microbatch (default: 2)")
    parser.add_argument("--tokens", type=int, default=2048, help="of one sample (default: 2048)")
    parser.add_argument("--stages", type=int, default=4, help="of the pipeline (default: 4)")
    options = parser.parse_args()
    models = {name: plan(model, options) for name, model in MODELS.items()}
    met = all(model["cpu_s"] <= GOAL_CPU_S and model["rss_gib"] <= GOAL_RSS_GIB for model in models.values())
    figures = {"batch": options.batch, "tokens": options.tokens, "models": models, "met": met}
    return report.finish("planning", figures, options, show)


if __name__ == "__main__":
    sys.exit(main())
