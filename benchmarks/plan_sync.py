"""Plans weight syncs at real sizes: what moves, who is busiest, and how long planning takes.

    python -m benchmarks.plan_sync [--no-flow] [--only TEXT]

Models are configs with published figures (tests/data/model_configs); layouts are those of published
runs and of clusters of 512 and 1,024 ranks. Beside each plan stands the optimum of the busiest
sender by maximum flow, which may divide every piece at will, and what whole weights through rank 0
move: into trainer ranks that each receive the model, out of rank 0 with an object store, once to
each machine, and into receivers with a broadcast.
"""

import argparse
from pathlib import Path

from benchmarks.busiest_sender import optimal_busiest
from offbeat.plugins.planning.grid_text import parse_grid
from offbeat.plugins.planning.sync_plan import SyncLayouts, make_plan
from offbeat.weight_sync.dtypes import WirePolicy

MODELS = Path(__file__).resolve().parents[1] / "tests" / "data" / "model_configs"
MOE = "expert_tensor=1"
CASES = [
    ("qwen3-30b-a3b", f"tensor=4,data=4,expert=8,{MOE}", "tensor=2,data=8"),
    ("qwen3-30b-a3b", "shards=32", "tensor=2,data=8"),
    (
        "qwen3-235b-a22b",
        f"tensor=8,pipeline=4,context=2,expert=16,{MOE},stages=24+24+23+23",
        "tensor=8,data=8",
    ),
    (
        "nemotron-3-ultra-550b",
        f"tensor=8,pipeline=4,expert=16,{MOE},data=2",
        f"tensor=8,data=8,expert=64,{MOE}",
    ),
    (
        "nemotron-3-ultra-550b",
        f"tensor=8,pipeline=2,expert=32,{MOE},data=4",
        f"tensor=8,data=8,expert=64,{MOE}",
    ),
    (
        "nemotron-3-ultra-550b fp8_block",
        f"tensor=8,pipeline=4,expert=32,{MOE},data=16",
        f"tensor=8,data=64,expert=512,{MOE}",
    ),
    (
        "deepseek-v3",
        f"tensor=8,pipeline=4,expert=16,{MOE},data=8,stages=16+15+15+15",
        f"tensor=8,data=32,expert=256,{MOE}",
    ),
    (
        "deepseek-v3",
        f"tensor=8,pipeline=8,expert=64,{MOE},data=8,stages=8+8+8+8+8+7+7+7",
        f"tensor=8,data=64,expert=64,{MOE}",
    ),
    (
        "deepseek-v3 fp8_block",
        f"tensor=8,pipeline=8,expert=64,{MOE},data=8,stages=8+8+8+8+8+7+7+7",
        f"tensor=8,data=64,expert=64,{MOE}",
    ),
]


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-flow", action="store_true", help="without the optimum, which is slow")
    parser.add_argument("--only", default="", help="cases with this text in their model")
    wanted = parser.parse_args()
    head = (
        "model",
        "ranks",
        "tensors",
        "transfers",
        "GB",
        "moved / needed",
        "busiest GB",
        "/ optimum",
        "plan s",
        "gathered GB",
        "rank 0 sends GB",
        "broadcast GB",
    )
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for case, senders, receivers in CASES:
        model, _, quantize = case.partition(" ")
        if wanted.only not in case:
            continue
        layouts = SyncLayouts(
            MODELS / f"{model}.json",
            WirePolicy(quantize="fp8_block" if quantize else None),
            parse_grid(senders),
            parse_grid(receivers),
            ranks_per_machine=8,
            max_piece_bytes=64 << 20,
        )
        plan, report = make_plan(layouts)
        found = report.bytes
        optimum = "-"
        if not wanted.no_flow:
            optimum = f"{found.busiest / optimal_busiest(plan, 1e-3):.3f}"
        row = (
            case,
            f"{layouts.senders.ranks} + {layouts.receivers.ranks}",
            f"{report.tensors:,}",
            f"{report.transfers:,}",
            f"{found.model / 1e9:,.1f}",
            f"{found.ratio:.2f}",
            f"{found.busiest / 1e9:,.2f}",
            optimum,
            f"{report.seconds:.1f}",
            f"{report.gathered / 1e9:,.0f}",
            f"{report.stored / 1e9:,.0f}",
            f"{report.broadcast / 1e9:,.0f}",
        )
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
