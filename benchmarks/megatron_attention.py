"""Measures memory and time of the megatron trainer's attention, next to the library's own.

    OMP_NUM_THREADS=1 python -m benchmarks.megatron_attention             # 2k, 4k and 8k tokens
    OMP_NUM_THREADS=1 python -m benchmarks.megatron_attention --plain     # rows of one sample

One decoder layer of megatron-core in float32 on the CPU, forward and backward, over one row of so many
tokens: a prompt of a quarter of them, shared by three branches. *Ours* attends segment by segment;
*library* is ``DotProductAttention``, under a mask of tokens squared. Each length and side has a process
for itself, one after the other, with the same weights and inputs. Printed are the median seconds
of CPU of the rounds after the first, and the peak of resident memory above the built layer.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# megatron-core has no types.

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any, Final

import numpy as np
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from offbeat.plugins.megatron.architecture import Architecture
from offbeat.plugins.megatron.cpu_shim import cpu_stands_in
from offbeat.plugins.megatron.groups import start_groups
from offbeat.plugins.megatron.model import build_model, transformer_config
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.batches.packing import visible
from offbeat.trainers.memory import ResidentMeter
from offbeat.trainers.ranks.peers import SingleRank

SIDES: Final = ("ours", "library")
LENGTHS: Final = (2048, 4096, 8192)
BRANCHES: Final = 3
HIDDEN: Final = 256
_MIB: Final = 2**20


def main() -> None:
    """Measure the lengths that the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    if options.side:
        found = measure(options.side, options.lengths[0], options.rounds, plain=options.plain)
        json.dump(found, sys.stdout)
        return
    for tokens in options.lengths:
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.megatron_attention", "--side", side]
            command += ["--lengths", str(tokens), "--rounds", str(options.rounds)]
            command += ["--plain"] * options.plain
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{side:8} {tokens:6} tokens {seen['cpu_s']:7.2f} s {seen['peak_mib']:7.0f} MiB",
                flush=True,
            )


def measure(side: str, tokens: int, rounds: int, *, plain: bool) -> dict[str, float]:
    """Return seconds of CPU and peak MiB of one layer, forward and backward."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with cpu_stands_in("cpu"):
        model = make_model(tokens)
        layer = model.decoder.layers[0]
        segments_RT = np.repeat(np.arange(1 + BRANCHES), tokens // (1 + BRANCHES))[None]
        mask = None if plain else torch.from_numpy(segments_RT)
        if side == "library":
            layer.self_attention.core_attention = DotProductAttention(
                model.config, 1, AttnMaskType.causal, "self"
            )
            mask = None if plain else ~torch.from_numpy(visible(segments_RT))[:, None]
        angles = model.rotary_pos_emb(tokens)
        hidden = torch.randn(tokens, 1, HIDDEN, requires_grad=True)
        gradient = torch.randn(tokens, 1, HIDDEN)

        def work() -> Tensor:
            out, _ = layer(hidden, attention_mask=mask, rotary_pos_emb=angles)
            out.backward(gradient)
            return out

        meter, spent = ResidentMeter(), list[float]()
        meter.start()
        before = meter.peak()
        for _ in range(rounds + 1):
            began = time.process_time()
            work()
            spent.append(time.process_time() - began)
        peak = meter.peak()
    return {"cpu_s": statistics.median(spent[1:]), "peak_mib": (peak - before) / _MIB}


def make_model(tokens: int) -> Any:  # noqa: ANN401 -- megatron-core has no types
    """Return a model of one layer with random weights: 8 heads of 32 dimensions, 2 of keys."""
    architecture = Architecture(
        name="one layer",
        layers=1,
        hidden=HIDDEN,
        heads=8,
        groups=2,
        head_dim=HIDDEN // 8,
        intermediate=3 * HIDDEN,
        vocabulary=64,
        max_positions=tokens,
        norm_eps=1e-6,
        rope_theta=1e4,
        tied=True,
    )
    layout = start_groups(MegatronTrainerConfig(backend="megatron", device="cpu"), SingleRank())
    config = transformer_config(architecture, layout, torch.float32)
    model = build_model(architecture, config, layout, seed=0)
    torch.manual_seed(0)
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.02)
    return model


if __name__ == "__main__":
    main()
