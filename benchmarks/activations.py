"""Estimated beside measured memory of a microbatch: forward and backward pass of the torch trainer.

    python benchmarks/activations.py MODEL [MODEL ...]

Each case runs in a process of its own: once to allocate gradients, then the pass whose growth of
resident memory is measured. The allocator of glibc keeps freed blocks of up to 32 MiB, which other
passes would use again; with a fixed MALLOC_MMAP_THRESHOLD_ it returns them, and resident memory is
what is alive.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.memory import ResidentMeter
from offbeat.trainers.torch.activation_bytes import activation_bytes, largest_microbatch
from offbeat.trainers.torch.forward import compute_packed_logprobs_and_entropies
from offbeat.trainers.torch.model import recompute_layers
from offbeat.trainers.torch.proof import RowProof

THRESHOLD: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Case:
    """One microbatch of a model cut to a few layers."""

    layers: int
    samples: int
    prompt: int
    response: int
    recompute: bool
    chunked_head: bool


CASES: Final = (
    Case(6, 4, 128, 256, recompute=False, chunked_head=True),
    Case(6, 4, 128, 256, recompute=True, chunked_head=True),
    Case(3, 4, 128, 1000, recompute=False, chunked_head=True),
    Case(3, 4, 128, 1000, recompute=False, chunked_head=False),
    Case(3, 4, 128, 1000, recompute=True, chunked_head=True),
)


def measured(model: str, case: Case) -> dict[str, Any]:
    """Return estimate and measurement of a case, from a process of its own, in bytes."""
    task = json.dumps({"model": model, "case": asdict(case)})
    done = subprocess.run(
        [sys.executable, __file__, "--case", task],
        env=os.environ | THRESHOLD,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _run(model: str, case: Case) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers = case.layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: case.layers]
    tokens = case.samples * case.response
    group = {
        "prompt_ids": np.zeros(case.prompt, np.int32),
        "response_ids": np.zeros(tokens, np.int32),
        "response_offsets": np.arange(case.samples + 1, dtype=np.int64) * case.response,
        "loss_mask": np.ones(tokens, np.bool_),
    }
    trainer = TorchTrainerConfig(
        max_tokens_per_microbatch=1 << 20, activation_checkpointing=case.recompute
    )
    proof = RowProof("sdpa", shared_prompt=True, plain_head=case.chunked_head)
    found = activation_bytes(config, [group], trainer, torch.float32, proof)
    if found is None:
        raise SystemExit(f"{model} has no estimate")
    estimate, shape = found
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if case.recompute:
        recompute_layers(module)
    packed = largest_microbatch(module, [group], trainer, proof)

    def both_passes() -> None:
        logprobs, entropies = compute_packed_logprobs_and_entropies(
            module, packed, 1.0, plain_head=proof.plain_head
        )
        (logprobs.sum() + entropies.sum()).backward()

    both_passes()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    meter = ResidentMeter()
    meter.start()
    before = meter.peak()
    both_passes()
    return {"estimate": estimate, "measured": meter.peak() - before, "shape": shape}


def main() -> None:
    """Print a line per case, or measure the one that is named."""
    if sys.argv[1] == "--case":
        task = json.loads(sys.argv[2])
        print(json.dumps(_run(task["model"], Case(**task["case"]))))
        return
    print(
        "| model | layers, microbatch | recomputed | head | estimate, MiB | measured, MiB | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for model in sys.argv[1:]:
        for case in CASES:
            found = measured(model, case)
            rows, tokens = found["shape"]
            ratio = found["estimate"] / found["measured"]
            head = "chunked" if case.chunked_head else "whole"
            recomputed = "yes" if case.recompute else "no"
            print(
                f"| {Path(model).name} | {case.layers}, {rows} x {tokens} | {recomputed} | {head} | "
                f"{found['estimate'] / _MIB:.0f} | {found['measured'] / _MIB:.0f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    main()
